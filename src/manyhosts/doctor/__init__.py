"""Looks at every host and every pair of hosts before a run: what is wrong there, and what to type to mend it."""
