"""A training loop of the user's own: several models and optimizers, one transaction for each step."""
