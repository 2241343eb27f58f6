"""Those who are told what happens in a run: progress, metrics, TensorBoard."""
