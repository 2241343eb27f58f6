"""The head of a run: knows all agents, says who is which rank, and tells the user what happens."""
