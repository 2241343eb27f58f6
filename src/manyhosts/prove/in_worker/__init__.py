"""What a worker of a trial does besides the user's script: it writes a trace, and ends after so many steps.

`begin()` is called before the script. The script's own random numbers begin alike in every trial on the same rank and
differ between ranks, as data that a script makes without a seed does; only then are two trials comparable.
"""

from __future__ import annotations

import multiprocessing
import os
import random


def begin() -> None:
    """Seed the script's own random numbers, and have every optimizer step seen."""
    if multiprocessing.parent_process() is not None:
        return  # a process that the script has started; it has no steps of its own

    import numpy as np
    import torch

    from manyhosts.prove.conduct import TrialConfig
    from manyhosts.prove.in_worker.calm import RemoveNondeterminism
    from manyhosts.prove.in_worker.plain import PlainScript
    from manyhosts.prove.in_worker.recorder import Recorder
    from manyhosts.prove.in_worker.writer import Writer
    from manyhosts.training.process_session import ProcessSession

    conduct = TrialConfig.from_environment()
    rank = int(os.environ.get("RANK", "0"))
    seed = 0 if conduct.seeds_alike else rank
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    calm = RemoveNondeterminism(conduct)
    calm.put_in_place()
    writer = Writer(conduct, rank)
    ProcessSession.current().watcher = Recorder(conduct, writer, calm)
    PlainScript(conduct, writer).put_in_place()
