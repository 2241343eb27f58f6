"""Workers on this machine and on hosts that come by themselves: `manyhosts join` is typed there.

For hosts that this machine cannot reach by ssh: with address translation (NAT), or where its user has no login. They
call this machine, at an address that may be another one than it listens at.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from manyhosts import __version__
from manyhosts.cluster.ports import Range
from manyhosts.control import job_file, variables
from manyhosts.control.display import Display
from manyhosts.control.handshake import Offer
from manyhosts.control.head import takeover
from manyhosts.control.head.agent_starter import StartAgent
from manyhosts.control.head.run import Head
from manyhosts.control.head.state import PORT, AgentProcess, ExternalAgent, HeadEndpoint, port_of
from manyhosts.control.job import Job
from manyhosts.control.joining import FINGERPRINT_BYTES, JoinSecret
from manyhosts.control.plan import HEAD, Later, Plan, filled
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import addresses, contents, hostfile, interfaces, ports, remote_probe, version_check
from manyhosts.hosts.files import Files
from manyhosts.launchers import choices
from manyhosts.launchers.engine import Engine
from manyhosts.launchers.ssh import remote_agent
from manyhosts.records import run_directory, run_lock, run_owner

_PATIENCE_S = 3600.0
"""How long hosts are waited for: people walk to them."""
_FAR = "192.0.2.1"
"""An address of documents, which is on no network: the way there is the way to the rest of the world."""


class Join(Engine):
    """Is the head of hosts that join, and has the first workers itself."""

    NAME = "join"
    OPTIONS: ClassVar[Mapping[str, str]] = {
        "bind": "the address of this machine to listen at (default: that of its route to other networks)",
        "port": f"the port to listen at (default {PORT}, or a free one)",
        "advertise": "the address, or ADDRESS:PORT, at which hosts reach this machine, where that is another one",
        "address": "the address of this machine at which workers on the hosts reach those here (default: bind)",
        "secret-file": "a file to write the secret into, for scripts, in place of showing it",
        "wait": "how long hosts are waited for (default 1h)",
    }

    def plan(self, job: Job) -> Plan:
        """Node 0 is this machine; each of the others is a host that joins.

        Raises:
            ConfigError: there would be no such host, or an option is unknown or wrong.
        """
        job = self.check(job)
        if job.hosts:
            raise ConfigError(
                f"hosts join by themselves, and some are named: {', '.join(job.hosts)}",
                where="--hosts",
                fix="leave --hosts out and type the line that this shows on each; or leave --on join out",
            )
        if job.nodes < 2:
            raise ConfigError(
                "no host is to join, as the run has one node",
                where="--on join",
                fix="say how many nodes there are with this machine: --nodes 2, or --nodes 1:2 to begin without",
            )
        _port(job)
        choices.seconds(job.options, "wait")
        bind, advertised = job.options.get("bind", "ADDRESS"), job.options.get("advertise", "")
        joined = ("manyhosts", "join", advertised or f"{bind}:{job.options.get('port', 'PORT')}")
        hosts = (_name_here(), *(f"host {node} (to join)" for node in range(1, job.nodes)))
        agents = (_agent_words(), *([joined] * (job.nodes - 1)))
        return Plan(job=job, hosts=hosts, agents=agents, workers=variables.of_all(job))

    def submit(self, plan: Plan, display: Display) -> int:
        """Say how hosts join, and run the job to its end.

        Raises:
            ConfigError: this machine has no such address, or the port is taken.
            LaunchError: too few hosts have joined.
            ManyhostsError: workers failed; the error is that of the one that failed first.
        """
        job = plan.job
        job.run_dir.mkdir(parents=True, exist_ok=True)
        left = takeover.left_for(job)
        if left is not None:
            run_lock.see_that_free(job.run_dir, left.start)
            display.warn("manyhosts: the command that started this run is gone; this one takes it over")
            with contextlib.suppress(takeover.NobodyCame):
                return _run(plan, display, left)
            display.warn("manyhosts: no host has kept its workers: the run starts again, and hosts join it again")
        return _run(plan, display, None)


def _run(plan: Plan, display: Display, left: takeover.HeadCheckpoint | None) -> int:
    from manyhosts.control.head.state import Joining  # here, for it loads OpenSSL
    from manyhosts.control.tls import Identity

    job, known = plan.job, {} if left is None else left.launcher
    bind = job.options.get("bind") or _own_address("-o bind")
    port = _free_port(job, bind) if left is None else left.port
    address = job.options.get("address") or (_own_address("-o address") if _is_any(bind) else bind)
    joining = Joining(
        identity=Identity(known.get("identity", "")),
        offer=_offer(job),
        mark=known.get("mark") or f"{remote_probe.MARK_OF_DISK}{secrets.token_hex(4)}-join",
        say=display.warn,
    )
    patience_s = choices.seconds(job.options, "wait") or _PATIENCE_S
    endpoint = HeadEndpoint(port=port, patience_s=patience_s, joining=joining)
    if left is not None:
        endpoint = replace(endpoint, token=left.token)
    if left is not None:
        display.warn("manyhosts: hosts that have joined need do nothing; for others that are to come:")
    _show_how(job, endpoint, bind if not _is_any(bind) else address, port, display)
    succession = takeover.TakeoverConfig(
        job=job,
        facts=joining.to_dict,
        left=left,
        gone=[] if left is None else _gone(left),
        name=lambda nodes: joining.restore(known, nodes),
    )
    job = replace(job, environment={**job.environment, run_directory.SEPARATE_DISKS: "1"})
    remote_probe.write_marker(str(job.run_dir), joining.mark)
    try:
        start = _starter(plan, address, display)
        return Head(job, plan.hosts, start, display, address=bind, endpoint=endpoint, succession=succession).run()
    finally:
        remote_probe.remove_marker(str(job.run_dir), joining.mark)


def _gone(left: takeover.HeadCheckpoint) -> list[int]:
    """The first node, where its agent has ended, which is of this machine. Of the others nothing is known."""
    process = left.state["agents"][0]["facts"].get("process")
    return [] if process is not None and run_owner.began(process) else [0]


def _port(job: Job) -> int:
    port = choices.count(job.options, "port", port_of(job))
    if port > 65535:
        raise ConfigError(f"port is {port}", where="-o port", fix="give a number from 1 to 65535")
    return port


def _free_port(job: Job, bind: str) -> int:
    """The port to listen at. Where none was asked for and the usual one is taken, any other.

    Raises:
        ConfigError: it cannot be listened at.
    """
    wanted = _port(job)
    try:
        addresses.listen(bind, wanted, backlog=1).close()
    except (OSError, ValueError) as cause:
        number = cause.errno if isinstance(cause, OSError) else None
        if number == errno.EADDRINUSE and "port" not in job.options:
            with ports.listen(bind, Range.of(job.ports), backlog=1, what="the head of the run") as free:
                return int(free.getsockname()[1])
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise ConfigError(
            f"this machine cannot listen at {bind} port {wanted}: {reason}",
            where="-o port" if number in (errno.EADDRINUSE, errno.EACCES) else "-o bind",
            fix="give another -o port="
            if number in (errno.EADDRINUSE, errno.EACCES)
            else "see `ip address` for its own addresses; where hosts reach it at another one, that is -o advertise=",
        ) from cause
    return wanted


def _own_address(option: str) -> str:
    """The address of this machine on its way to other networks.

    Raises:
        ConfigError: it has none.
    """
    found = remote_probe.way_to(_FAR)
    if not found:
        raise ConfigError(
            "this machine has no route to other networks, so it does not know at which of its addresses hosts reach it",
            where=option,
            fix=f"give one of those that `ip address` shows: {option}=ADDRESS",
        )
    return found


def _is_any(address: str) -> bool:
    return address in ("0.0.0.0", "::")  # noqa: S104  # asked for by the user


def _offer(job: Job) -> Offer:
    """What hosts must have to be of use: the same files and versions."""
    needed = job.program if job.kind == "script" else ""
    # Hosts have the files already; so data may be as large as it likes.
    files = Files.to_bring(job.folder, leave_out=[job.run_dir], needed=needed, most=math.inf)
    hashes = contents.Hashes()
    deciding = {*files.stamps, *({needed} & set(files.paths))}
    reported = {path: hashes.of(job.folder / path) for path in sorted(deciding) if (job.folder / path).is_file()}
    hashes.keep()
    return Offer(
        run=job.run_id,
        script=job.program,
        folder=str(job.folder),
        run_dir=os.path.relpath(job.run_dir, job.folder),
        files=reported if job.sync else {},
        versions=version_check.here(__version__),
        host=_name_here(),
    )


def _show_how(job: Job, endpoint: HeadEndpoint, address: str, port: int, display: Display) -> None:
    """Show what is typed on the hosts, and the secret: there, or in a file."""
    assert endpoint.joining is not None, "hosts join this run"
    secret = str(JoinSecret(endpoint.token, endpoint.joining.identity.fingerprint[:FINGERPRINT_BYTES]))
    asked = job.options.get("advertise", "")
    host, wanted = hostfile.destination(asked) if asked else (address, "")
    shown = f"[{host}]:{wanted or port}" if ":" in host else f"{host}:{wanted or port}"
    count = f"each of {job.nodes - 1} hosts" if job.nodes > 2 else "the other host"
    display.warn(f"manyhosts: on {count}, in the folder of the project, type\n  manyhosts join {shown}")
    if "secret-file" not in job.options:
        display.warn(
            f"manyhosts: and give it the secret of this run, which lets programs run there and here:\n  {secret}"
        )
        return
    path = Path(job.options["secret-file"])
    try:
        job_file.write_hidden(f"{secret}\n", path)
    except OSError as cause:
        raise ConfigError(
            f"the secret cannot be written to {path}: {cause.strerror}", where="-o secret-file", fix="name another file"
        ) from cause
    display.warn(f"manyhosts: and give it the secret of this run, which is in {path}")


def _agent_words() -> tuple[str, ...]:
    place = ("--address", Later("address", "ADDRESS"), "--interface", Later("interface", "INTERFACE"))
    words = ("-P", "-m", "manyhosts.control.agent.agent", "--head", HEAD, "--node", "0")
    return (sys.executable, *words, *place)


def _starter(plan: Plan, address: str, display: Display) -> StartAgent:
    """Starts the agent of this machine, which outlives this process; the others come by themselves.

    Raises:
        LaunchError: this machine has no such address.
    """
    found = interfaces.with_address(remote_probe.interfaces(), address)
    if found is None:
        raise LaunchError(
            f"this machine has no interface with the address {address}",
            where="-o address",
            fix="see `ip address` for those that it has",
        )

    def start(node: int, head: str, token: str) -> AgentProcess:
        if node > 0:
            return ExternalAgent()
        host, port = addresses.address_and_port(head)
        if _is_any(host):
            head = addresses.place("::1" if ":" in host else addresses.LOOPBACK, port)
        values = {HEAD.name: head, "address": address, "interface": found.name}
        return remote_agent.start(filled(plan.agents[0], values), token, display, again=False)

    return start


def _name_here() -> str:
    return socket.gethostname().split(".")[0]
