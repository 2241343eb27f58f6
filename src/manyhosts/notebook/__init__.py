"""Workers started from Python: from a notebook's cell, or a program of one's own."""
