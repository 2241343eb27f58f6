"""A device that is a CPU and behaves as a GPU does: what is asked of it happens later, on streams."""
