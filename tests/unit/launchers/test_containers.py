"""Agents in containers: which runtime is taken, and what it is told, by runtimes that check their words and obey."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from container_runtimes import image, install

from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.hosts import containers, version_check
from manyhosts.hosts.connection import trouble
from manyhosts.lab.lab import why_not
from manyhosts.launchers import container_options
from manyhosts.launchers.mpi import Mpi
from manyhosts.launchers.slurm.slurm import Slurm
from manyhosts.launchers.ssh.ssh import Ssh

ALL = (*container_options.PULLED, *container_options.OF_FILES)
TOOLS = ("sh", "mkdir", "env", "sed", "id", "hostname", "uname", "tail", "head", "wc", "tr", "cut", "sha256sum")
NAME = "my.org/image:1"
may_mount = pytest.mark.skipif(why_not() is not None, reason="needs root and mounts of its own")


class Host:
    """A PATH with the tools of a host, and the runtimes that it has."""

    def __init__(self, folder: Path, shell: str = "sh") -> None:
        self.folder, self._bin = folder, folder / "bin"
        self._bin.mkdir()
        for tool in TOOLS:
            (self._bin / tool).symlink_to(str(shutil.which(shell if tool == "sh" else tool)))

    def have(self, *runtimes: str, **more: Any) -> Host:
        """Give it these runtimes, with one image."""
        for runtime in runtimes:
            reported = str(self.folder / "reported")
            install(runtime, self._bin, **{"images": {NAME: image()}, "reported": reported, "hidden": (), **more})
        return self

    def run(self, job: Job, *words: str, looks: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
        container = container_options.of(job, ALL)
        assert container is not None
        return subprocess.run(
            container.command(container.looked_after(words) if looks else words),
            env={"PATH": str(self._bin), **variables},
            input="the input\n",
            capture_output=True,
            text=True,
            timeout=120,
        )

    @property
    def reported(self) -> dict[str, Any]:
        """What the last container was started with."""
        found: dict[str, Any] = json.loads((self.folder / "reported").read_text().splitlines()[-1])
        return found


def job(folder: Path, **options: str) -> Job:
    given = {name.replace("_", "-"): value for name, value in options.items()}
    place = folder / "p q"
    return Job(program="t.py", folder=place, run_dir=place / "runs", hosts=("a",), nodes=1, options=given)


SEEN = "import json, os, sys; print(json.dumps([os.getcwd(), os.listdir(), sys.stdin.readline(), dict(os.environ)]))"


@may_mount
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_docker_and_podman_get_folders_user_network_and_memory_of_the_host_and_variables_by_name(
    tmp_path: Path, shell: str
) -> None:
    host, asked = Host(tmp_path, shell).have("docker", hidden=[str(tmp_path)]), job(tmp_path, container=NAME)
    asked.folder.mkdir()
    (asked.folder / "t.py").write_text("")
    done = host.run(asked, "python3", "-c", SEEN, NCCL_DEBUG="a b s3cret", OTHER="x")
    assert done.returncode == 0, done.stderr
    place, files, said, variables = json.loads(done.stdout)
    assert (place, sorted(files), said) == (str(asked.folder), ["runs", "t.py"], "the input\n")
    assert variables["NCCL_DEBUG"] == "a b s3cret"
    assert "OTHER" not in variables
    assert containers.known_as({"image": variables[containers.VARIABLE]}) == {"sha256:" + "11" * 32}
    assert "s3cret" not in json.dumps(host.reported)
    options = {tuple(option) for option in host.reported["options"]}
    assert options >= {("--network", "host"), ("--ipc", "host"), ("--pid", "host"), ("--rm", ""), ("--interactive", "")}
    assert options >= {("--user", f"{os.getuid()}:{os.getgid()}"), ("--env", "NCCL_DEBUG")}


def options_of(host: Host, asked: Job) -> list[list[str]]:
    (host.folder / "reported").unlink(missing_ok=True)
    done = host.run(asked, "true")
    assert (host.folder / "reported").exists(), done.stderr
    options: list[list[str]] = host.reported["options"]
    return options


def test_user_is_the_one_of_the_host_whoever_the_daemon_runs_as(tmp_path: Path) -> None:
    asked = job(tmp_path, container=NAME)
    me = f"{os.getuid()}:{os.getgid()}"
    host = Host(tmp_path)
    assert ["--user", me] in options_of(host.have("docker"), asked)
    assert ["--user", "0:0"] in options_of(host.have("docker", security=["name=seccomp", "name=rootless"]), asked)
    assert ["--userns", "host"] in options_of(host.have("docker", security=["name=userns"]), asked)
    shown = options_of(host.have("docker", says_podman=True), asked)
    assert ["--user", me] in shown
    assert not any(name == "--group-add" for name, _ in shown), "the docker of the package podman-docker"


@may_mount
def test_apptainer_sees_the_image_file_and_no_python_packages_of_the_home(tmp_path: Path) -> None:
    (tmp_path / "p q").mkdir()
    (tmp_path / "p q" / "i.sif").write_bytes(b"SIF" * 20000)
    (tmp_path / "data").mkdir()
    host = Host(tmp_path).have("apptainer", "docker", images={"*": image()}, hidden=[str(tmp_path)])
    mounts = f"{tmp_path}/data:/mnt:ro"
    asked = job(tmp_path, container="i.sif", container_mounts=mounts)
    done = host.run(asked, "python3", "-c", SEEN, PYTHONPATH="/of/the/host", OTHER="x")
    assert done.returncode == 0, done.stderr
    variables = json.loads(done.stdout)[3]
    assert "PYTHONPATH" not in variables
    assert (variables["PYTHONNOUSERSITE"], variables["OTHER"]) == ("1", "x")
    [known] = containers.known_as({"image": variables[containers.VARIABLE]})
    assert known.startswith("sif:60000:")
    folder = asked.folder
    bound = f"{folder}:{folder},{folder}/runs:{folder}/runs,{mounts}"
    assert host.reported["options"] == [["--bind", bound], ["--pwd", str(folder)]]


def test_runtime_that_has_the_image_is_taken_and_can_be_named(tmp_path: Path) -> None:
    host = Host(tmp_path).have("docker", images={}).have("podman")
    options_of(host, job(tmp_path, container=NAME))
    assert host.reported["runtime"] == "podman"
    host.have("docker")
    options_of(host, job(tmp_path, container=NAME))
    assert host.reported["runtime"] == "docker"
    options_of(host, job(tmp_path, container=NAME, container_runtime="podman"))
    assert host.reported["runtime"] == "podman"


DENIED = "permission denied while trying to connect to the Docker daemon socket"


@pytest.mark.parametrize(
    ("runtimes", "more", "options", "what", "fix"),
    [
        ((), {}, {}, "has no container runtime for the image my.org/image:1: docker or podman is not there", "install"),
        (("docker",), {}, {"container_runtime": "podman"}, ": podman is not there", "install"),
        (("docker",), {}, {"container": "/x.sif"}, ": apptainer or singularity is not there", "install it there"),
        (("apptainer",), {}, {"container": "/x.sif"}, "has no image /x.sif", "copy it there"),
        (
            ("docker", "podman"),
            {"images": {}},
            {},
            "has no image my.org/image:1 (docker: Error: No such",
            "docker pull",
        ),
        (("docker",), {"refuses": DENIED}, {}, f"does not answer (docker: {DENIED})", "docker ps"),
        (
            ("docker",),
            {"images": {NAME: image(architecture="s390x")}},
            {},
            "of the kind s390x, and the host",
            "--platform",
        ),
        (("docker",), {}, {"container_mounts": "/not/there"}, "has no /not/there, which the container", "mounts="),
        (("docker",), {"images": {NAME: image(python="")}}, {}, "has no Python: python3 does not find", "use an image"),
        (("docker",), {"images": {NAME: image(python="exit 1")}}, {}, "has no manyhosts for Python", "use an image"),
    ],
)
def test_host_that_cannot_start_the_container_says_why_in_a_sentence(
    tmp_path: Path, runtimes: tuple[str, ...], more: dict[str, Any], options: dict[str, str], what: str, fix: str
) -> None:
    if "python" in str(more) and why_not() is not None:
        pytest.skip("needs root and mounts of its own")
    host, asked = Host(tmp_path).have(*runtimes, **more), job(tmp_path, **{"container": NAME, **options})
    done = host.run(asked, "python3", "-P", "-c", "print('hello')", looks=True)
    assert (done.returncode, done.stdout) == (containers.NO_RUNTIME, ""), done.stderr
    container = container_options.of(asked, ALL)
    error = trouble("lab1", done.returncode, done.stderr, container_options.PYTHONS, container)
    assert what in error.what
    assert fix in error.fix
    assert error.where.startswith("host ")


@pytest.mark.parametrize(
    ("code", "said", "what"),
    [
        (127, 'exec: "sh": executable file not found in $PATH', "there is no Python in the image i:1 on host h"),
        (1, "exec /usr/bin/sh: exec format error", "is built for processors of another kind than host h has"),
        (255, "FATAL: the image's architecture (arm64) could not run on the host's (amd64)", "exit|ssh to host h"),
        (125, 'could not select device driver "" with capabilities: [[gpu]]', "on host h cannot have its GPUs"),
        (126, "Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all", "cannot have its GPUs"),
        (125, "no space left on device", "no container of the image i:1 starts on host h: no space left on device"),
        (255, "ssh: connect to host h port 22: Connection refused", "no server listens on its port 22"),
    ],
)
def test_what_runtimes_say_becomes_a_sentence_and_what_ssh_says_stays_one(
    tmp_path: Path, code: int, said: str, what: str
) -> None:
    container = container_options.of(job(tmp_path, container="i:1"), ALL)
    error = trouble("h", code, said, ["python3", "python"], container)
    assert any(words in error.what for words in what.split("|"))
    assert error.fix


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"container_runtime": "docker"}, "no image is named"),
        ({"container_mounts": "/data"}, "no image is named"),
        ({"container": "i", "container_runtime": "lxc"}, "no container runtime that can be used here"),
        ({"container": "--privileged"}, "is no name of an image"),
        ({"container": "a b"}, "is no name of an image"),
        ({"container": "i:1", "container_runtime": "apptainer"}, "Apptainer does not know an image 'i:1'"),
        ({"container": "i.sif", "container_runtime": "docker"}, "docker does not run image files"),
        ({"container": "docker://i", "container_runtime": "docker"}, "does not know images by docker://"),
        ({"container": "i.sif", "container_mounts": "data"}, "cannot read the mount 'data'"),
        ({"container": "i.sif", "container_mounts": "/a:b"}, "cannot read the mount '/a:b'"),
        ({"container": "i.sif", "container_gpus": "2"}, "container-gpus is '2'"),
    ],
)
@pytest.mark.parametrize("launcher", [Ssh, Mpi, Slurm])
def test_what_makes_no_sense_is_refused(tmp_path: Path, launcher: Any, options: dict[str, str], words: str) -> None:
    if launcher is Slurm and options.get("container_runtime") == "docker" and "container" in options:
        words = "no container runtime that can be used here"
    asked = job(tmp_path, **options)
    with pytest.raises(ConfigError, match=words):
        launcher().plan(asked if launcher is not Slurm else _without_hosts(asked))


def _without_hosts(asked: Job) -> Job:
    return Job(program="t.py", folder=asked.folder, run_dir=asked.run_dir, options=asked.options)


def test_folder_that_no_runtime_can_mount_is_refused(tmp_path: Path) -> None:
    asked = Job(program="t.py", folder=tmp_path / "a:b", run_dir=tmp_path, hosts=("a",), options={"container": "i"})
    with pytest.raises(ConfigError, match="a colon or a comma cannot be mounted"):
        Ssh().plan(asked)


@pytest.mark.parametrize("launcher", [Ssh, Mpi])
def test_plan_shows_the_image_the_script_once_and_its_words(tmp_path: Path, launcher: Any) -> None:
    plan = str(launcher().plan(job(tmp_path, container=NAME)))
    assert plan.count("--pull never") == 1
    assert f"sh -c {containers.SCRIPT} manyhosts-container any {NAME} make" in plan
    assert "python3 -P -m manyhosts.control.agent" in plan


def test_script_is_one_line_without_what_a_csh_reads_otherwise() -> None:
    assert "\n" not in containers.script()
    assert "!" not in containers.script()


INSIDE = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_srun_starts_apptainer_and_pyxis_and_the_head_stays_outside(tmp_path: Path) -> None:
    asked = _without_hosts(job(tmp_path, container="i.sif", python="/opt/python"))
    outside = Slurm({}).plan(asked).files[str(asked.run_dir / "job.sbatch")]
    assert f"exec {shlex.quote(sys.executable)} -P -m" in outside
    command = Slurm(INSIDE).plan(asked).command
    folder = asked.folder
    at = command.index(containers.SCRIPT)
    assert list(command[at + 2 : at + 5]) == ["any", f"{folder}/i.sif", "make"]
    assert "/opt/python" in command
    options = {"container": "nvcr.io#nvidia/pytorch:25.01", "container_runtime": "pyxis", "container_mounts": "/data"}
    asked = _without_hosts(job(tmp_path, **options))
    command = Slurm(INSIDE).plan(asked).command
    assert "--container-image=nvcr.io#nvidia/pytorch:25.01" in command
    assert f"--container-mounts={folder}:{folder},{folder}/runs:{folder}/runs,/data:/data" in command
    assert command.index(f"--container-workdir={folder}") < command.index("python3")


def test_slurm_without_pyxis_is_named_before_anything_is_queued(tmp_path: Path) -> None:
    asked = _without_hosts(job(tmp_path, container="i", container_runtime="pyxis"))
    slurm = Slurm({}, lambda command: "  --container-name=x" if command == ["srun", "--help"] else "4711")
    with pytest.raises(Exception, match="this Slurm starts no containers") as caught:
        slurm.send(slurm.plan(asked))
    assert caught.value.exit_code == 3
    assert not asked.run_dir.exists()


def reported(*words: str) -> dict[str, str]:
    return {"image": " ".join(["docker", *words])}


def test_images_are_the_same_where_hosts_know_them_by_one_word_and_others_are_named() -> None:
    same = {"a": reported("sha256:1", "sha256:9"), "b": reported("sha256:2", "sha256:9"), "c": reported("sha256:1")}
    assert version_check.different_images({**same, "d": {"image": "docker "}, "e": {}}) == []
    assert version_check.different_images({"x": reported("sha256:7"), **same}) == [("a", "x")]
