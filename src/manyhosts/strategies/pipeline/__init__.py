"""A model over stages: each worker computes some of its blocks, for one micro-batch after another."""
