"""Snapshots in an object store: copied there during training, and brought from there to an empty disk."""
