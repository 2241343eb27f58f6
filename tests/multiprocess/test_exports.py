"""Exports of what several workers trained, of language models; and ten thousand requests that are wrong."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest
import torch
from held_memory import HeldMemory
from safetensors.torch import load_file
from served import serving
from small_run import SCRIPT, make_run

import manyhosts as mh
from manyhosts.export.export import Request, export

ROOT = Path(__file__).parents[2]
DEEP = SCRIPT.replace("nn.Linear(144, 3)", "*(nn.Linear(144, 144) for _ in range(60)), nn.Linear(144, 3)")


def test_parts_of_four_workers_are_exported_on_one_with_memory_for_one_model(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--workers", "4", "--set", "strategy=fsdp", "--set", "duration=2 steps", script=DEEP)
    assert len(list((run / "best").glob("tensors-*"))) == 4
    weights = mh.load(run)
    size = sum(each.nbytes for each in weights.values())
    with HeldMemory() as held:
        folder, _ = export(Request(run_dir=str(run), format="safetensors"))
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert size < held.most < 1.1 * size


TRANSFORMERS = """
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

import manyhosts as mh


def model():
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))


class Texts(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, number):
        words = torch.arange(12) * (number + 1) % 50
        mask = (torch.arange(12) < 6 + number % 7).long()
        return {"input_ids": words, "attention_mask": mask, "labels": words[1] % 3}


if __name__ == "__main__":
    trainer = mh.Trainer(
        model=model,
        step=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        data=mh.Data(train=Texts(), validation=Texts(), batch_size=8),
    )
    trainer.fit("1 epoch")
"""


@pytest.mark.slow  # of each format one small network is in `make test`: tests/unit/export
@pytest.mark.timeout(900)
def test_every_format_of_a_model_of_transformers_answers_as_it_does(tmp_path: Path) -> None:
    run = make_run(tmp_path, script=TRANSFORMERS)
    for kind in ("hf", "safetensors", "torch-export", "onnx"):
        for precision in ("fp32", "bf16"):
            folder, described = export(Request(run_dir=str(run), format=kind, precision=precision))
            allowed = {"fp32": 1e-5, "bf16": 1e-2}[precision]
            assert described.verified["largest_difference"] <= allowed, (kind, precision)
    assert [each.name for each in described.inputs] == ["input_ids", "attention_mask"]
    assert [each.name for each in described.outputs] == ["logits"]
    with serving(folder) as served:
        sample = {"input_ids": list(range(12)), "attention_mask": [1] * 12}
        [answer] = served.predict([sample])
        assert len(answer) == 3
        status, said = served.ask("/predict", {"inputs": [{**sample, "input_ids": [50] * 12}]})
        assert status == 422, said
        status, said = served.ask("/predict", {"inputs": [{**sample, "input_ids": [0.5] * 12}]})
        assert (status, said["error"]) == (422, "input_ids: fractions were sent, and the model takes int64")


@pytest.mark.slow  # as above
@pytest.mark.timeout(900)
def test_every_format_of_the_character_model_answers_as_it_does(tmp_path: Path) -> None:
    script = (ROOT / "examples" / "char_lm.py").read_text()
    run = make_run(tmp_path, "--workers", "2", "--set", "duration=4 steps", script=script, name="char_lm.py")
    for kind in ("safetensors", "torch-export", "onnx"):
        _, described = export(Request(run_dir=str(run), format=kind))
        assert described.verified["largest_difference"] <= 1e-5


@pytest.mark.slow  # the refusals of tests/multiprocess/test_serve.py are in `make test`
@pytest.mark.timeout(1800)
def test_ten_thousand_malformed_requests_give_4xx_and_neither_a_crash_nor_growth(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    draw = random.Random(0)
    pieces = [
        b"{",
        b"}",
        b"[",
        b"]",
        b'"inputs"',
        b":",
        b",",
        b"1",
        b"1e999",
        b"null",
        b"NaN",
        b'"x"',
        b"true",
        b" ",
        b"-",
    ]
    statuses: dict[int, int] = {}
    with serving(run, "--body-timeout", "1") as served:
        children = served.children()
        port = int(served.address.rpartition(":")[2])

        def memory() -> int:
            return sum(
                int(line.split()[1])
                for pid in (served.process.pid, *children)
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line.startswith("RssAnon")
            )

        def ask(number: int) -> None:
            kind = number % 4
            if kind == 0:
                body = draw.randbytes(draw.randrange(300))
            elif kind == 1:
                body = b"".join(draw.choices(pieces, k=draw.randrange(40)))
            elif kind == 2:
                body = b'{"inputs": ' + b"[" * draw.randrange(2000) + b"1" + b"]" * draw.randrange(2000) + b"}"
            else:
                body = b'{"inputs": [[[' + b"0.5," * draw.randrange(20) + b"1]]]}"
            kinds = ["application/json", "application/vnd.safetensors", "text/plain", ""]
            status, _ = served.ask("/predict", body, headers={"Content-Type": draw.choice(kinds)})
            statuses[status] = statuses.get(status, 0) + 1

        for number in range(1000):
            ask(number)
        before = memory()
        for number in range(9000):
            ask(number)
        for _ in range(20):
            served.ask("/predict", b"0" * 9_000_000)
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(draw.randbytes(2000) + b"\r\n\r\n")
                raw.settimeout(10)
                assert raw.recv(4096)[:12] in (b"", b"HTTP/1.1 400")
        assert memory() < 1.1 * before + 20_000
        assert served.children() == children
        assert len(served.predict([[[[0.5] * 8] * 8]])) == 1
    assert all(400 <= status < 500 for status in statuses), statuses
    assert sum(statuses.values()) == 10_000


@pytest.mark.slow  # as above
@pytest.mark.timeout(900)
def test_what_the_openapi_description_allows_and_forbids_is_answered_as_it_says(tmp_path: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given, settings

    run = make_run(tmp_path)
    with serving(run) as served:
        schema = schemathesis.openapi.from_url(served.address + "/openapi.json")
        strategy = schema["/predict"]["POST"].as_strategy()

        @given(case=strategy)
        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
        def every_case_is_answered(case: object) -> None:
            response = case.call(base_url=served.address)  # type: ignore[attr-defined]
            assert response.status_code == 200 or 400 <= response.status_code < 500, response.text

        every_case_is_answered()
        assert served.ask("/readyz")[0] == 200
