"""Which samples each step takes, and how they are fetched."""
