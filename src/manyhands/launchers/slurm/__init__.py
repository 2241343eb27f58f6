"""Nodes that Slurm gives."""
