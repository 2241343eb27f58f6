"""The model and its optimizer: what they are, what they hold, and what they take; no run is needed to know it."""
