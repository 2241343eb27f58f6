"""A step: what it computes, what is due after it, and when a run ends."""
