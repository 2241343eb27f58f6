"""A practice cluster on this Linux machine: hosts in namespaces, with cables that can be cut and slowed down.

`lab` makes it, `host` is one machine of it as its owner sees it, `machine` is that machine's first process,
`filesystem` what it sees of the disk, `network` the switch and the cables, `folder` what a lab keeps on disk,
`control` how a second terminal reaches it.
"""

from manyhosts.lab.host import Host
from manyhosts.lab.lab import Lab, lab

__all__ = ["Host", "Lab", "lab"]
