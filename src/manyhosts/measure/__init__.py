"""What a script's training shows of itself in half a minute: the facts that `manyhosts plan` reckons from."""
