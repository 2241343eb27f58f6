"""What runs in every container of a SageMaker job: `python -m manyhosts.launchers.sagemaker.node`.

SageMaker's own resource configuration says which node this is, who the others are and which interface leads to them;
our input channel has what to run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from manyhosts.control import first_node, job_file
from manyhosts.control.first_node import NodeInfo
from manyhosts.control.head.state import port_of
from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.hosts import addresses
from manyhosts.launchers import packing
from manyhosts.launchers.sagemaker.request import ARCHIVE, CHANNEL, JOB, ML, TOKEN

_MOST_WORDS = 1024  # of what SageMaker shows of a failure


def main(ml: Path = ML) -> int:
    """Be a node; `ml` is the folder that SageMaker has laid out. Returns the exit code."""
    try:
        own = ml / "input" / "data" / CHANNEL
        job = job_file.load(own / JOB)
        node_info = _node_info(ml, (own / TOKEN).read_text().strip(), nodes=job.nodes, port=port_of(job))
        packing.unpack(own / ARCHIVE, job.folder)
        return first_node.run(job, node_info)
    except ManyhostsError as error:
        (ml / "output").mkdir(parents=True, exist_ok=True)
        (ml / "output" / "failure").write_text(f"manyhosts: {error.what} ({error.where})"[:_MOST_WORDS])
        return first_node.report(error)


def _node_info(ml: Path, token: str, *, nodes: int, port: int) -> NodeInfo:
    path = ml / "input" / "config" / "resourceconfig.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        hosts, here, interface = found["hosts"], found["current_host"], found["network_interface_name"]
        number = hosts.index(here)
    except (OSError, ValueError, KeyError) as cause:
        raise ConfigError(
            f"SageMaker's description of the hosts cannot be read: {cause}",
            where=str(path),
            fix="this is started by `manyhosts run --on sagemaker`, not by hand",
        ) from cause
    if len(hosts) != nodes:
        raise ConfigError(
            f"this job has {len(hosts)} instances, and was sent for {nodes}", where=str(path), fix="send it again"
        )
    return NodeInfo(
        number=number,
        hosts=hosts,
        head=f"{hosts[0]}:{port}",
        address=addresses.address_on(interface),
        token=token,
    )


if __name__ == "__main__":
    sys.exit(main())
