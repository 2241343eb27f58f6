"""How the two ends of a connection show each other that they know a run's secret, which itself is never sent.

    who calls    call   protocol, nonce
    who answers  prove  protocol, nonce, proof
    who calls    hello  proof, …                  only when the other's proof is right

A proof is an HMAC of both nonces, both versions and the fingerprint of the certificate that the answering side uses: a
third one that sits between the two has another certificate, and what it passes on proves nothing. So the secret alone
has to reach a host on a trusted way, and no fingerprint in addition.

The messages have no classes here (`control.handshake` has them): the doctor brings this file to hosts that have no more
than Python 3.8.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

PROTOCOL = 4
"""The version of what head and agents say to each other once they trust each other. These three messages stay."""
_NONCE_CHARACTERS = 32


class Caller:
    """The side that opens the connection."""

    def __init__(self, token: str, own: int = PROTOCOL) -> None:
        """`own` is the version that this side speaks."""
        self._token, self._own, self._nonce = token, own, secrets.token_hex(_NONCE_CHARACTERS // 2)
        self.protocol = 0
        """What the other side speaks, once `proof_for` has seen it."""

    def call(self) -> dict[str, Any]:
        """The fields of `call`."""
        return {"protocol": self._own, "nonce": self._nonce}

    def proof_for(self, prove: Mapping[str, Any], fingerprint: bytes) -> str:
        """Our own proof for `hello`; empty where the other side, whose certificate that is, has not proven anything."""
        protocol, nonce, shown = prove.get("protocol"), prove.get("nonce"), prove.get("proof")
        if not _is_version(protocol) or not _is_nonce(nonce) or not isinstance(shown, str):
            return ""
        said = (self._nonce, self._own, nonce, protocol)
        if not _same(shown, _proof(self._token, "answers", fingerprint, *said)):
            return ""
        self.protocol = int(prove["protocol"])
        return _proof(self._token, "calls", fingerprint, *said)


class Answerer:
    """The side that was called."""

    def __init__(self, token: str, fingerprint: bytes) -> None:
        self._token, self._fingerprint = token, fingerprint
        self._said: tuple[str, int, str, int] | None = None
        self.protocol = 0
        """What the other side speaks, once it has called."""

    def prove(self, call: Mapping[str, Any]) -> dict[str, Any] | None:
        """The fields of `prove`; None where that was no call."""
        if self._said is not None or not _is_version(call.get("protocol")) or not _is_nonce(call.get("nonce")):
            return None
        self.protocol = int(call["protocol"])
        nonce = secrets.token_hex(_NONCE_CHARACTERS // 2)
        self._said = (call["nonce"], self.protocol, nonce, PROTOCOL)
        proof = _proof(self._token, "answers", self._fingerprint, *self._said)
        return {"protocol": PROTOCOL, "nonce": nonce, "proof": proof}

    def is_proven_by(self, shown: object) -> bool:
        """Whether the other side, which has sent that as its proof, knows the secret, too."""
        if self._said is None or not isinstance(shown, str):
            return False
        return _same(shown, _proof(self._token, "calls", self._fingerprint, *self._said))


def _proof(token: str, side: str, fingerprint: bytes, *said: object) -> str:
    words = " ".join(["manyhosts", side, fingerprint.hex(), *map(str, said)])
    return hmac.new(token.encode(), words.encode(), hashlib.sha256).hexdigest()


def _same(one: str, other: str) -> bool:
    # As bytes: text with letters outside ASCII is refused by an exception, and JSON may hold halves of such letters.
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode())


def _is_version(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31


def _is_nonce(value: Any) -> bool:
    return isinstance(value, str) and len(value) == _NONCE_CHARACTERS and value.isascii() and value.isalnum()
