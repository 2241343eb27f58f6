"""A Kubernetes of our own, for tests: real paths, bodies held to the schema of its API, pods that are real processes.

It does what the Job controller, the kubelet and the garbage collector do with what we send, and nothing else: Indexed
Jobs with a pod failure policy, variables from fields and Secrets, ConfigMaps as files, owners, grace periods.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import signal
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import kubernetes_validate

VERSION = "1.34"
_KINDS = {
    "jobs": "Job",
    "services": "Service",
    "secrets": "Secret",
    "configmaps": "ConfigMap",
    "pods": "Pod",
    "networkpolicies": "NetworkPolicy",
}
_PATH = re.compile(
    r"/(?:api/v1|apis/batch/v1|apis/networking.k8s.io/v1)/namespaces/([^/]+)/(\w+)(?:/([^/]+))?(?:/(\w+))?"
)
_INDEX = "batch.kubernetes.io/job-completion-index"


class Machine(Protocol):
    """What runs a pod's container."""

    address: str
    name: str

    def start(self, words: list[str], folder: str, variables: dict[str, str], log: Path) -> Any:
        """Returns what has `poll`, as subprocess.Popen has."""

    def signal(self, process: Any, number: signal.Signals) -> None: ...

    def write(self, path: str, content: bytes) -> None: ...

    def make(self, folder: str) -> None: ...


@dataclass
class Refusal(Exception):
    code: int
    reason: str
    message: str


@dataclass
class Pod:
    body: dict[str, Any]
    machine: Machine | None = None
    process: Any = None
    log: Path | None = None
    end_by: float | None = None
    """When it is killed."""


