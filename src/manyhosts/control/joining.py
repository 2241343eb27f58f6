"""`manyhosts join`: the secret that is typed, and how a host that has it joins a run and becomes an agent.

The secret has what the run's agents know, and which certificate its head shows. Before anything is sent to the head, or
believed of it, it has shown that certificate and has proven that it knows the rest of the secret. The head says what
this host must have (files, versions), and the host sees to that.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import secrets
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from manyhosts.control.agent import agent, head_connection
from manyhosts.control.agent.agent import Origin
from manyhosts.control.agent.head_client import HeadClient
from manyhosts.control.handshake import ANY_NODE, Ask, Call, Offer, Prove
from manyhosts.control.head.state import PORT
from manyhosts.control.proof import PROTOCOL, Caller
from manyhosts.control.wire_format import content_of
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import contents, hostfile, interfaces, remote_probe, version_check

_TOKEN_BYTES = FINGERPRINT_BYTES = 16
_CHECK_BYTES = 3
_GROUP = 8
_MISREAD = str.maketrans("08", "OB")
"""Digits that base 32 does not have, and the letters that they are taken for."""


@dataclass(frozen=True, slots=True)
class JoinSecret:
    """Everything that a host must know to trust a head and to be trusted by it."""

    token: str = field(repr=False)
    """The run's token: 32 hexadecimal digits."""
    fingerprint: bytes
    """The first 16 bytes of the SHA-256 of the head's certificate."""

    def __str__(self) -> str:
        """Seven groups of eight letters and digits; the last letters are a checksum of the others."""
        content = bytes.fromhex(self.token) + self.fingerprint
        text = base64.b32encode(content + _check(content)).decode().lower()
        return "-".join(text[start : start + _GROUP] for start in range(0, len(text), _GROUP))

    @classmethod
    def parse(cls, text: str, *, where: str) -> JoinSecret:
        """Read what `str` made of one. Case, spaces and dashes do not count.

        Raises:
            ConfigError: it is incomplete, or a letter of it is wrong.
        """
        letters = re.sub(r"[\s-]", "", text).upper().translate(_MISREAD)
        try:
            content = base64.b32decode(letters)
        except (binascii.Error, ValueError):
            content = b""
        body, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
        if len(body) != _TOKEN_BYTES + FINGERPRINT_BYTES or check != _check(body):
            raise ConfigError(
                "this is not the secret of a run: it was typed wrongly, or a part of it is missing",
                where=where,
                fix="give all seven groups as `manyhosts run --on join` shows them",
            )
        return cls(body[:_TOKEN_BYTES].hex(), body[_TOKEN_BYTES:])


def _check(content: bytes) -> bytes:
    return hashlib.sha256(b"manyhosts join " + content).digest()[:_CHECK_BYTES]


_NAMED = 3
"""Files that are named; of more, only their number."""
LOST = 3
"""The exit code of a host that has lost the head, or was turned away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What the user of this host has typed."""

    head: str
    """Where the head is: ADDRESS or ADDRESS:PORT."""
    secret: JoinSecret
    folder: Path
    """Where this host has the project, absolute."""
    address: str = ""
    """Where workers on other hosts reach those here; by default, where the head is talked to from."""

    @property
    def place(self) -> str:
        """Where the head is, as host:port."""
        host, port = hostfile.destination(self.head, where="ADDRESS")
        return f"{host}:{port or PORT}"


def join(wish: Wish) -> int:
    """Be a host of the run, to its end. Returns the exit code of the run, or `LOST`.

    Raises:
        LaunchError: the head was not reached, is another one, or has no use for this host.
        ConfigError: this host has other files or versions than the run, or lacks the address that was given.
    """
    with _connect(wish.place) as connection:
        offer = _ask(connection, wish)
        address = wish.address or str(connection.getsockname()[0])
    if offer.refused:
        raise LaunchError(
            f"the head of {offer.run} has no place for this host: {offer.refused}",
            where=wish.place,
            fix="end the other `manyhosts join` first, or join from another machine"
            if "already" in offer.refused
            else "start the run with more --nodes; with MIN:MAX hosts come while it continues",
        )
    _see_versions(offer, wish.place)
    _see_files(offer, wish.folder)
    found = interfaces.with_address(remote_probe.interfaces(), address)
    if found is None:
        raise ConfigError(
            f"this host has no interface with the address {address}",
            where="--address",
            fix="see `ip address` for those that it has",
        )
    interfaces.use(found.name, os.environ)
    return _serve(_connect(wish.place), wish, offer, address)


