"""A head's hold on its run directory, and what it leaves there to another one: `head.json`, for its user alone.

The file holds the run's secret, where the head listens, and all that the head alone knows. It is written again, and on
the disk, before any message leaves the head that follows from a change. So a head that takes over knows all that
agents were sent, and what it does not know was not yet acknowledged, so that agents send it again.

`docs/decisions/0044` says what the file exposes, and where no run can be taken over.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from manyhosts import __version__
from manyhosts.control import job_file
from manyhosts.control.handshake import Hello
from manyhosts.control.head.agents import Agents
from manyhosts.control.head.state import HeadState, Node
from manyhosts.control.job import Job
from manyhosts.control.proof import PROTOCOL
from manyhosts.control.protocol import Prepare
from manyhosts.control.wire_format import built, content_of
from manyhosts.errors import ConfigError, LaunchError, ManyhostsError
from manyhosts.records import run_directory, run_lock
from manyhosts.records.json_text import parsed
from manyhosts.records.metrics import stream
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import summarise

FORMAT = 4
"""The version of the file."""
CALLERS_S = 15.0
"""How long agents have to call the head that takes over: one call to a machine that is off takes them 10 s."""
_PREPARE = '{"message": "prepare"'
_SLACK_S = 30.0
"""So much longer than agents wait for a head, one that comes looks whether they do."""
_OF_THE_TERMINAL = ("show", "prefix", "words", "run_dir_is_chosen", "sync", "check", "hidden", "log_bytes")
"""What may differ between the command that began a run and the one that takes it over."""


class NobodyCame(LaunchError):
    """No agent has kept its workers for the head that takes over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCheckpoint:
    """What one head has written down."""

    token: str = field(repr=False)
    """The secret of head and agents."""
    start: str
    """The token of the run's lock, which its workers know."""
    address: str
    port: int
    """Where agents call the head."""
    asked: str
    """What the command asked for, as `fingerprint` has it."""
    unasked: bool
    """Whether the run directory is the default, which the workers have to know."""
    launcher: Mapping[str, Any]
    """What the launcher must know of the hosts."""
    state: Mapping[str, Any]
    """By part of the head."""
    manyhosts: str = __version__
    protocol: int = PROTOCOL
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeoverConfig:
    """What a launcher gives a head whose run another one can take over."""

    job: Job
    """As the command has asked for it."""
    facts: Callable[[], Mapping[str, Any]]
    """What the launcher must know of the hosts, where another process continues."""
    left: HeadCheckpoint | None = None
    """What the head before has left, where this one takes its run over."""
    gone: Sequence[int] = ()
    """The nodes whose agents are known to have ended since then."""
    name: Callable[[Sequence[Node]], object] = lambda nodes: None
    """Gives nodes back what the launcher had made of them, before anything else is done with them."""


class Record:
    """The file, as the head that writes it has it."""

    def __init__(self, run_dir: Path, gather: Callable[[], HeadCheckpoint]) -> None:
        """`gather` says what is to be written."""
        self._path, self._gather = run_dir / run_directory.HEAD, gather
        self.is_needed = False
        """Whether something has changed since it was written last."""
        self._exists = False

    def write(self) -> None:
        """Have everything on the disk.

        Raises:
            OSError: the disk is full, say. Then the run cannot be taken over, which is no reason to end it.
        """
        self.is_needed = False
        temporary = self._path.with_name(f".{run_directory.HEAD}.{os.getpid()}")
        words = json.dumps(asdict(self._gather())).encode()
        try:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "wb") as stream:
                stream.write(words)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            self.remove()  # an older state is worse than none: agents have messages that it does not know of
            raise
        self._exists = True

    def beat(self) -> None:
        """Show that this head lives: agents wait for another one from when it does not."""
        if self._exists:
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def remove(self) -> None:
        """There is nothing to take over."""
        self._exists = False
        with contextlib.suppress(OSError):
            self._path.unlink()


def no_agents(run_dir: Path) -> NobodyCame:
    """That there is no agent to continue with."""
    return NobodyCame(
        "no host of this run has kept its workers for another command",
        where=str(run_dir),
        fix="start it again: it continues from its newest snapshot",
    )


