"""One command starts a script on hosts that only ssh reaches: unchanged, in order, and brought there."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from launching import MANYHOSTS, wait_until
from remote import run, start

from manyhosts.cluster.ports import Range, needed
from manyhosts.lab import Host, Lab

HELLO = """
import os, socket
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
print(socket.gethostname(), *(os.environ[name] for name in names), os.getcwd())
"""


def test_ranks_go_by_the_order_in_which_hosts_were_named(four: Lab, tmp_path: Path) -> None:
    ended = run(four, tmp_path, HELLO, "--hosts", "lab3,lab1", "--workers-per-node", "2")
    assert ended.code == 0, ended.err
    assert sorted(line for line in ended.out.splitlines() if line.startswith("[")) == [
        f"[lab1 2] lab1 2 0 1 4 2 10.77.0.3 eth0 {tmp_path}",
        f"[lab1 3] lab1 3 1 1 4 2 10.77.0.3 eth0 {tmp_path}",
        f"[lab3 0] lab3 0 0 0 4 2 10.77.0.3 eth0 {tmp_path}",
        f"[lab3 1] lab3 1 1 0 4 2 10.77.0.3 eth0 {tmp_path}",
    ]


def test_script_for_torchrun_runs_unchanged_on_four_hosts(four: Lab, tmp_path: Path) -> None:
    source = """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}:", model.module.weight.tolist())
    """
    ended = run(four, tmp_path, source, "--hosts", ",".join(four.names))
    assert ended.code == 0, ended.err
    said = [line.partition("] ")[2].split(":") for line in ended.out.splitlines() if line.startswith("[")]
    assert sorted(rank for rank, _ in said) == [f"rank {rank} of 4" for rank in range(4)]
    assert len({weights for _, weights in said}) == 1, "they trained one model"


def test_hosts_come_from_a_file_with_slots(four: Lab, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two of them\nlab2 slots=1\nlab4 slots=2\n")
    ended = run(four, tmp_path, HELLO, "--hostfile", "hosts")
    assert sorted(line.split()[2:7] for line in ended.out.splitlines() if line.startswith("[")) == [
        ["lab2", "0", "0", "0", "3"],
        ["lab4", "1", "0", "1", "3"],
        ["lab4", "2", "1", "1", "3"],
    ]


SUM = """
    import os, socket, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    each = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]
    print(socket.gethostname(), *each, "of", int(total))
