"""What may act while a run trains: at named points, on every worker, with a state that snapshots keep."""
