"""Runs and studies watched while they resume: in the terminal, and as a page on this machine."""
