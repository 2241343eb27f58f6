"""Runs and studies watched while they go on: in the terminal, and as a page on this machine."""
