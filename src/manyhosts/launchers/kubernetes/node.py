"""What runs in every pod of a Kubernetes job: `python -m manyhosts.launchers.kubernetes.node`.

The pod's environment says everything: what to run, which node this is, where the head is, which address this pod has.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from manyhosts.control import first_node, job_file
from manyhosts.control.agent import node
from manyhosts.control.first_node import NodeInfo
from manyhosts.errors import ManyhostsError
from manyhosts.launchers import choices, packing
from manyhosts.launchers.kubernetes import manifest

_PATIENCE_S = 3600.0


def main(variables: MutableMapping[str, str] | None = None) -> int:
    """Be a node. Returns its exit code."""
    variables = os.environ if variables is None else variables
    own = {
        name: variables.pop(name, "")  # no worker needs them
        for name in (manifest.JOB, manifest.HEAD, manifest.ADDRESS, manifest.TOKEN, manifest.ARCHIVE, manifest.HIDDEN)
    }
    try:
        number = node.number_in("JOB_COMPLETION_INDEX", variables)
        job = job_file.of_text(own[manifest.JOB], where=manifest.JOB)
        job = replace(job, environment={**job.environment, **json.loads(own[manifest.HIDDEN] or "{}")})
        if own[manifest.ARCHIVE]:
            packing.unpack(Path(own[manifest.ARCHIVE]), job.folder)
        head = own[manifest.HEAD]
        name = head.partition(".")[0].removesuffix("-0")
        node_info = NodeInfo(
            number=number,
            hosts=[f"{name}-{index}" for index in range(job.nodes)],
            head=head,
            address=own[manifest.ADDRESS],
            token=own[manifest.TOKEN],
        )
        return first_node.run(job, node_info, patience_s=choices.seconds(job.options, "wait") or _PATIENCE_S)
    except ManyhostsError as error:
        return first_node.report(error)


if __name__ == "__main__":
    sys.exit(main())
