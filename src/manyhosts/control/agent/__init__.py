"""What runs on every host of a run: the agent, its fork server, its workers."""
