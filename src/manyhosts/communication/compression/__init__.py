"""Ways to send less than every bit of a gradient, each in a file of its own."""
