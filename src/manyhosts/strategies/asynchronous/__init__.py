"""Strategies in which each micro-batch is an update of its own, and all workers synchronise at the end of a step."""
