"""What is measured of a run, recorded and said."""
