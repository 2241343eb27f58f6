"""Layers cut over workers: each computes its part of every layer, of the same samples."""
