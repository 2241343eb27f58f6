"""Each sample once: evaluation, metrics, prediction."""
