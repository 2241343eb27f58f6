"""Everything a run needs to continue, on disk, whole or absent."""
