"""What is asked: the settings of a run, frozen and checked where they are made."""
