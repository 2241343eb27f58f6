"""Snapshots in an object store: copied there beside training, and brought from there to an empty disk."""
