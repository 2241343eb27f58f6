"""Kubernetes objects of a run: an Indexed Job with a pod per node, and the Service, Secret and ConfigMap for them."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from manyhosts.control import first_node, job_file
from manyhosts.control.head.state import port_of
from manyhosts.control.job import Job
from manyhosts.control.plan import Later
from manyhosts.errors import ConfigError
from manyhosts.launchers import choices, packing
from manyhosts.records import run_directory

OPTIONS = {
    "image": "the container image, which has Python, manyhosts and what the script imports; there is no default",
    "namespace": "where the job is made (default: default)",
    "context": "the context of the kubeconfig (default: its current one)",
    "folder": "the working directory in the image or on a volume; without it, the one here is sent, up to 1 MB",
    "volumes": "persistent volume claims and where they are seen: CLAIM:/path,CLAIM:/path",
    "gpus": "NVIDIA GPUs of each node",
    "cpu": "cores of each node: 8, or 500m (asked for without it: 1)",
    "memory": "memory of each node: 32Gi (asked for without it: 2Gi)",
    "shm": "shared memory for the workers of DataLoaders (default 2Gi)",
    "node-selector": "labels that the machines must have: KEY=VALUE,KEY=VALUE",
    "tolerations": "taints of machines that are no hindrance: KEY,KEY",
    "service-account": "the service account of the pods; without one they get no token for the cluster",
    "user": "the number of the user that the pods run as, not 0; namespaces that are `restricted` ask for one",
    "env-from": "Secrets whose values the workers get as variables: SECRET,SECRET",
    "network-policy": "yes: nothing but the pods of this run may open connections to them",
    "queue": "the LocalQueue of Kueue, which then says when the pods start",
    "pull-secret": "the Secret for pulling the image",
    "priority-class": "the priority class of the pods",
    "time": "the longest time that the run may take: 8h",
    "wait": "how long nodes wait for each other, until there is room for all (default 1h)",
    "python": "the Python in the image (default python3)",
}
CONTAINER = "node"
_VERSIONS = {"Job": "batch/v1", "NetworkPolicy": "networking.k8s.io/v1"}
LABEL = "manyhosts-run"
UNPACKED = "/manyhosts/folder"
"""Where the working directory is in a pod, if it was sent."""
_PACKED, _ARCHIVE = "/manyhosts/packed", "folder.tar.gz"
_MOST_PACKED_BYTES = 1_000_000  # a ConfigMap holds one MiB
TOKEN_HERE, ENVIRONMENT_HERE, ARCHIVE_HERE, OWNER_HERE = (
    Later("token", "(the secret of the run)"),
    Later("environment", "(the values of --env)"),
    Later("archive", base64.b64encode(b"(the working directory, packed)").decode()),
    Later("uid", "(the uid of the Job)"),
)
_FINAL = [1, 2, 3, 4]
"""Exit codes that say how the run ended: the same again would end so again."""
_LOST_PODS = 6
"""How often a pod may end without a word (no memory left, its machine gone) before the job is given up."""
_BYTES = r"\d+(\.\d+)?([kMGTPE]i?|m)?"
_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_PATTERNS = {
    "cpu": r"\d+(\.\d+)?|\d+m",
    **dict.fromkeys(("memory", "shm"), _BYTES),
    **dict.fromkeys(("namespace", "service-account", "pull-secret", "priority-class", "queue"), _NAME),
    "env-from": f"{_NAME}(,{_NAME})*",
    "user": r"[1-9]\d*",
}
_KEPT_S = 7 * 24 * 60 * 60
JOB, HEAD, ADDRESS, TOKEN, ARCHIVE, HIDDEN = (
    f"MANYHOSTS_NODE_{what}" for what in ("JOB", "HEAD", "ADDRESS", "TOKEN", "ARCHIVE", "HIDDEN")
)
"""Variables of a pod: what to run as JSON, host:port of the head, this pod's address, the token, the packed folder, and
what `--env` gives the workers as JSON."""
QUEUE = "kueue.x-k8s.io/queue-name"
_LEAST = {"cpu": "1", "memory": "2Gi"}
"""A node's requests unless the user sets them: pods without requests are the first to be evicted."""


