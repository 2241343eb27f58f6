"""Ways to spread one optimizer step over workers."""
