"""What machines there are: the place of this process among them."""
