"""What each micro-batch counts in the mean, and whether a loss is the mean that it has to be."""