def _serve(connection: socket.socket, wish: Wish, offer: Offer, address: str) -> int:
    run_dir = Path(os.path.normpath(wish.folder / offer.run_dir))
    if not run_dir.is_relative_to(wish.folder):
        run_dir = wish.folder / "runs" / run_dir.name
    mark = f"{remote_probe.MARK_OF_DISK}{secrets.token_hex(4)}-join"
    seen, _ = remote_probe.find_markers(str(run_dir))
    remote_probe.write_marker(str(run_dir), mark)
    os.chdir(wish.folder)
    joins = {"folder": str(wish.folder), "machine": remote_probe.machine(), "mark": mark, "marks": seen}
    try:
        own = agent.serve(
            connection, wish.place, node=ANY_NODE, token=wish.secret.token, address=address, origin=Origin(joins=joins)
        )
    finally:
        remote_probe.remove_marker(str(run_dir), mark)
    if own.verdict is None:
        sys.stderr.write("manyhosts: this host is no part of the run any more\n")
        return LOST
    sys.stderr.write("manyhosts: the run is over\n")
    return own.verdict


def _connect(place: str) -> socket.socket:
    """A connection to the head.

    Raises:
        LaunchError: it is not to be had.
    """
    try:
        return head_connection.connect(place)
    except socket.gaierror as cause:
        raise LaunchError(
            f"the name {place.rpartition(':')[0]} does not resolve: {cause.strerror}",
            where=place,
            fix="give the address as `manyhosts run --on join` shows it",
        ) from cause
    except ConnectionRefusedError as cause:
        raise LaunchError(
            f"no head listens at {place}",
            where=place,
            fix="see that `manyhosts run --on join` is waiting there, and that this is the port that it shows",
        ) from cause
    except OSError as cause:
        raise LaunchError(
            f"{place} is not to be reached from here: {cause.strerror or cause}",
            where=place,
            fix="see that firewalls let this port pass; with address translation (NAT), its router must forward"
            " the port there, and -o advertise= gives the router's address",
        ) from cause


def _ask(connection: socket.socket, wish: Wish) -> Offer:
    """What the head says that a host needs.

    Raises:
        LaunchError: it is not the head that the secret is of, or another version of it.
    """
    client = HeadClient(connection, wish.place)
    caller = Caller(wish.secret.token)
    client.say(Call(**caller.call()))
    prove = client.receive(Prove)
    if client.fingerprint()[:FINGERPRINT_BYTES] != wish.secret.fingerprint:
        raise LaunchError(
            f"what listens at {wish.place} is not the run that this secret is of: it shows another certificate",
            where=wish.place,
            fix="give the secret that this run has shown, for each has its own; if that was it, somebody is in between",
        )
    proof = caller.proof_for(content_of(prove), client.fingerprint())
    if not proof:
        raise LaunchError(
            f"what listens at {wish.place} does not know the secret",
            where=wish.place,
            fix="give the secret that this run has shown",
        )
    if caller.protocol != PROTOCOL:
        raise LaunchError(
            head_connection.mismatch(caller.protocol, PROTOCOL),
            where=wish.place,
            fix="install the same manyhosts there and here",
        )
    client.say(Ask(proof=proof, machine=remote_probe.machine()))
    return client.receive(Offer)


def _see_versions(offer: Offer, place: str) -> None:
    here, there = version_check.here(_own_version()), offer.versions
    for package in ("python", "manyhosts", "torch"):
        wanted = there.get(package, "")
        if wanted and version_check.counts(package, here[package]) != version_check.counts(package, wanted):
            raise ConfigError(
                f"this host has {f'{package} {here[package]}' if here[package] else f'no {package}'}, and the run"
                f" {wanted if here[package] else f'has {package} {wanted}'}",
                where=sys.executable,
                fix=version_check.remedy(
                    package, wanted, sys.executable, named="type `manyhosts join` of its environment"
                ),
            )


def _own_version() -> str:
    from manyhosts import __version__

    return __version__


def _is_below(path: str) -> bool:
    return not os.path.isabs(path) and ".." not in Path(path).parts


def _see_files(offer: Offer, folder: Path) -> None:
    """See that the code and the settings of the project are here what they are at the head.

    Raises:
        ConfigError: some are others, or are not here.
    """
    hashes = contents.Hashes()
    missing, others = [], []
    for path, digest in offer.files.items():
        if not _is_below(path) or not (folder / path).is_file():  # a pipe would be waited for
            missing.append(path)
            continue
        try:
            if hashes.of(folder / path) != digest:
                others.append(path)
        except OSError:
            missing.append(path)
    hashes.keep()
    if not missing and not others:
        return
    found = []
    for paths, what in ((others, "differ from"), (missing, "are missing, and are in")):
        if paths:
            named = ", ".join(paths[:_NAMED]) + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")
            found.append(
                f"{named} {what.replace('are', 'is').replace('differ ', 'differs ') if len(paths) == 1 else what}"
            )
    raise ConfigError(
        f"this is not the project as {offer.host} has it: {'; '.join(found)} {offer.folder} there",
        where=str(folder),
        fix="bring the same files here (git pull, or rsync), or change into the folder that has them: --folder DIR",
    )
