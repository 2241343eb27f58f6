"""Kubernetes: one pod per node, through the official client, whose refusals become sentences."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from manyhosts.control import job_file, variables
from manyhosts.control.job import Job
from manyhosts.control.plan import Plan, filled
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.launchers import extras, packing
from manyhosts.launchers.detached import Status
from manyhosts.launchers.engine import Engine
from manyhosts.launchers.kubernetes import manifest as kubernetes_manifest
from manyhosts.launchers.kubernetes.manifest import CONTAINER, LABEL, OPTIONS, job_there, manifests, name_of

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
                named = os.environ.get("KUBECONFIG")  # the package reads it at import only
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


_LOOK_S = 2.0
_INDEX = "batch.kubernetes.io/job-completion-index"
_KINDS = {
    "Service": ("core", "service"),
    "Secret": ("core", "secret"),
    "NetworkPolicy": ("networking", "network_policy"),
    "ConfigMap": ("core", "config_map"),
}
_BEGIN = "then, of the Job"
"""What a plan calls the change by which the pods begin."""


class Kubernetes(Engine):
    """Hands a job to a cluster, where it lives by itself."""

    NAME = "kubernetes"
    OPTIONS = OPTIONS
    CHOOSES_HOSTS = "--nodes N and -o node-selector="
    CALLS_BACK = False

    def __init__(self, connect: Callable[[str], Client] = Client, wait: Callable[[float], None] = time.sleep) -> None:
        """`connect` makes a client of a context's name; an empty one is the current context."""
        super().__init__(wait=wait)
        self._connect = connect

    def check(self, job: Job) -> Job:
        """As of every engine, and that Kubernetes can be asked for `job`."""
        checked = super().check(job)
        kubernetes_manifest.check(job)
        return checked

    def plan(self, job: Job) -> Plan:
        """The manifests, and what lets the pods begin when all of them are there.

        Raises:
            ConfigError: an option is unknown, missing or unreadable.
        """
        job = self.check(job)
        made = manifests(job)
        files: dict[str, Any] = {f"{kind}.json": manifest for kind, manifest in made.items()}
        if "queue" not in job.options:  # else it is for Kueue to say when
            files[_BEGIN] = {"spec": {"suspend": False}}
        return Plan(job=job, workers=variables.of_all(job, address=f"{name_of(job)}-0"), files=files, notes=_notes(job))

    def there(self, job: Job) -> Job:
        """The job in its pods."""
        return kubernetes_manifest.job_there(job)

    def shares_disk(self, job: Job) -> bool:
        """Whether the run directory is on a volume."""
        return kubernetes_manifest.keeps_record(job)

    def send(self, plan: Plan) -> str:
        """Make the job and what belongs to it. Returns NAMESPACE/NAME, after the context where one was named.

        Raises:
            ConfigError: the working directory is too large to be sent.
            LaunchError: the client is not installed, or the cluster refused or was not reached.
        """
        job = plan.job
        values = {"token": secrets.token_hex(16), "environment": json.dumps(job_file.hidden(job)), "uid": ""}
        if "folder" not in job.options:
            packed = packing.pack(job.folder, leave_out=job.run_dir, needed=job.program if job.kind == "script" else "")
            kubernetes_manifest.check_size(packed, job.folder)
            values["archive"] = base64.b64encode(packed).decode()
        context = job.options.get("context", "")
        client = self._connect(context)
        bodies = dict(plan.files)
        made, begin = bodies.pop("Job.json"), bodies.pop(_BEGIN, None)
        namespace, name = made["metadata"]["namespace"], made["metadata"]["name"]
        values["uid"] = client.ask("batch", "create_namespaced_job", namespace, filled(made, values)).metadata.uid
        try:
            for body in bodies.values():
                part, word = _KINDS[body["kind"]]
                client.ask(part, f"create_namespaced_{word}", namespace, filled(body, values))
            if begin is not None:
                client.ask("batch", "patch_namespaced_job", name, namespace, begin)
        except BaseException:  # Ctrl-C too: half a job is of no use
            self._delete(client, namespace, name)
            raise
        return "/".join(part for part in (context, namespace, name) if part)

    def status(self, name: str) -> Status:
        """The job's state, and what its pods wait for."""
        context, namespace, job_name = _parts(name)
        client = self._connect(context)
        job = client.find("batch", "read_namespaced_job", job_name, namespace)
        if job is None:
            return Status(state="unknown", reason="Kubernetes has no such job: it was cancelled, or is over for days")
        for condition in job.status.conditions or []:
            if condition.status == "True" and condition.type == "Complete":
                return Status(state="done", reason="Complete", code=0)
            if condition.status == "True" and condition.type == "Failed":
                reason = f"{condition.reason}: {condition.message}"
                code = re.search(r"exit code (\d+)", reason)
                return Status(state="failed", reason=reason, code=int(code[1]) if code else 1)
        pods = self._pods(client, namespace, job_name)
        running = [pod for pod in pods if pod.status.phase == "Running"]
        hosts = ",".join(sorted({pod.spec.node_name for pod in running if pod.spec.node_name}))
        waits = next((why for pod in pods if (why := _why_it_waits(pod))), "")
        reason = "; ".join(part for part in (f"{len(running)} of {job.spec.completions} pods run", waits) if part)
        first_runs = any(_index(pod) == "0" for pod in running)
        return Status(state="running" if first_runs else "waiting", reason=reason, hosts=hosts)

    def logs(self, name: str, *, follow: bool) -> Iterator[str]:
        """What the pods of the first node have printed: the run's output. A pod may have been started again.

        Raises:
            LaunchError: the first node has printed nothing yet, and `follow` is off; or there is no such job.
        """
        context, namespace, job_name = _parts(name)
        client = self._connect(context)
        seen: set[str] = set()
        while True:
            over = self.status(name).over
            fresh = [pod for pod in self._pods(client, namespace, job_name) if _index(pod) == "0"]
            fresh = [pod for pod in fresh if pod.metadata.name not in seen and pod.status.phase != "Pending"]
            for pod in sorted(fresh, key=lambda each: str(each.metadata.creation_timestamp)):
                seen.add(pod.metadata.name)
                yield from client.log(pod.metadata.name, namespace, CONTAINER, follow=follow)
            if over or not follow:
                break
            self._wait(_LOOK_S)
        if not seen:
            status = self.status(name)
            raise LaunchError(
                f"the first node has printed nothing: {status.reason}",
                where=f"kubernetes://{name}",
                fix=f"see `kubectl --namespace {namespace} describe job {job_name}`"
                + ("" if follow else "; --follow waits for its first line"),
            )

    def cancel(self, name: str) -> None:
        """Delete the job; its pods, Service, Secret and ConfigMap go with it. One that is over is left as it is."""
        context, namespace, job_name = _parts(name)
        if not self.status(name).over:
            self._delete(self._connect(context), namespace, job_name)

    def forget(self, name: str) -> None:
        """Delete the job, also one that is over, whose log is gone then."""
        context, namespace, job_name = _parts(name)
        self._delete(self._connect(context), namespace, job_name)

    @staticmethod
    def _delete(client: Client, namespace: str, name: str) -> None:
        client.find("batch", "delete_namespaced_job", name, namespace, propagation_policy="Background")

    @staticmethod
    def _pods(client: Client, namespace: str, job_name: str) -> list[Any]:
        found: list[Any] = client.ask(
            "core", "list_namespaced_pod", namespace, label_selector=f"{LABEL}={job_name}"
        ).items
        return found


