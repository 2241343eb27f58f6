"""What workers say to each other, and who they are."""
