"""What a step takes and holds by each strategy: `strategy` says what is asked of one, every other file is one."""
