"""An honest look at a trained model: held-out data, with intervals, by class, and one model against another."""
