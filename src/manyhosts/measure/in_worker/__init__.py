"""What a worker does in place of training: it measures, reports what it has found, and ends.

`begin()` is called before the script. A script that never comes to `fit` is ended too, with the reason.
"""

from __future__ import annotations

import multiprocessing


def begin() -> None:
    """Have the script's first `fit` measure."""
    if multiprocessing.parent_process() is not None:
        return  # a process that the script has started

    from manyhosts.measure.in_worker.guard import Guard
    from manyhosts.measure.in_worker.measurer import Measurer
    from manyhosts.measure.request import Request
    from manyhosts.training.process_session import ProcessSession

    request = Request.from_environment()
    ProcessSession.current().watcher = Measurer(request, Guard(request.patience_s))
