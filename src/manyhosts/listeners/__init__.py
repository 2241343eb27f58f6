"""Observers of what happens in a run: progress, metrics, TensorBoard."""
