"""Hyperparameter search within a budget: Optuna chooses the settings, `trials` runs them, the budget ends it."""
