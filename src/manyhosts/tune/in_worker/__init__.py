"""What a worker of a learning-rate range test does beside the script: before each step it raises the learning rate."""

from __future__ import annotations

import multiprocessing


def begin() -> None:
    """Have every step seen."""
    if multiprocessing.parent_process() is not None:
        return  # a process that the script has started

    from manyhosts.training import watching
    from manyhosts.tune.in_worker.rising import Rising

    watching.watcher = Rising()
