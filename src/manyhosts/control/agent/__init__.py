"""What runs on every host of a run: the agent, its template, its workers."""
