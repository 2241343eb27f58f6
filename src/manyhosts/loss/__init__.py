"""One piece of a batch: model and loss, in which numbers, and what it counts in the mean over the batch."""
