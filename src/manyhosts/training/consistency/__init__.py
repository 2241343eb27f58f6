"""Whether the workers agree: on what they were given, on the weights, on the first steps."""