def check(job: Job) -> None:
    """See that Kubernetes can be asked for `job`.

    Raises:
        ConfigError: an option is missing or unreadable.
    """
    if "image" not in job.options:
        fix = "name one with Python and manyhosts: -o image=REPO:TAG"
        raise ConfigError("no image is named", where="-o image", fix=fix)
    choices.see_that_gpus_are_used(job)
    _check_words(job)
    _check_folder(job)
    choices.pairs(job.options, "node-selector", OPTIONS)
    choices.yes(job.options, "network-policy", default=False)
    for key in ("time", "wait"):
        choices.seconds(job.options, key)
    for path in _volumes(job).values():
        if not path.startswith("/"):
            raise ConfigError(f"{path!r} is no absolute path", where="-o volumes", fix=OPTIONS["volumes"])


def _check_words(job: Job) -> None:
    for key, pattern in _PATTERNS.items():
        if key in job.options and not re.fullmatch(pattern, job.options[key]):
            raise ConfigError(
                f"{key} is {job.options[key]!r}, which Kubernetes does not take",
                where=f"-o {key}",
                fix=f"{key} is {OPTIONS[key]}",
            )


def _check_folder(job: Job) -> None:
    if "folder" in job.options:
        if not job.options["folder"].startswith("/"):
            raise ConfigError(
                f"folder is {job.options['folder']!r}", where="-o folder", fix="give an absolute path, as pods see it"
            )
        return
    if not job.sync:
        raise ConfigError(
            "with --no-sync nothing brings the script to the pods",
            where="--no-sync",
            fix="say where it is in the image or on a volume: -o folder=/path",
        )
    packing.program_there(job)


def check_size(packed: bytes, folder: Path) -> None:
    """See that the working directory is small enough to be sent.

    Raises:
        ConfigError: it is not.
    """
    if len(packed) > _MOST_PACKED_BYTES:
        raise ConfigError(
            f"the working directory is {len(packed) / 1e6:.1f} MB when packed, and Kubernetes takes 1 MB",
            where=str(folder),
            fix="name what the run does not need in .manyhostsignore, or put the folder into the image or on a volume"
            " and say where: -o folder=/path",
        )


def name_of(job: Job) -> str:
    """What the job is called: its run's name as Kubernetes allows names, short enough for the pods' own."""
    name = re.sub(r"[^a-z0-9]+", "-", job.run_id.lower()).strip("-")[-50:].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")  # a Service's name begins with a letter


def job_there(job: Job) -> Job:
    """`job` as its pods see it: with their working directory, and their run directory."""
    folder = Path(job.options.get("folder", UNPACKED))
    environment = dict(job.environment)
    if not keeps_record(job):
        environment[run_directory.SEPARATE_DISKS] = "1"  # each pod has a disk of its own
    return replace(
        job,
        program=packing.program_there(job) if "folder" not in job.options else job.program,
        folder=folder,
        run_dir=_run_dir_there(job),
        options={key: value for key, value in job.options.items() if key == "wait"},
        hosts=(),
        environment=environment,
    )


def _run_dir_there(job: Job) -> Path:
    folder = Path(job.options.get("folder", UNPACKED))
    return folder / job.run_dir.relative_to(job.folder) if _is_below(job.run_dir, job.folder) else job.run_dir


def keeps_record(job: Job) -> bool:
    """Whether the run directory is on a volume, so that all pods share it and it is there when they are gone."""
    run_dir = _run_dir_there(job)
    return any(_is_below(run_dir, Path(path)) for path in _volumes(job).values())


