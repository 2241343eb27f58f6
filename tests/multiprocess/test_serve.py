"""A served model: right answers, refusals in words, and never a wrong answer when something dies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load, save
from served import Serving, serving
from small_run import make_run
from wrong_requests import assert_wrong_requests_harm_nothing

from manyhosts.records.chosen_run import run_directory, snapshot_of
from manyhosts.training.trained_script import open_run

INPUTS = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def served(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    kept = tmp_path_factory.mktemp("kept")
    with serving(run_dir, "--body-timeout", "1", "--keep", str(kept), "--keep-share", "1") as found:
        yield found
    assert found.process.returncode == 0
    assert not found.children_left()
    assert list(kept.glob("served-*.safetensors"))


def answers(run_dir: Path, snapshot: str = "best") -> torch.Tensor:
    with open_run(run_dir, snapshot=snapshot) as run, torch.no_grad():
        return run.model(INPUTS)


def close(found: Any, wanted: torch.Tensor) -> bool:
    return bool(torch.allclose(torch.as_tensor(found), wanted, atol=1e-5))


def test_answers_are_those_of_the_model_alone_and_together_in_json_and_binary(run_dir: Path, served: Serving) -> None:
    wanted = answers(run_dir)
    assert close(served.predict(INPUTS.tolist()), wanted)
    wrong: list[int] = []

    def ask(number: int) -> None:
        begin, end = number, number + 1 + number % 3
        if not close(served.predict(INPUTS[begin:end].tolist()), wanted[begin:end]):
            wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    headers = {"Content-Type": "application/vnd.safetensors"}
    status, content = served.ask("/predict", save({"inputs": INPUTS.numpy()}), headers=headers)
    assert status == 200
    assert close(load(content)["output"], wanted)
    metrics = served.ask("/metrics")[1].decode()
    assert 'manyhosts_drift{kind="inputs",tensor="inputs"}' in metrics
    assert served.ask("/readyz")[1]["status"] == "ready"
    assert b"POST /predict" in served.ask("/docs")[1]


REFUSED: list[tuple[Any, int, str]] = [
    (b"{", 400, "not JSON"),
    (b"", 400, "the body is empty"),
    (b"[" * 100_000, 400, "not JSON"),
    (b'{"inputs": [NaN]}', 400, "NaN is not a number"),
    ({"inputs": []}, 422, "empty"),
    ({"input": [1]}, 422, "the body must be"),
    ({"inputs": [[1, 2]]}, 422, "each sample must be [1, 8, 8], and [2] was sent"),
    ({"inputs": [[[1], [1, 2]]]}, 422, "differ in shape"),
    ({"inputs": [[[[10**400] * 8] * 8]]}, 422, "does not fit into float32"),
    ({"inputs": ["word"]}, 422, "words were sent, and the model takes float32"),
    ({"inputs": [True]}, 422, "booleans"),
    ({"inputs": [None]}, 422, "mixed"),
    ({"inputs": [[[[1e39] * 8] * 8]]}, 422, "does not fit into float32"),
    ({"inputs": [0] * 257}, 413, "257 samples"),
    (b" " * 9_000_000, 413, "more than 8000000 bytes"),
]


def test_what_the_model_does_not_take_is_refused_in_a_sentence_and_harms_nobody(served: Serving) -> None:
    before = served.children()
    for body, status, said in REFUSED:
        found, content = served.ask("/predict", body)
        assert (found, said in content["error"]) == (status, True), (body if len(str(body)) < 200 else status, content)
    assert served.ask("/predict", b"{}", headers={"Content-Type": "text/plain"})[0] == 415
    assert served.ask("/predict", b"no", headers={"Content-Type": "application/vnd.safetensors"})[0] == 400
    for path, wanted in (("/predict", 405), ("/prdeict", 404)):
        found, content = served.ask(path)
        assert (found, f"GET {path} is not answered here" in content["error"]) == (wanted, True)
    assert served.predict([[[[10**20] * 8] * 8]]) == served.predict([[[[1e20] * 8] * 8]])
    assert served.ask("/healthz", headers={"Host": "elsewhere.example"})[0] == 400
    port = int(served.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in slow.recv(4096)
    assert served.children() == before
    assert len(served.predict(INPUTS[:2].tolist())) == 2


def test_hundreds_of_malformed_requests_give_4xx_and_neither_a_crash_nor_growth(served: Serving) -> None:
    assert_wrong_requests_harm_nothing(served, 150, 450)


def under_load(served: Serving, act: Callable[[], None], *, until: Callable[[], bool]) -> list[tuple[int, int, Any]]:
    """What some clients, who ask without a break, are answered: (which input, status, content)."""
    found: list[tuple[int, int, Any]] = []
    over = threading.Event()

    def ask(first: int) -> None:
        number = first
        while not over.is_set():
            number = (number + 5) % len(INPUTS)
            status, content = served.ask("/predict", {"inputs": INPUTS[number : number + 1].tolist()})
            found.append((number, status, content))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        act()
        end = time.monotonic() + 120
        while not until() and time.monotonic() < end:
            time.sleep(0.02)
        assert until()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return found


def test_process_that_is_killed_under_load_gives_503_or_right_answers_and_comes_back(run_dir: Path) -> None:
    wanted = answers(run_dir)
    with serving(run_dir) as served:
        [before] = served.children()

        def is_back() -> bool:
            return served.children() != [before] and served.ask("/readyz")[0] == 200

        found = under_load(served, lambda: os.kill(before, signal.SIGKILL), until=is_back)
        assert {status for _, status, _ in found} == {200, 503}
        assert all(close(each["outputs"], wanted[n : n + 1]) for n, status, each in found if status == 200)
        assert len(served.predict(INPUTS.tolist())) == len(INPUTS)
        assert b"manyhosts_model_restarts_total 1.0" in served.ask("/metrics")[1]


def test_new_snapshot_is_taken_over_under_load_without_a_lost_request(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("best"))
    run = run_directory(copy)
    newest = snapshot_of(run, "last")
    aside = tmp_path / newest.name
    newest.rename(aside)
    old, new = answers(copy, "last"), answers(run_dir, "last")
    assert snapshot_of(run, "last") != newest
    with serving(copy, "--follow", "--snapshot", "last") as served:
        assert close(served.predict(INPUTS.tolist()), old)
        step = int(newest.name.rpartition("-")[2])
        found = under_load(
            served, lambda: aside.rename(newest), until=lambda: served.ask("/readyz")[1].get("step") == step
        )
        assert close(served.predict(INPUTS.tolist()), new)
        damaged = copy / "snapshots" / f"step-{step + 1:08d}"
        shutil.copytree(newest, damaged)
        (damaged / "state.json").write_text("{}")
        served.predict(INPUTS[:1].tolist())
    assert {status for _, status, _ in found} == {200}
    rows = [(torch.tensor(each["outputs"]), n) for n, _, each in found]
    assert all(close(row, old[n : n + 1]) or close(row, new[n : n + 1]) for row, n in rows)


@pytest.mark.slow  # the same path with one process is in `make test`
def test_model_cut_over_two_workers_answers_as_one_process_and_survives_the_loss_of_one(run_dir: Path) -> None:
    wanted = answers(run_dir)
    with serving(run_dir, "--workers", "2") as served:
        assert close(served.predict(INPUTS.tolist()), wanted)
        before = served.children()
        assert len(before) == 2

        def is_back() -> bool:
            return not set(before) & set(served.children()) and served.ask("/readyz")[0] == 200

        found = under_load(served, lambda: os.kill(before[1], signal.SIGKILL), until=is_back)
        assert {status for _, status, _ in found} <= {200, 503}
        assert all(close(each["outputs"], wanted[n : n + 1]) for n, status, each in found if status == 200)


def test_nobody_without_the_token_is_answered_where_others_reach_the_server(run_dir: Path) -> None:
    with serving(run_dir, "--host", "0.0.0.0", "--preprocess", "standardise") as served:
        assert served.token
        with torch.no_grad(), open_run(run_dir) as run:
            wanted = run.model(run.names["standardise"](INPUTS))
        assert close(served.predict(INPUTS.tolist()), wanted)
        right, served.token = served.token, ""
        paths = ["/predict", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/", "/nowhere"]
        for given in ("", "Bearer ", "Bearer " + right[:-1], "Basic " + right, right):
            headers = {"Authorization": given} if given else {}
            assert {served.ask(path, headers=headers)[0] for path in paths} == {401}
            assert served.ask("/predict", {"inputs": INPUTS[:1].tolist()}, headers=headers)[0] == 401


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from parts import net

import manyhosts as mh

inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
data = mh.Data(train=TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
mh.Trainer(model=net, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), data=data).fit("2 steps")
"""


def test_run_of_a_script_with_a_module_next_to_it_is_served(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "parts.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(4, 1)\n")
    (tmp_path / "csv.py").write_text("raise SystemExit('not the module that is meant')\n")
    words = ["run", "--run-dir", "run", "train.py"]
    started = "import sys; sys.path.pop(0); import runpy; runpy.run_module('manyhosts', run_name='__main__')"
    subprocess.run([sys.executable, "-c", started, *words], cwd=tmp_path, check=True, timeout=120)
    with serving(tmp_path / "run") as found:
        assert len(found.predict([[1.0, 2.0, 3.0, 4.0]])) == 1
