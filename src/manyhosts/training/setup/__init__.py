"""From what the user gave to what trains: strategy, precision, optimizer, model."""
