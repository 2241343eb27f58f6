"""A script that was written for CUDA and NCCL, run as it is on CPU and Gloo, before anybody pays for GPUs.

`begin()` is called in a worker before its script: devices, backends, autocast and pinned memory are mapped, each kind
of mapping is noted once, and what cannot be mapped is refused with a sentence. What the script computes is what it
would compute on GPUs, slowly and in other roundings; what it sends between its workers is really sent.
"""

from __future__ import annotations

import os

from manyhosts.cluster.place import REHEARSING
from manyhosts.rehearsal import cuda, devices, distributed, lightning, numbers


def begin() -> None:
    """Map everything in this process. Once is enough; it cannot be taken back."""
    os.environ[REHEARSING] = "1"
    cuda.put_in_place()
    devices.put_in_place()
    numbers.put_in_place()
    distributed.put_in_place()
    lightning.put_in_place()
