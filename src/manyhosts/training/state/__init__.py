"""Everything that a training is: for the disk, for a new worker, for one that is a step late."""
