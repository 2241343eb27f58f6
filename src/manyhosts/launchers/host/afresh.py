"""Imported by the fork server of a worker's `multiprocessing`, before anything of the script's: see `children`."""

from manyhosts.launchers.host import children

children.begin()
