"""Imported by the fork server of a worker's `multiprocessing`, before the script: see `script_patches`."""

from manyhosts.control.agent import script_patches

script_patches.begin()
