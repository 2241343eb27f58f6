"""How a head and the agents of a run work together: who they are, what they say, what each does."""