@dataclass
class Cluster:
    """State and controllers."""

    folder: Path
    machine_of: Callable[[int], Machine] | None = None
    """The machine for the pod of an index; None: pods wait for a machine for ever."""
    namespaces: tuple[str, ...] = ("default", "team")
    objects: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    bodies: dict[str, Any] = field(default_factory=dict)
    """What was sent last of each kind, as it was."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    url: str = ""

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        with self.lock:
            self.asked.append((method, path))
            found = _PATH.fullmatch(path)
            if found is None:
                raise Refusal(404, "NotFound", f"the server has no {path}")
            namespace, plural, name, part = found.groups()
            if namespace == "secret-place":
                raise Refusal(403, "Forbidden", f'{plural} is forbidden: User "me" cannot {method} in "{namespace}"')
            if namespace not in self.namespaces:
                raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found')
            kind = _KINDS[plural]
            if part == "log":
                return self.pods[self._get("Pod", namespace, name)["metadata"]["name"]]
            if method in ("POST", "PATCH"):
                self.bodies[kind if method == "POST" else "patch"] = copy.deepcopy(body)
            if method == "POST":
                return self._make(kind, namespace, body)
            if method == "PATCH":
                return self._merge(self._get(kind, namespace, name), body)
            if method == "DELETE":
                self._remove(self._get(kind, namespace, name))
                return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            if name is not None:
                return self._get(kind, namespace, name)
            label, _, value = query.get("labelSelector", "").partition("=")
            items = [pod.body for pod in self.pods.values() if pod.body["metadata"]["namespace"] == namespace]
            items = [each for each in items if each["metadata"]["labels"].get(label) == value]
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}

    # Objects.

    def _get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        found = self.pods[name].body if kind == "Pod" and name in self.pods else None
        found = found or self.objects.get((kind, namespace, name))
        if found is None:
            raise Refusal(404, "NotFound", f'{kind.lower()}s "{name}" not found')
        return found

    def _make(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        _validate(body)
        name = body["metadata"]["name"]
        if body["kind"] != kind or body["metadata"].get("namespace", namespace) != namespace:
            raise Refusal(400, "BadRequest", "the body does not fit the path")
        if (kind, namespace, name) in self.objects:
            raise Refusal(409, "AlreadyExists", f'{kind.lower()}s "{name}" already exists')
        if kind == "ConfigMap":
            size = sum(len(base64.b64decode(each)) for each in body.get("binaryData", {}).values())
            if size > 1 << 20:
                raise Refusal(422, "Invalid", "ConfigMap is invalid: Too long: must have at most 1048576 bytes")
        for owner in body["metadata"].get("ownerReferences", []):
            if self.objects[(owner["kind"], namespace, owner["name"])]["metadata"]["uid"] != owner["uid"]:
                raise Refusal(422, "Invalid", "the owner is another one")
        for key, text in body.pop("stringData", {}).items():  # which can be written and never read
            body.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
        body["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        if kind == "Job":
            body["status"] = {}
        self.objects[(kind, namespace, name)] = body
        return body

    def _merge(self, found: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
        for key, value in change.items():
            if isinstance(value, dict):
                self._merge(found.setdefault(key, {}), value)
            else:
                found[key] = value
        if "kind" in found:
            _validate(found)
        return found

    def _remove(self, found: dict[str, Any]) -> None:
        meta = found["metadata"]
        self.objects.pop((found["kind"], meta["namespace"], meta["name"]), None)
        for key, other in list(self.objects.items()):
            if any(owner["uid"] == meta["uid"] for owner in other["metadata"].get("ownerReferences", [])):
                del self.objects[key]
        for pod in list(self.pods.values()):
            if pod.body["metadata"]["ownerReferences"][0]["uid"] == meta["uid"]:
                self.end(pod)

    # Pods.

    def look(self) -> None:
        """One round of the controllers."""
        with self.lock:
            for pod in list(self.pods.values()):
                self._look_after_pod(pod)
            for (kind, _, _), job in list(self.objects.items()):
                if kind == "Job" and not job["spec"].get("suspend") and not _over(job):
                    self._look_after_job(job)

    def evict(self, index: int) -> None:
        """As when a machine is drained: SIGTERM, the grace period, SIGKILL."""
        with self.lock:
            for pod in self.of_index(index):
                if pod.body["status"]["phase"] == "Running":
                    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
                    pod.body["status"]["conditions"] = [condition]
                    self.end(pod, delete=False)

    def of_index(self, index: int) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.body["metadata"]["annotations"][_INDEX] == str(index)]

    def end(self, pod: Pod, *, delete: bool = True) -> None:
        pod.body["metadata"]["deletionTimestamp"] = _now() if delete else None
        grace_s = pod.body["spec"]["terminationGracePeriodSeconds"]
        if pod.process is not None and pod.end_by is None:
            pod.end_by = time.monotonic() + grace_s
            pod.machine.signal(pod.process, signal.SIGTERM)

    def _look_after_pod(self, pod: Pod) -> None:
        meta, status = pod.body["metadata"], pod.body["status"]
        if pod.process is not None and status["phase"] == "Running":
            code = pod.process.poll()
            if code is not None:
                code = 128 - code if code < 0 else code
                status["phase"] = "Succeeded" if code == 0 else "Failed"
                status["code"] = code
            elif pod.end_by is not None and time.monotonic() > pod.end_by:
                pod.machine.signal(pod.process, signal.SIGKILL)
        if meta.get("deletionTimestamp") and status["phase"] != "Running":
            del self.pods[meta["name"]]

    def _look_after_job(self, job: dict[str, Any]) -> None:
        spec, status, name = job["spec"], job["status"], job["metadata"]["name"]
        own = [pod for pod in self.pods.values() if pod.body["metadata"]["labels"]["job-name"] == name]
        for pod in own:
            if pod.body["status"]["phase"] == "Failed" and not pod.body["status"].get("counted"):
                pod.body["status"]["counted"] = True
                self._apply_policy(job, pod)
        if _over(job):
            for pod in own:
                self.end(pod, delete=False)
            return
        for index in range(spec["completions"]):
            phases = {pod.body["status"]["phase"] for pod in own if pod in self.of_index(index)}
            if not phases & {"Pending", "Running", "Succeeded"}:
                self._begin_pod(job, index)
        if sum(pod.body["status"]["phase"] == "Succeeded" for pod in own) == spec["completions"]:
            status["conditions"] = [{"type": "Complete", "status": "True"}]

    def _apply_policy(self, job: dict[str, Any], pod: Pod) -> None:
        code, status = pod.body["status"]["code"], job["status"]
        conditions = {each["type"] for each in pod.body["status"].get("conditions", [])}
        for number, rule in enumerate(job["spec"]["podFailurePolicy"]["rules"]):
            by_code = code in rule.get("onExitCodes", {}).get("values", [])
            if by_code or any(each["type"] in conditions for each in rule.get("onPodConditions", [])):
                if rule["action"] == "FailJob":
                    where = f"{pod.body['metadata']['namespace']}/{pod.body['metadata']['name']}"
                    message = f"Container node for pod {where} failed with exit code {code} matching FailJob rule"
                    _fail(status, "PodFailurePolicy", f"{message} at index {number}")
                return
        status["failed"] = status.get("failed", 0) + 1
        if status["failed"] > job["spec"]["backoffLimit"]:
            _fail(status, "BackoffLimitExceeded", "Job has reached the specified backoff limit")

    def _begin_pod(self, job: dict[str, Any], index: int) -> None:
        meta, template = job["metadata"], job["spec"]["template"]
        name = f"{meta['name']}-{index}-{uuid.uuid4().hex[:5]}"
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": meta["namespace"],
                "creationTimestamp": _now(),
                "labels": {**template["metadata"]["labels"], "job-name": meta["name"]},
                "annotations": {_INDEX: str(index)},
                "ownerReferences": [
                    {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
                ],
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        pod = self.pods[name] = Pod(body)
        if self.machine_of is None:
            message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            body["status"]["conditions"] = [waits]
            return
        pod.machine = self.machine_of(index)
        self._start_container(pod, index)

    def _start_container(self, pod: Pod, index: int) -> None:
        [container], meta = pod.body["spec"]["containers"], pod.body["metadata"]
        volumes = {volume["name"]: volume for volume in pod.body["spec"]["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            pod.machine.make(mount["mountPath"])
            if "configMap" in volume:
                data = self._get("ConfigMap", meta["namespace"], volume["configMap"]["name"])["binaryData"]
                for key, content in data.items():
                    pod.machine.write(f"{mount['mountPath']}/{key}", base64.b64decode(content))
        variables = {"JOB_COMPLETION_INDEX": str(index)}
        for variable in container["env"]:
            variables[variable["name"]] = self._value(variable, meta["namespace"], pod.machine)
        pod.log = self.folder / f"{meta['name']}.log"
        pod.process = pod.machine.start(container["command"], container["workingDir"], variables, pod.log)
        pod.body["status"]["phase"] = "Running"
        pod.body["spec"] = {**pod.body["spec"], "nodeName": pod.machine.name}

    def _value(self, variable: dict[str, Any], namespace: str, machine: Machine) -> str:
        if "value" in variable:
            return str(variable["value"]).replace("$$(", "$(")
        source = variable["valueFrom"]
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "status.podIP"
            return machine.address
        reference = source["secretKeyRef"]
        secret = self._get("Secret", namespace, reference["name"])
        return base64.b64decode(secret["data"][reference["key"]]).decode()


def _validate(body: dict[str, Any]) -> None:
    plain = {key: value for key, value in body.items() if key != "status"}
    try:
        kubernetes_validate.validate(plain, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Refusal(422, "Invalid", f"{body.get('kind')} is invalid: {error.message}") from error


def _over(job: dict[str, Any]) -> bool:
    return bool(job["status"].get("conditions"))


def _fail(status: dict[str, Any], reason: str, message: str) -> None:
    status["conditions"] = [{"type": "Failed", "status": "True", "reason": reason, "message": message}]


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class _Desk(BaseHTTPRequestHandler):
    cluster: Cluster

    def log_message(self, *_: Any) -> None:
        pass

    def _do(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        try:
            found = self.cluster.answer(self.command, url.path, query, body)
        except Refusal as refusal:
            said = {"kind": "Status", "status": "Failure", "message": refusal.message, "reason": refusal.reason}
            self._send(refusal.code, json.dumps(said | {"code": refusal.code}).encode())
            return
        if isinstance(found, Pod):
            self._send_log(found, follow=query.get("follow") in ("true", "True"))
        else:
            with self.cluster.lock:
                content = json.dumps(found).encode()
            self._send(200, content)

    do_GET = do_POST = do_PATCH = do_DELETE = _do

    def _send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_log(self, pod: Pod, *, follow: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        with pod.log.open("rb") as log:
            while True:
                over = pod.process.poll() is not None
                self.wfile.write(log.read())
                self.wfile.flush()
                if over or not follow:
                    break
                time.sleep(0.05)


@contextmanager
def cluster(folder: Path, machine_of: Callable[[int], Machine] | None = None) -> Iterator[Cluster]:
    """Serve a cluster on this machine; its kubeconfig is `folder/kubeconfig`. No pod lives on when it ends."""
    made = Cluster(folder, machine_of)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Desk", (_Desk,), {"cluster": made}))
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    (folder / "kubeconfig").write_text(json.dumps(kubeconfig(made.url)))
    done = threading.Event()

    def control() -> None:
        while not done.wait(0.05):
            made.look()

    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)), threading.Thread(target=control)]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        done.set()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()
        for pod in made.pods.values():
            if pod.process is not None and pod.process.poll() is None:
                pod.machine.signal(pod.process, signal.SIGKILL)
                pod.process.wait()


def kubeconfig(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "current-context": "here",
    }
