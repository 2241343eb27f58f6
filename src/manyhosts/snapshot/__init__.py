"""Everything a run needs to continue, on disk, complete or absent."""
