"""Everything a run needs to go on, on disk, whole or absent."""
