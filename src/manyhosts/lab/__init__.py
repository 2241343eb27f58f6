"""A practice cluster on this Linux machine: hosts in namespaces, with cables that can be cut and slowed down.

`lab` makes it and takes orders from a second terminal, `host` is one host of it as its owner sees it, `machine` is
that host's first process and its disk, `network` the switch and the cables, `folder` what a lab keeps on disk.
"""

from manyhosts.lab.host import Host
from manyhosts.lab.lab import Lab, lab

__all__ = ["Host", "Lab", "lab"]