def manifests(job: Job) -> dict[str, dict[str, Any]]:
    """The Job and what it needs, which goes when the Job goes, in the order in which they are made.

    The Job begins suspended: its pods are started when all that they need is there.
    """
    name = name_of(job)

    def head(kind: str) -> dict[str, Any]:
        labels = {"app.kubernetes.io/managed-by": "manyhosts", LABEL: name}
        labels |= {QUEUE: job.options["queue"]} if kind == "Job" and "queue" in job.options else {}
        meta: dict[str, Any] = {"name": name, "namespace": job.options.get("namespace", "default"), "labels": labels}
        if kind != "Job":
            meta["ownerReferences"] = [{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": OWNER_HERE}]
        return {"apiVersion": _VERSIONS.get(kind, "v1"), "kind": kind, "metadata": meta}

    ports = [{"name": "head", "port": port_of(job)}]
    service = {"clusterIP": "None", "selector": {LABEL: name}, "publishNotReadyAddresses": True, "ports": ports}
    secrets = {"token": TOKEN_HERE, "environment": ENVIRONMENT_HERE}
    made = {
        "Job": {**head("Job"), "spec": _job_spec(job, name)},
        "Service": {**head("Service"), "spec": service},
        "Secret": {**head("Secret"), "type": "Opaque", "stringData": secrets},
    }
    if choices.yes(job.options, "network-policy", default=False):
        own = {"matchLabels": {LABEL: name}}
        rule = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}
        made["NetworkPolicy"] = {**head("NetworkPolicy"), "spec": rule}
    if "folder" not in job.options:
        made["ConfigMap"] = {**head("ConfigMap"), "binaryData": {_ARCHIVE: ARCHIVE_HERE}}
    return made


def _job_spec(job: Job, name: str) -> dict[str, Any]:
    def on_exit(action: str, codes: list[int]) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes}}

    disrupted = {"type": "DisruptionTarget", "status": "True"}
    spec: dict[str, Any] = {
        "suspend": True,
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": _LOST_PODS,
        "ttlSecondsAfterFinished": _KEPT_S,
        "podFailurePolicy": {
            "rules": [
                on_exit("FailJob", _FINAL),
                on_exit("Ignore", [first_node.AGAIN]),
                {"action": "Ignore", "onPodConditions": [disrupted]},  # evicted, preempted, drained
            ]
        },
        "template": {"metadata": {"labels": {LABEL: name}}, "spec": _pod_spec(job, name)},
    }
    if limit_s := choices.seconds(job.options, "time"):
        spec["activeDeadlineSeconds"] = limit_s
    return spec


def _pod_spec(job: Job, name: str) -> dict[str, Any]:
    options = job.options
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.get("shm", "2Gi")}}
    ]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108  # where it is in every container
    for number, (claim, path) in enumerate(_volumes(job).items()):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    if "folder" not in options:
        volumes += [{"name": "packed", "configMap": {"name": name}}, {"name": "folder", "emptyDir": {}}]
        mounts += [{"name": "packed", "mountPath": _PACKED}, {"name": "folder", "mountPath": UNPACKED}]
    spec: dict[str, Any] = {
        "subdomain": name,  # gives each pod the name POD.SERVICE
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(job.farewell_s) + 30,
        "enableServiceLinks": False,  # variables about everybody's services, which no worker needs
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{**_container(job, name), "volumeMounts": mounts}],
        "volumes": volumes,
    }
    if "service-account" not in options:
        spec["automountServiceAccountToken"] = False
    if "user" in options:
        number = int(options["user"])
        who = {"runAsNonRoot": True, "runAsUser": number, "runAsGroup": number, "fsGroup": number}
        spec["securityContext"] |= who
    if "node-selector" in options:
        spec["nodeSelector"] = choices.pairs(job.options, "node-selector", OPTIONS)
    if "tolerations" in options:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in options["tolerations"].split(",")]
    for key, field in (("service-account", "serviceAccountName"), ("priority-class", "priorityClassName")):
        if key in options:
            spec[field] = options[key]
    if "pull-secret" in options:
        spec["imagePullSecrets"] = [{"name": options["pull-secret"]}]
    return spec


def _container(job: Job, name: str) -> dict[str, Any]:
    options = job.options
    public = job_file.without_hidden(job_there(job))
    limits = {key: options[key] for key in ("cpu", "memory") if key in options}
    if choices.gpus(options) != "0":
        limits["nvidia.com/gpu"] = choices.gpus(options)
    variables: list[dict[str, Any]] = [
        {"name": JOB, "value": job_file.text_of(public).replace("$(", "$$(")},  # which would be a variable
        {"name": HEAD, "value": f"{name}-0.{name}:{port_of(job)}"},
        {"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}},
        {"name": HIDDEN, "valueFrom": {"secretKeyRef": {"name": name, "key": "environment"}}},
    ]
    if "folder" not in options:
        variables.append({"name": ARCHIVE, "value": str(PurePosixPath(_PACKED, _ARCHIVE))})
    container = {
        "name": CONTAINER,
        "image": options["image"],
        "command": [options.get("python", "python3"), "-P", "-m", "manyhosts.launchers.kubernetes.node"],
        "workingDir": options.get("folder", UNPACKED),
        "env": variables,
        "resources": {"limits": limits, "requests": {**_LEAST, **limits}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if "env-from" in options:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in options["env-from"].split(",")]
    return container


def _volumes(job: Job) -> dict[str, str]:
    """Claim → where it is seen."""
    return choices.pairs(job.options, "volumes", OPTIONS, between=":")


def _is_below(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents
