"""A training loop of the user's own: several models and optimizers, own backward passes, one transaction for each step."""