"""


def test_every_host_starts_as_many_workers_as_it_has_gpus_where_nobody_says_how_many(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3)
    for host, gpus in zip(hosts, (1, 3, 0), strict=True):
        lines = "".join(f"echo 'GPU {number}: NVIDIA L4 (UUID: GPU-{number})'\n" for number in range(gpus))
        host.path("/usr/local/bin/nvidia-smi").write_text(f"#!/bin/sh\n[ $1 = -L ] || exit 1\n{lines}")
        host.run(["chmod", "+x", "/usr/local/bin/nvidia-smi"])
    asked = ["--hosts", "lab1,lab2,lab3", "--no-check"]
    ended = run(hosts, tmp_path, SUM, *asked)
    assert ended.code == 0, ended.err
    reported = sorted(line.partition("] ")[2] for line in ended.out.splitlines() if line.startswith("["))
    assert reported == ["lab1 0 1 1 of 5", *(f"lab2 {rank} 3 1 of 5" for rank in range(3)), "lab3 0 1 1 of 5"]
    for said, count in ((["--workers-per-node", "1"], 3), (["--env", "CUDA_VISIBLE_DEVICES=2,0"], 6)):
        ended = run(hosts, tmp_path, HELLO, *asked, *said)
        sizes = [line.split()[6] for line in ended.out.splitlines() if line.startswith("[")]
        assert sizes == [str(count)] * count, "what the user says counts"


def test_what_a_script_needs_is_brought_and_what_it_does_not_stays(four: Lab, tmp_path: Path) -> None:
    for path in ("package/part.py", "data/numbers.txt", ".git/config", "runs/old/run.json", "secret/key"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("VALUE = 1\n")
    (tmp_path / ".manyhostsignore").write_text("# mine alone\nsecret/\n")
    source = """
        import os
        value = open("package/part.py").read().split()[-1]
        found = sorted(os.path.join(place, name) for place, _, names in os.walk(".") for name in names)
        print(value, *(name for name in found if "runs" not in name))
    """
    first = run(four, tmp_path, source, "--hosts", "lab1")
    (tmp_path / "package" / "part.py").write_text("VALUE = 22\n")
    second = run(four, tmp_path, source, "--hosts", "lab1")
    files = "./.manyhostsignore ./data/numbers.txt ./package/part.py ./script.py"
    assert [ended.out.splitlines()[-1] for ended in (first, second)] == [f"1 {files}", f"22 {files}"], first.err


def test_record_and_logs_of_all_hosts_are_brought_back(four: Lab, tmp_path: Path) -> None:
    source = """
        import os
        if os.environ["RANK"] == "0":
            with open(os.path.join(os.environ["MANYHOSTS_RUN_DIR"], "result.txt"), "w") as file:
                file.write("42")
        print("hello from", os.environ["RANK"])
    """
    ended = run(four, tmp_path, source, "--hosts", "lab1,lab2", "--run-dir", "kept")
    assert ended.code == 0, ended.err
    assert (tmp_path / "kept" / "result.txt").read_text() == "42"
    logs = {path.name: path.read_text() for path in (tmp_path / "kept" / "logs").iterdir()}
    assert logs == {"lab1-0.log": "hello from 0\n", "lab2-1.log": "hello from 1\n"}


def test_shell_that_greets_everybody_keeps_no_file_from_its_way(four: Lab, tmp_path: Path) -> None:
    greeting = four[0].path("/root/.bashrc")
    greeting.write_text("echo Welcome to the cluster; echo 'and mind the quota' >&2\n")
    try:
        source = "import os\nopen(os.environ['MANYHOSTS_RUN_DIR'] + '/result.txt', 'w').write('42')\nprint('done')"
        ended = run(four, tmp_path, source, "--hosts", "lab1", "--run-dir", "kept")
    finally:
        greeting.unlink()
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "done"), ended.err
    assert "Welcome" not in ended.out
    assert (tmp_path / "kept" / "result.txt").read_text() == "42"


def test_hosts_are_reached_by_user_and_port_over_ipv6_whatever_tmpdir_is_called(four: Lab, tmp_path: Path) -> None:
    source = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(os.environ["MASTER_ADDR"], int(total), open("part.txt").read())
    """
    (tmp_path / "part.txt").write_text("brought")
    (tmp_path / "my files").mkdir()
    variables = {"TMPDIR": str(tmp_path / "my files")}
    hosts = "[fd77::1]:22,root@[fd77::2]"
    ended = run(four, tmp_path, source, "--hosts", hosts, "--run-dir", "run", variables=variables)
    assert ended.code == 0, ended.err
    lines = sorted(line for line in ended.out.splitlines() if line.startswith("["))
    assert [line.split()[-3:] for line in lines] == [["fd77::1", "2", "brought"]] * 2
    assert "[fd77::1]:22 (fd77::1), root@[fd77::2] (fd77::2) talk over eth0" in ended.err


def test_token_is_in_no_command_line_no_log_and_no_record(four: Lab, tmp_path: Path) -> None:
    source = """
        import os, pathlib
        seen = [str(path.read_bytes()) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
        assert any("manyhosts agent" in words for words in seen)
        assert not any("TOKEN" in name for name in os.environ)
        print("\\n".join(seen))
    """
    ended = run(four, tmp_path, source, "--hosts", "lab1,lab2")
    assert ended.code == 0, ended.err
    assert "token" not in ended.out.lower()
    hexadecimal = [word for word in ended.out.split() if len(word.strip("'b")) == 32]
    assert not hexadecimal


ROWS = {
    r"^manyhosts run ": "the head",
    r"^manyhosts store": "a TCPStore of the workers",
    r"^manyhosts rank ": "Gloo, in each worker",
    r" -c import sys; size": "the program that ssh has started",
}
"""How a process that listens is called → how its row begins in the table of docs/security.md."""


