"""A run again from its record: its code in a fresh folder, and what differs from then."""
