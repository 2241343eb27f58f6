"""How processes are started, watched and ended."""
