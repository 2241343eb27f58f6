"""TLS 1.3 for connections of one run: a certificate that is made for it, and encryption independent of any socket.

No authority signs the certificate and its name is not checked. What it is worth is shown by `control.proof`: both sides
prove that they know the run's secret, in words that hold for this very certificate and no other.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import os
import ssl
import tempfile
import threading

_VALID_DAYS = 3650  # the clocks of hosts may be wrong, and a run may be long: the key is forgotten with the run


def prepare() -> None:
    """Begin to load what makes certificates, on a thread: that takes a tenth of a second, and hosts take longer."""
    threading.Thread(target=importlib.import_module, args=("cryptography.x509",), daemon=True).start()


class Identity:
    """The head's key and certificate: made in this process, and gone with it unless `pem` is saved."""

    def __init__(self, pem: str = "") -> None:
        """`pem` is what another head had; without it, a key is made."""
        certificate, key = _parts(pem) if pem else _self_signed()
        self.pem = (key + certificate).decode()
        """The key and the certificate, for a head that takes over from this one. A secret."""
        self.fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode())).digest()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.num_tickets = 0  # no session is resumed
        with tempfile.NamedTemporaryFile(prefix="manyhosts-") as file:  # for us alone; OpenSSL wants a name
            file.write(key + certificate)
            file.flush()
            os.chmod(file.name, 0o600)
            self._context.load_cert_chain(file.name)

    def answer(self) -> Tls:
        """The called side of one connection."""
        return Tls(self._context, server_side=True)


def call() -> Tls:
    """The calling side of one connection. Any certificate will do until its fingerprint is proven."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return Tls(context, server_side=False)


class Tls:
    """One end of an encrypted connection. It reads and writes bytes only; somebody else carries them."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._connection = context.wrap_bio(self._coming, self._going, server_side=server_side)
        self._is_up = self._has_ended = False
        self._waiting = bytearray()
        """What is to be sent when the two have agreed on their keys."""
        if not server_side:
            self._agree()

    @property
    def is_up(self) -> bool:
        """Whether both sides have agreed on their keys; the other one has then shown the key of its certificate."""
        return self._is_up

    @property
    def has_ended(self) -> bool:
        """Whether nothing follows what `receive` has returned: the other side has said so, or spoken no TLS."""
        return self._has_ended

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the other side's certificate, 32 bytes; empty before it has shown one."""
        shown = self._connection.getpeercert(binary_form=True) if self._is_up else None
        return hashlib.sha256(shown).digest() if shown else b""

    def send(self, words: bytes) -> None:
        """Encrypt `words`; `take` has them then. After the end they are dropped."""
        if self._has_ended:
            return
        if self._is_up:
            self._connection.write(words)
        else:
            self._waiting += words

    def take(self) -> bytes:
        """What is to be carried to the other side."""
        return self._going.read()

    def receive(self, came: bytes) -> bytes:
        """What the other side says in bytes that came from it; afterwards `has_ended` may be true.

        Raises:
            ssl.SSLError: they are no TLS, or not its own.
        """
        self._coming.write(came)
        found = bytearray()
        try:
            if self._is_up or self._agree():
                while part := self._connection.read(1 << 16):  # nothing: it has said goodbye, by close_notify
                    found += part
                self._has_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self._has_ended = True
            if not found:
                raise  # otherwise the next one to read notices the end
        return bytes(found)

    def _agree(self) -> bool:
        try:
            self._connection.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self._is_up = True
        if self._waiting:
            self._connection.write(self._waiting)
            self._waiting.clear()
        return True


def _parts(pem: str) -> tuple[bytes, bytes]:
    """The certificate and the key of what `Identity.pem` is."""
    begin = pem.index("-----BEGIN CERTIFICATE")
    return pem[begin:].encode(), pem[:begin].encode()


def _self_signed() -> tuple[bytes, bytes]:
    """A certificate and its key, as PEM."""
    from cryptography import x509  # here, for it takes a tenth of a second to load and few processes need it
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "manyhosts")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=_VALID_DAYS))
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return certificate.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
