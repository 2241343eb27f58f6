"""A real server that speaks S3, in a process of its own, and what has s3fs find it.

It is moto's, and it and s3fs lie in `.venv/objects`: s3fs wants an older botocore than the other tests have, so that
folder comes before the rest for the processes here alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import requests

FOLDER = Path(sys.prefix, "objects")
BUCKET = "ours"
_SOMEBODY = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, Signature=b"}
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until whoever started this closes it, or is gone
"""


@dataclass(frozen=True)
class S3:
    url: str

    def names(self, prefix: str) -> list[str]:
        """Every object below `prefix`, as the server lists them."""
        answer = requests.get(f"{self.url}/{BUCKET}", params={"list-type": "2", "prefix": prefix}, timeout=30)
        answer.raise_for_status()
        return sorted(each.text or "" for each in ElementTree.fromstring(answer.content).iterfind(".//{*}Key"))

    def whole(self, prefix: str) -> list[int]:
        """The steps of the snapshots that have a manifest."""
        names = [name for name in self.names(prefix) if name.endswith("manifest.json") and "/step-" in name]
        return sorted(int(name.rpartition("/step-")[2][:8]) for name in names)

    def flip(self, name: str) -> None:
        """One bit of an object, on the disk of the provider."""
        url = f"{self.url}/{BUCKET}/{name}"
        content = bytearray(requests.get(url, headers=_SOMEBODY, timeout=30).content)
        content[-1] ^= 1
        requests.put(url, data=bytes(content), headers=_SOMEBODY, timeout=30).raise_for_status()

    def variables(self) -> dict[str, str]:
        """What a user has in the environment, and the way to s3fs."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nowhere",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
            "PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }


def is_here() -> bool:
    return (FOLDER / "s3fs").is_dir() and (FOLDER / "moto").is_dir()


@contextmanager
def serve() -> Iterator[S3]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        made = S3(f"http://127.0.0.1:{port}")
        try:
            requests.put(f"{made.url}/{BUCKET}", timeout=60).raise_for_status()
            yield made
        finally:
            process.kill()
