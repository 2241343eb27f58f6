"""Fully sharded data parallelism, on PyTorch's FSDP2."""
