"""Going on when workers are lost or come."""
