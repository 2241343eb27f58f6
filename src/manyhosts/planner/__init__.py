"""What a training would take on other machines, reckoned from what a few steps of it showed on this one."""
