"""What Kubernetes is sent, held to the schema of its API, and what is made of its answers."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubernetes_cluster import VERSION, Cluster, cluster, kubeconfig
from launching import wait_until
from plans import assert_sent, files_in
from pod_security import refused

from manyhosts.cli.main import main
from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.launchers.kubernetes import manifest as kubernetes_manifest
from manyhosts.launchers.kubernetes.kubernetes import Kubernetes
from manyhosts.launchers.kubernetes.manifest import ARCHIVE_HERE, ENVIRONMENT_HERE, OWNER_HERE, TOKEN_HERE

EVERYTHING = {
    "image": "me/train:1",
    "namespace": "team",
    "context": "here",
    "folder": "/data/project",
    "volumes": "disk:/data,more:/more",
    "gpus": "4",
    "cpu": "8",
    "memory": "64Gi",
    "shm": "8Gi",
    "node-selector": "pool=big,zone=a",
    "tolerations": "gpu-only,spot",
    "service-account": "trainer",
    "user": "1000",
    "env-from": "wandb,hub",
    "network-policy": "yes",
    "queue": "team-queue",
    "pull-secret": "registry",
    "priority-class": "low",
    "time": "8h",
    "wait": "10 min",
    "python": "/opt/python",
}


def job(folder: Path = Path("/work"), **more: Any) -> Job:
    options = {"image": "me/train:1", **more.pop("options", {})}
    words = {"nodes": 2, "run_dir": folder / "runs" / "first", **more}
    return Job(program="train.py", folder=folder, options=options, **words)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose pods wait for ever, and a folder with a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    (tmp_path / "train.py").write_text("print('trained')\n")
    with cluster(tmp_path) as made:
        yield made


def send(*words: str) -> int:
    return main(["run", "--on", "kubernetes", "--nodes", "2", "-o", "image=x", *words, "train.py"])


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["least", "everything"])
def test_everything_that_is_sent_fits_the_schema_of_the_api(options: dict[str, str]) -> None:
    wished = job(options=options, workers_per_node=4, environment={"A": "$(B)"})
    Kubernetes().check(wished)
    made = kubernetes_manifest.manifests(wished)
    assert list(made) == ["Job", "Service", "Secret", *(["NetworkPolicy"] if options else ["ConfigMap"])]
    for manifest in made.values():
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_schema_would_notice_a_slip(here: Cluster) -> None:
    manifest = kubernetes_manifest.manifests(job())["Job"]
    manifest["spec"]["backoffLimits"] = manifest["spec"].pop("backoffLimit")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_every_option_reaches_the_manifest() -> None:
    text = json.dumps(kubernetes_manifest.manifests(job(options=EVERYTHING, workers_per_node=4)))
    assert EVERYTHING.keys() == kubernetes_manifest.OPTIONS.keys()
    words = ["me/train:1", '"namespace": "team"', "/data/project", '"disk"', '"/more"', '"nvidia.com/gpu": "4"']
    words += ['"cpu": "8"', '"memory": "64Gi"', '"sizeLimit": "8Gi"', '"pool": "big"', '"key": "spot"', '"trainer"']
    words += ['"secretRef": {"name": "hub"}', '"runAsUser": 1000', '"kueue.x-k8s.io/queue-name": "team-queue"']
    words += ['"name": "registry"', '"low"', '"activeDeadlineSeconds": 28800', "/opt/python", "10 min"]
    assert [word for word in words if word not in text] == []


def test_dry_run_prints_what_is_sent_and_asks_nobody(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--run-dir", "runs/first", "--env", "KEY=s3cret", "-o", "network-policy=yes")
    assert send("--dry-run", *more) == 0
    shown = files_in(capsys.readouterr().out.replace("--dry-run", "--detach"))  # which is what the two differ in
    begin = shown.pop("then, of the Job")
    documents = {name.removesuffix(".json"): json.loads(text) for name, text in shown.items()}
    for document in documents.values():
        kubernetes_validate.validate(document, VERSION, strict=True)
    assert (list(documents), here.asked) == (["Job", "Service", "Secret", "NetworkPolicy", "ConfigMap"], [])
    assert send("--detach", *more) == 0
    later = [str(each) for each in (TOKEN_HERE, ENVIRONMENT_HERE, ARCHIVE_HERE, OWNER_HERE)]
    for kind, document in documents.items():
        assert_sent(document, here.bodies[kind], later)
    assert json.loads(begin) == here.bodies["patch"]


def test_values_of_env_are_in_the_secret_alone_and_pods_may_do_nothing_else() -> None:
    """What the Pod Security Standard `restricted` asks for, for a user that is named; and no token for the cluster."""
    words = ("run", "--env", "KEY=s3cret", "--env=KEY=s3cret", "train.py")
    wished = job(environment={"KEY": "s3cret", "LR": "1"}, hidden=("KEY",), words=words, options={"user": "7"})
    made = kubernetes_manifest.manifests(wished)
    assert "s3cret" not in json.dumps(made), "it is filled in when it is sent"
    assert "s3cret" not in str(Kubernetes().plan(wished))
    pod = made["Job"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert refused(pod) == []
    assert container["resources"]["requests"] == {"cpu": "1", "memory": "2Gi"}
    policy = kubernetes_manifest.manifests(job(options={"network-policy": "yes"}))["NetworkPolicy"]["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]


@pytest.mark.parametrize(
    "options",
    [{}, {"folder": "/work", "volumes": "claim:/work"}, {"gpus": "2", "pull-secret": "p", "service-account": "s"}],
)
def test_pods_are_let_into_restricted_namespaces_once_their_user_is_named(options: dict[str, str]) -> None:
    def pod(**more: str) -> dict[str, Any]:
        made = kubernetes_manifest.manifests(job(options={**options, **more}, workers_per_node=2))
        return made["Job"]["spec"]["template"]["spec"]

    assert refused(pod(user="1000")) == []
    assert refused(pod()) == ["running as non-root"], "the image says who"


def test_rules_of_restricted_namespaces_notice_each_thing_that_they_are_about() -> None:
    pod = kubernetes_manifest.manifests(job(options={"user": "7"}))["Job"]["spec"]["template"]["spec"]

    def context(**more: Any) -> dict[str, Any]:
        [container] = pod["containers"]
        return {**pod, "containers": [{**container, "securityContext": {**container["securityContext"], **more}}]}

    assert refused({**pod, "hostNetwork": True}) == ["host namespaces: hostNetwork"]
    assert refused({**pod, "volumes": [{"name": "x", "hostPath": {"path": "/"}}]}) == ["volume types: hostPath"]
    assert refused(context(privileged=True)) == ["privileged containers"]
    assert refused(context(allowPrivilegeEscalation=True)) == ["privilege escalation"]
    assert refused(context(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]})) == ["capabilities: SYS_ADMIN"]
    assert refused(context(runAsUser=0)) == ["running as non-root user"]
    assert refused(context(seccompProfile={"type": "Unconfined"})) == ["seccomp", "seccomp"]


def test_network_policy_is_made_and_goes_with_the_job_and_kueue_says_when_it_begins(here: Cluster) -> None:
    more = ["-o", "network-policy=yes", "-o", "queue=team-queue"]
    assert send("--detach", "--run-dir", "runs/first", *more) == 0
    assert {kind for kind, _, _ in here.objects} == {"Job", "Service", "Secret", "ConfigMap", "NetworkPolicy"}
    assert here.objects["Job", "default", "first"]["spec"]["suspend"] is True
    assert main(["cancel", "kubernetes://default/first"]) == 0
    assert here.objects == {}


def test_pods_find_each_other_by_the_service_and_know_the_token_by_the_secret() -> None:
    made = kubernetes_manifest.manifests(job())
    pod = made["Job"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    variables = {each["name"]: each for each in container["env"]}
    assert variables[kubernetes_manifest.HEAD]["value"] == "first-0.first:29400"
    assert pod["spec"]["subdomain"] == made["Service"]["metadata"]["name"] == "first"
    assert made["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert made["Service"]["spec"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize(
    ("run_dir", "volumes", "there", "kept"),
    [
        ("/work/runs/first", "", "/manyhosts/folder/runs/first", False),
        ("/data/runs/first", "disk:/data", "/data/runs/first", True),
        ("/data/runs/first", "disk:/database", "/data/runs/first", False),
    ],
)
def test_run_directory_that_no_volume_keeps_is_told(run_dir: str, volumes: str, there: str, kept: bool) -> None:
    wished = job(run_dir=Path(run_dir), options={"volumes": volumes} if volumes else {})
    assert str(kubernetes_manifest.job_there(wished).run_dir) == there
    notes = Kubernetes().plan(wished).notes
    assert bool(notes) is not kept
    assert kept or f"{there}, is on no volume" in notes[0]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"options": {"gpus": "two"}}, "gpus is 'two'"),
        ({"options": {"gpus": "4"}}, "4 GPUs, and one worker"),
        ({"options": {"memory": "64 GB"}}, "memory is '64 GB'"),
        ({"options": {"cpu": "many"}}, "cpu is 'many'"),
        ({"options": {"namespace": "My Team"}}, "namespace is 'My Team'"),
        ({"options": {"volumes": "disk"}}, "cannot read 'disk'"),
        ({"options": {"volumes": "disk:data"}}, "'data' is no absolute path"),
        ({"options": {"node-selector": "big"}}, "cannot read 'big'"),
        ({"options": {"time": "5 epochs"}}, "time is '5 epochs'"),
        ({"options": {"folder": "app"}}, "folder is 'app'"),
        ({"sync": False}, "nothing brings the script"),
    ],
)
def test_request_that_makes_no_sense_is_refused_before_it_is_sent(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Kubernetes().plan(job(**more))


def test_script_that_is_not_in_what_is_sent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inside the working directory"):
        Kubernetes().plan(Job(program="../train.py", folder=tmp_path, run_dir=tmp_path / "r", options={"image": "x"}))


def test_missing_image_is_a_sentence(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--on", "kubernetes", "train.py"]) == 2
    assert "no image is named" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["2026-run", "UPPER_case", "-", "x" * 90, "train-20260101-120000", "é"])
def test_run_of_any_name_becomes_a_name_that_kubernetes_takes(name: str) -> None:
    made = kubernetes_manifest.manifests(job(run_dir=Path("/work/runs") / name))
    found = made["Job"]["metadata"]["name"]
    assert found[0].isalpha()
    assert len(found) <= 54
    kubernetes_validate.validate(made["Service"], VERSION, strict=True)
    assert set(found) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_sending_makes_a_job_with_all_that_goes_when_it_goes(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert send("--detach", "--run-dir", "runs/first") == 0
    handle = capsys.readouterr().out.strip()
    assert handle == "kubernetes://default/first"
    assert {kind for kind, _, _ in here.objects} == {"Job", "Service", "Secret", "ConfigMap"}
    assert here.objects["Job", "default", "first"]["spec"]["suspend"] is False
    packed = base64.b64decode(here.objects["ConfigMap", "default", "first"]["binaryData"]["folder.tar.gz"])
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert "train.py" in archive.getnames()
    token = base64.b64decode(here.objects["Secret", "default", "first"]["data"]["token"]).decode()
    assert len(bytes.fromhex(token)) == 16
    for _ in range(2):
        assert main(["cancel", handle]) == 0
    assert here.objects == {}
    assert main(["status", handle]) == 0
    assert capsys.readouterr().out.startswith("unknown · Kubernetes has no such job")


def test_job_of_the_same_name_is_left_alone(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert send("--detach", "--run-dir", "runs/first") == 0
    before = here.objects.copy()
    assert send("--detach", "--run-dir", "runs/first") == 3
    assert 'Kubernetes refused: jobs "first" already exists' in capsys.readouterr().err
    assert here.objects == before


def test_job_is_taken_back_when_what_it_needs_is_refused(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.objects["Secret", "default", "first"] = {"metadata": {"name": "first", "uid": "another"}}
    assert send("--detach", "--run-dir", "runs/first") == 3
    assert 'secrets "first" already exists' in capsys.readouterr().err
    assert list(here.objects) == [("Secret", "default", "first")], "somebody else's Secret is all that is left"


def test_status_says_what_the_pods_wait_for(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    send("--detach", "--run-dir", "runs/first")
    wait_until(lambda: len(here.pods) == 2, "there are pods")
    capsys.readouterr()
    assert main(["status", "--json", "kubernetes://default/first"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "waiting"
    assert found["reason"].startswith("0 of 2 pods run; Unschedulable: 0/3 nodes are available")
    assert main(["logs", "kubernetes://default/first"]) == 3
    assert "the first node has printed nothing: 0 of 2 pods run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "what"),
    [
        (["-o", "namespace=nowhere"], 3, 'Kubernetes refused: namespaces "nowhere" not found'),
        (["-o", "namespace=secret-place"], 3, "is forbidden: User"),
        (["-o", "context=elsewhere"], 3, "no Kubernetes cluster is configured"),
    ],
)
def test_refusals_are_sentences(
    options: list[str], code: int, what: str, here: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert send(*options) == code
    assert what in capsys.readouterr().err


def test_cluster_that_does_not_answer_is_a_sentence(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    Path("kubeconfig").write_text(json.dumps(kubeconfig("http://127.0.0.1:9")))
    assert send() == 3
    assert "the Kubernetes cluster was not reached" in capsys.readouterr().err


def test_folder_that_is_too_large_to_be_sent_is_a_sentence(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    Path("data.bin").write_bytes(os.urandom(1_100_000))
    assert send() == 2
    assert "the working directory is 1.1 MB when packed, and Kubernetes takes 1 MB" in capsys.readouterr().err
    assert here.asked == []
    Path(".manyhostsignore").write_text("*.bin\n")
    assert send("--detach") == 0


def test_handle_remembers_the_context(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    send("--detach", "-o", "context=here", "--run-dir", "runs/first")
    assert capsys.readouterr().out == "kubernetes://here/default/first\n"
    assert main(["status", "kubernetes://here/default/first"]) == 0
    assert main(["status", "kubernetes://there/default/first"]) == 3
