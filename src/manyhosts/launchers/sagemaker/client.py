"""boto3, whose refusals become sentences."""

from __future__ import annotations

from typing import Any

from manyhosts.errors import LaunchError
from manyhosts.launchers import extras

_FIXES = {
    "ResourceLimitExceeded": "ask AWS for more under Service Quotas, or take another -o instance= or fewer --nodes",
    "AccessDenied": "your AWS user or role lacks a permission: the words above name it; docs/sagemaker.md lists all",
    "ExpiredToken": "your AWS login has run out: log in again (`aws sso login`, say)",
    "UnrecognizedClient": "these AWS credentials are not known: see `aws sts get-caller-identity`",
    "InvalidAccessKeyId": "these AWS credentials are not known: see `aws sts get-caller-identity`",
    "NoSuchBucket": "make the bucket in the region of the job, or name another one with -o bucket=s3://BUCKET/FOLDER",
    "Throttling": "AWS is asked too often by this account: wait a minute and try again",
}


class Client:
    """Asks the services of one region."""

    def __init__(self, region: str = "", profile: str = "") -> None:
        """
        Raises:
            LaunchError: boto3 is not installed, or there is no such profile, or no region is chosen.
        """
        boto3 = extras.load("boto3", what="boto3, the client of AWS,", package="boto3")
        from botocore.exceptions import BotoCoreError

        try:
            self._session = boto3.Session(region_name=region or None, profile_name=profile or None)
        except BotoCoreError as trouble:
            raise reported(trouble) from trouble
        self.region = str(self._session.region_name or "")
        if not self.region:
            raise LaunchError(
                "no AWS region is chosen",
                where="AWS_REGION, AWS_DEFAULT_REGION, ~/.aws/config",
                fix="name one: -o region=eu-central-1",
            )
        self._clients: dict[str, Any] = {}

    def ask(self, service: str, call: str, /, **words: Any) -> dict[str, Any]:
        """What `service` answers to `call`.

        Raises:
            LaunchError: it refused, or was not reached.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            if service not in self._clients:
                self._clients[service] = self._session.client(service)
            answer: dict[str, Any] = getattr(self._clients[service], call)(**words)
        except (BotoCoreError, ClientError) as trouble:
            raise reported(trouble) from trouble
        return answer


def reported(trouble: Any) -> LaunchError:
    """What is wrong, in one sentence."""
    kind = type(trouble).__name__
    if kind in ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "SSOTokenLoadError"):
        return LaunchError(
            f"there are no AWS credentials to be had: {trouble}",
            where="AWS_PROFILE, AWS_ACCESS_KEY_ID, ~/.aws",
            fix="log in (`aws configure`, `aws sso login`), or name a profile: -o profile=NAME",
        )
    if not hasattr(trouble, "response"):
        fix = "see your AWS configuration, and that this machine reaches the internet"
        return LaunchError(f"AWS was not reached: {trouble}", where=f"boto3, {kind}", fix=fix)
    error = trouble.response.get("Error", {})
    code = str(error.get("Code", ""))
    fix = next((line for start, line in _FIXES.items() if code.startswith(start)), "")
    return LaunchError(
        f"AWS refused {trouble.operation_name}: {error.get('Message') or code}",
        where=f"AWS, {code}",
        fix=fix or "the options that go to it are given with -o; `--dry-run` shows what is sent",
    )


def code_of(error: LaunchError) -> str:
    """The code with which AWS has refused; empty where it was something else."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