def listening(host: Host) -> list[tuple[str, str, int]]:
    """The command, the address and the port of everything of a run that listens on a host of the lab."""
    places = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{host.process}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            raw = b"".join(bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8))
            if words[3] == "0A":
                places[f"socket:[{words[9]}]"] = (str(ipaddress.ip_address(raw)), int(port, 16))
    found = []
    for process, command in host.processes().items():
        with suppress(OSError):
            links = [os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir()]
            found += [(command, *places[link]) for link in links if link in places and "sshd" not in command]
    return found


def test_every_port_of_a_run_is_in_the_table_and_in_the_range(four: Lab, tmp_path: Path) -> None:
    source = """
        import time, torch.distributed as dist
        dist.init_process_group("gloo")
        print("they have met", flush=True)
        time.sleep(120)
    """
    ports, two = Range(31000, 31000 + needed(workers=2) + 1), [host for host in four if host.name in ("lab1", "lab2")]
    words = ["--hosts", "lab1,lab2", "--workers-per-node", "2", "--ports", str(ports)]
    process = start(four, tmp_path, source, *words, into=tmp_path / "said")
    try:
        wait_until(lambda: (tmp_path / "said").read_text().count("they have met") == 4, "four workers")
        found = {host.name: listening(host) for host in (*two, four.desk)}
    finally:
        four.desk.end(process, signal.SIGINT)
        process.communicate(timeout=120)
    table = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    counts: Counter[tuple[str, str]] = Counter()
    for name, listeners in found.items():
        assert len({address for _, address, _ in listeners}) == 1, listeners
        for command, address, port in listeners:
            assert address.startswith("10.77.0."), (command, address)
            assert ports.first <= port <= ports.last, (command, port)
            row = next((row for called, row in ROWS.items() if re.search(called, command)), None)
            assert row is not None, f"the table does not know {command}"
            assert any(line.startswith(f"| {row}") for line in rows), row
            counts[name, row] += 1
    each = {"Gloo, in each worker": 2, "the program that ssh has started": 1}
    wanted = {(name, row): count for name in ("lab1", "lab2") for row, count in each.items()}
    assert counts == {**wanted, ("lab1", "a TCPStore of the workers"): 1, ("desk", "the head"): 1}


def test_dry_run_touches_no_host(four: Lab, tmp_path: Path) -> None:
    ended = run(four, tmp_path, HELLO, "--dry-run", "--hosts", "nowhere1,nowhere2")
    assert ended.code == 0, ended.err
    assert "node 1: nowhere2" in ended.out
    assert not list(tmp_path.glob("runs"))


def test_port_that_torchrun_would_take_may_be_taken(four: Lab, tmp_path: Path) -> None:
    waiting = "import socket, time; s = socket.create_server(('', 29500)); print('up', flush=True); time.sleep(60)"
    others = [host.start(["python3", "-c", waiting], stdout=subprocess.PIPE) for host in four]
    assert [other.stdout.readline() for other in others] == ["up\n"] * 4
    source = "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint('met', dist.get_world_size())"
    ended = run(four, tmp_path, source, "--hosts", "lab1,lab2")
    for host, other in zip(four, others, strict=True):
        host.end(other)
        other.communicate()
    assert (ended.code, ended.out.count("met 2")) == (0, 2), ended.err


def test_detached_run_over_ssh_is_followed_and_cancelled_by_its_handle(four: Lab, tmp_path: Path) -> None:
    source = "import os, socket, time\nprint('begins on', socket.gethostname(), flush=True)\ntime.sleep(600)"
    ended = run(four, tmp_path, source, "--detach", "--hosts", "lab1,lab2", "--run-dir", "run")
    handle = ended.out.strip()
    assert handle == f"ssh://{tmp_path}/run", ended.err
    log = tmp_path / "run" / "logs" / "detached.log"
    wait_until(lambda: log.read_text().count("begins on") == 2, "both workers run")
    assert four.desk.run([*MANYHOSTS, "status", handle]).stdout.startswith("running · process ")
    four.desk.run([*MANYHOSTS, "cancel", handle], timeout_s=120)
    assert four.desk.run([*MANYHOSTS, "status", handle]).stdout.startswith("cancelled · lab1,lab2 · ")
    reported = four.desk.run([*MANYHOSTS, "logs", handle]).stdout
    assert sorted(line.split()[-1] for line in reported.splitlines() if "begins on" in line) == ["lab1", "lab2"]
