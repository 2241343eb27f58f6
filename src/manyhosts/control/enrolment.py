"""How agents that an engine starts get the run's secret, where others may read whatever the engine carries.

Only what is public goes through the engine: to an agent, on its command line, the fingerprint of the head's
certificate; and back, as a line of its standard output, the hash of a key that it has drawn. The key itself it sends to
the head alone, over TLS with that very certificate. A caller that sends a key whose hash came from the engine is given
the secret there. `docs/decisions/0059` says what that is worth under each engine.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field

from manyhosts.control.tls import Identity

_KEY_BYTES = 32
_LINE = re.compile(r"manyhosts-agent-key ([0-9a-f]{64})\s*")


def new_key() -> str:
    """A key for one agent."""
    return secrets.token_hex(_KEY_BYTES)


def announcement(key: str) -> str:
    """The line that an agent prints: it reveals nothing of the key itself."""
    return f"manyhosts-agent-key {_hash(key)}\n"


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Enrolment:
    """Which agents may have the secret, as their head knows it."""

    identity: Identity = field(default_factory=Identity)
    """The certificate whose fingerprint agents get."""
    _announced: set[str] = field(default_factory=set)

    @property
    def certificate(self) -> str:
        """Its fingerprint, 64 hexadecimal digits."""
        return self.identity.fingerprint.hex()

    def read(self, line: str) -> bool:
        """Take note of a line that an agent has printed. Returns whether it was an announcement. From any thread."""
        found = _LINE.fullmatch(line)
        if found is not None:
            self._announced.add(found[1])
        return found is not None

    def admits(self, key: str) -> bool:
        """Whether an agent has announced `key`."""
        return _hash(key) in self._announced
