"""The head of a run: connects to all agents, assigns ranks, and shows the user what happens."""
