"""Imported by the fork server of a worker's `multiprocessing`, before anything of the script's: see `children`."""

from manyhosts.control.agent import children

children.begin()