def _notes(job: Job) -> tuple[str, ...]:
    if kubernetes_manifest.keeps_record(job) or "snapshots.to" in job.overrides:
        return ()
    return (
        f"the run directory, {job_there(job).run_dir}, is on no volume: snapshots and record go with the pods;"
        " to keep them: -o volumes=CLAIM:/path and a --run-dir below that path, or --set snapshots.to=ADDRESS",
    )


def _why_it_waits(pod: Any) -> str:
    """What Kubernetes says of a pod that does not run yet."""
    if pod.status.phase != "Pending":
        return ""
    for state in pod.status.container_statuses or []:
        waiting = state.state.waiting if state.state else None
        if waiting is not None and waiting.reason not in (None, "ContainerCreating", "PodInitializing"):
            return ": ".join(part for part in (waiting.reason, waiting.message) if part)
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return ": ".join(part for part in (condition.reason, condition.message) if part)
    return ""


def _index(pod: Any) -> str:
    annotations: Mapping[str, str] = pod.metadata.annotations or {}
    return annotations.get(_INDEX, "")


def _parts(name: str) -> tuple[str, str, str]:
    """CONTEXT/NAMESPACE/NAME; the context may be missing, and may have slashes itself."""
    *context, namespace, job_name = name.split("/") if "/" in name else ("", "")
    if not all(re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", part) for part in (namespace, job_name)):
        raise ConfigError(
            f"{name!r} is no name of a job", where=f"kubernetes://{name}", fix="write it as kubernetes://NAMESPACE/NAME"
        )
    return "/".join(context), namespace, job_name
