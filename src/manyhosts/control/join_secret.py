"""The secret that is typed where a host joins: what the run's agents know, and which certificate its head shows."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field

from manyhosts.errors import ConfigError

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
