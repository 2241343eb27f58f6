"""The official client of Kubernetes, whose refusals become sentences."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from manyhosts.errors import LaunchError
from manyhosts.launchers import extras

_LIMIT_S = 60


class Client:
    """Asks the cluster of one context of the kubeconfig, or, inside a pod, the one that it is in."""

    def __init__(self, context: str = "") -> None:
        """
        Raises:
            LaunchError: the client is not installed, or no cluster is configured.
        """
        kubernetes = package()
        from kubernetes import config

        settings = kubernetes.Configuration()
        try:
            try:
                named = os.environ.get("KUBECONFIG")  # the package looks at it when it is imported, and never again
                config.load_kube_config(config_file=named, context=context or None, client_configuration=settings)
            except config.ConfigException:
                if context:
                    raise
                config.load_incluster_config(settings)
        except config.ConfigException as cause:
            raise LaunchError(
                f"no Kubernetes cluster is configured: {cause}",
                where=f"kubeconfig{f', context {context}' if context else ''}",
                fix="see that `kubectl get pods` works here, or name another context with -o context=NAME",
            ) from cause
        settings.retries = False  # one answer, and what is wrong is said at once
        client = kubernetes.ApiClient(settings)
        self._server = settings.host
        self._parts = {
            "batch": kubernetes.BatchV1Api(client),
            "core": kubernetes.CoreV1Api(client),
            "networking": kubernetes.NetworkingV1Api(client),
        }
        self._refusal = kubernetes.ApiException

    def ask(self, part: str, call: str, /, *words: Any, **more: Any) -> Any:
        """What the cluster answers to `call` of the API's `part`: `batch`, `core` or `networking`.

        Raises:
            LaunchError: it refused, or was not reached.
        """
        from urllib3.exceptions import HTTPError

        try:
            return getattr(self._parts[part], call)(*words, _request_timeout=_LIMIT_S, **more)
        except self._refusal as trouble:
            raise _refused(trouble, self._server) from trouble
        except (HTTPError, OSError) as trouble:
            raise self._not_reached(trouble) from trouble

    def find(self, part: str, call: str, /, *words: Any, **more: Any) -> Any:
        """As `ask`, but None where there is no such thing.

        Raises:
            LaunchError: as in `ask`.
        """
        try:
            return self.ask(part, call, *words, **more)
        except LaunchError as error:
            if isinstance(error.__cause__, self._refusal) and error.__cause__.status == 404:
                return None
            raise

    def log(self, pod: str, namespace: str, container: str, *, follow: bool) -> Iterator[str]:
        """The lines of a container; with `follow`, also those that come, until it ends.

        Raises:
            LaunchError: as in `ask`.
        """
        from urllib3.exceptions import HTTPError

        try:
            answer = self._parts["core"].read_namespaced_pod_log(
                pod, namespace, container=container, follow=follow, _preload_content=False
            )
            rest = b""
            for chunk in answer.stream():
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        except self._refusal as trouble:
            raise _refused(trouble, self._server) from trouble
        except (HTTPError, OSError) as trouble:
            raise self._not_reached(trouble) from trouble
        if rest:
            yield rest.decode(errors="replace")

    def _not_reached(self, trouble: Exception) -> LaunchError:
        return LaunchError(
            f"the Kubernetes cluster was not reached: {trouble}",
            where=self._server,
            fix="see that `kubectl get pods` works here",
        )


def package() -> Any:
    """The client's package.

    Raises:
        LaunchError: it is not installed.
    """
    return extras.load("kubernetes", what="the Kubernetes client", package="kubernetes").client


def _refused(trouble: Any, server: str) -> LaunchError:
    """The server's own words, which are JSON with a message."""
    body = trouble.body.decode(errors="replace") if isinstance(trouble.body, bytes) else str(trouble.body or "")
    try:
        said = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        said = str(trouble.reason)
    fixes = {
        401: "your login has run out, or is not known there: see that `kubectl get pods` works",
        403: "see what your account may do there: `kubectl auth can-i create jobs`; -o namespace= names another place",
        404: "see that the namespace is there: `kubectl get namespaces`",
        409: "give another --run-dir, whose last part names the job, or `kubectl delete job` the other one",
    }
    fix = fixes.get(trouble.status, "the options that go to it are given with -o; `--dry-run` shows what is sent")
    return LaunchError(f"Kubernetes refused: {said}", where=server, fix=fix)
