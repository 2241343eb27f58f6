"""What happened: the files of a run directory, readable without torch."""