def start_of(run_dir: Path) -> str:
    """The token of the start whose head has left a file in `run_dir`; empty where none has."""
    try:
        found = parsed((run_dir / run_directory.HEAD).read_bytes())
        return str(found["start"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def launcher_of(run_dir: Path) -> dict[str, Any] | None:
    """What the launcher of the last head has written down; None where no head of this user has left a file."""
    path = run_dir / run_directory.HEAD
    try:
        found = parsed(path.read_bytes())
        return dict(found["launcher"]) if _is_private(path.stat()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def silent_s(path: Path) -> float:
    """For how long the head that wrote `path` has shown no sign of life, in seconds.

    Raises:
        OSError: there is no such file.
    """
    return time.time() - path.stat().st_mtime


def left_for(job: Job) -> HeadCheckpoint | None:
    """What a head that is gone has left for `job`; None where there is nothing, or agents wait no more.

    Raises:
        ConfigError: it is not for this command, this version or this user.
    """
    path = job.run_dir / run_directory.HEAD
    try:
        state = path.stat()
        silence_s = silent_s(path)
        found = parsed(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as cause:
        raise _refusal(path, f"cannot be read: {cause}", job) from cause
    if not _is_private(state):
        raise _refusal(path, "belongs to somebody else, or others may read it, so it is not trusted", job)
    if silence_s > job.head_timeout_s + _SLACK_S:
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    spoken = {name: found.get(name) for name in ("format", "protocol", "manyhosts")}
    if spoken != {"format": FORMAT, "protocol": PROTOCOL, "manyhosts": __version__}:
        raise _refusal(path, f"was written by manyhosts {spoken['manyhosts']}, and this is {__version__}", job)
    try:
        left = HeadCheckpoint(**{entry.name: found[entry.name] for entry in fields(HeadCheckpoint)})
    except KeyError as cause:
        raise _refusal(path, f"lacks {cause}", job) from cause
    if left.asked != fingerprint(job, left.token):
        raise ConfigError(
            "the hosts of a run in this directory still train, and wait for its head, which was started by another"
            " command",
            where=str(path),
            fix="give the command that began it, with the same hosts, options, script and arguments; or wait until"
            f" the hosts have ended: {max(1, round(job.head_timeout_s + _SLACK_S - silence_s))} s from now",
        )
    return left


def _is_private(state: os.stat_result) -> bool:
    return state.st_uid == os.getuid() and not stat.S_IMODE(state.st_mode) & 0o077


def _refusal(path: Path, why: str, job: Job) -> ConfigError:
    return ConfigError(
        f"what the last head of this run has left {why}",
        where=str(path),
        fix=f"see that its hosts have ended ({job.head_timeout_s:.0f} s after the head), and remove that file",
    )


def fingerprint(job: Job, token: str) -> str:
    """What a command asks for, so that two can be compared and nothing be read: values of `--env` are part of it."""
    asked = {name: value for name, value in asdict(job).items() if name not in _OF_THE_TERMINAL}
    asked["environment"] = {name: value for name, value in job.environment.items() if name != run_directory.UNASKED}
    words = json.dumps(asked, sort_keys=True, default=str).encode()
    return hmac.new(token.encode(), words, hashlib.sha256).hexdigest()


def to_dict(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """What another head needs to continue with the agents of `nodes`.

    What prepares their workers is left out: it has the values of `--env`, and the same command gives them again.
    """
    found: list[dict[str, Any]] = []
    for node in nodes:
        talk = None if node.channel is None else node.channel.to_dict()
        if talk is not None:
            talk["kept"] = [[number, None if said.startswith(_PREPARE) else said] for number, said in talk["kept"]]
        facts = {} if node.facts is None else content_of(node.facts)
        found.append({"session": node.session, "facts": facts, "talk": talk})
    return found


def go_on_with(agents: Agents, written: Sequence[Mapping[str, Any]], prepare: Callable[[Node], Prepare]) -> None:
    """Have those that another head has heard count as here: they have `CALLERS_S` to call.

    `prepare` makes the first message to an agent.
    """
    for node, found in zip(agents.nodes, written, strict=True):
        if found["talk"] is not None:
            node.session, node.facts = found["session"], built(found["facts"], Hello)
            node.heard = time.monotonic() + CALLERS_S
            node.channel = agents.session_with(node)
            kept = [[n, said or _prepare(n, prepare(node))] for n, said in found["talk"]["kept"]]
            node.channel.restore({**found["talk"], "kept": kept})


def _prepare(number: int, message: Prepare) -> str:
    return json.dumps({"message": message.NAME, "n": number, **content_of(message)}) + "\n"


_OPTIONS = ("--run-dir", "--resume")


class RunDirLock:
    """The one of this head."""

    def __init__(self, state: HeadState, succeeds: str = "") -> None:
        """Take the lock. `succeeds`: the token of the start whose last head is dead.

        Raises:
            ConfigError: another run is in progress in the run directory, or that head lives.
        """
        self._state = state
        run_dir = state.job.run_dir
        self._made = not run_dir.exists()
        before = run_lock.owner_of(run_dir)
        self.token = succeeds or run_lock.new_token()
        try:
            self._lock = run_lock.take(run_dir, self.token, launches=True, succeeds=bool(succeeds))
        except OSError:
            # Perhaps only the hosts have that disk. There rank 0 takes the lock, and says where it cannot.
            run_lock.see_that_free(run_dir)
            self._lock = None
        if before is not None and before.launches and before.token != self.token:  # else it would hold the lock
            state.display.warn(
                "manyhosts: the command that ran in this directory before was killed, and nothing of it continues: this"
                " run starts from its newest snapshot, where there is one"
            )

    @property
    def is_lost(self) -> bool:
        """Whether another has the run directory."""
        return self._lock is not None and self._lock.lost is not None

    def check(self) -> None:
        """End the run where another one has taken its directory."""
        try:
            if self._lock is not None:
                self._lock.check()
        except ManyhostsError as error:
            self._state.result = error

    def release(self) -> None:
        """Let others run in the directory. Safe to call twice."""
        if self._lock is not None:
            self._lock.release()
        if self._made:
            run_directory.drop_if_empty(self._state.job.run_dir)

    def resume_command(self) -> str:
        """What the user types to resume this run; empty where there is nothing to continue with."""
        job, begun = job_file.without_hidden(self._state.job), self._state.directories
        lacking = sorted(name for name in job_file.hidden(job) if job.words != self._state.job.words)
        first = f"\n  after: export {' '.join(f'{name}=…' for name in lacking)}" if lacking else ""
        if not job.words:
            return ""
        if job.run_dir_is_chosen or any(path.is_relative_to(job.run_dir) for path in begun):
            words = with_run_dir(job.words, len(job.arguments), _short(job.run_dir, job.folder))
            return shlex.join(["manyhosts", *words]) + first
        return shlex.join(["manyhosts", *job.words]) + first if begun else ""  # the script itself names its directory


def with_run_dir(words: Sequence[str], arguments: int, run_dir: str) -> list[str]:
    """`words`, of which the last are the script and its so many arguments, for a run in `run_dir`."""
    end = len(words) - arguments - 1
    own, script = list(words[:end]), words[end:]
    kept: list[str] = []
    while own:
        word = own.pop(0)
        if word in _OPTIONS:
            own = own[1:]
        elif not word.startswith(tuple(f"{option}=" for option in _OPTIONS)):
            kept.append(word)
    return [kept[0], "--run-dir", run_dir, *kept[1:], *script]


def _short(run_dir: Path, folder: Path) -> str:
    """`run_dir` as it is typed in `folder`."""
    return str(run_dir.relative_to(folder) if run_dir.is_relative_to(folder) else run_dir)


def write_failed_summary(run_dirs: Iterable[Path], error: ManyhostsError) -> None:
    """Have each of `run_dirs` whose training has not come to its end say that it failed with `error`.

    Those that this machine does not have are passed over: the record is where rank 0 was.
    """
    for directory in map(RunDirectory, run_dirs):
        if not (directory.run_json.exists() and directory.metrics.exists()):
            continue
        with contextlib.suppress(OSError, ConfigError):  # the failure itself is reported all the same
            summary = summarise(stream(directory.metrics), RunRecord.read(directory.run_json), failure=error.what)
            if summary.status == "failed":
                summary.write(directory.summary)
