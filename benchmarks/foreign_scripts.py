"""Do scripts that nobody here wrote run as they do under torchrun? Thirty of them, tried with both.

    python benchmarks/foreign_scripts.py                      # clones what it needs from GitHub
    python benchmarks/foreign_scripts.py --sources DIR        # bare clones in DIR/OWNER+NAME/repo
    python benchmarks/foreign_scripts.py --only nanoGPT --jobs 2

Each script runs as it is, made short by its own arguments or by a change of a number in its text, on random data
(foreign_scripts_data.py). Scripts for GPUs are rehearsed where there is none. What came of it goes to
foreign_scripts.jsonl, one line per script, and from there to docs/foreign-scripts-tried.md. Needs torchvision,
transformers, datasets, evaluate, trl, deepspeed, timm, hydra-core and lightning for the scripts that use them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreign_scripts_list import SCRIPTS, UNTRIED, Script

HERE = Path(__file__).parent
RECORD = HERE / "foreign_scripts.jsonl"
TABLE = HERE.parent / "docs" / "foreign-scripts-tried.md"
LIMIT_S = 240
LONGEST_REASON = 90


@dataclass(frozen=True, slots=True)
class Ended:
    """How one run of a script ended."""

    code: int
    """124 where it ran past the time."""
    seconds: float
    output: str

    def last_metric(self, pattern: str) -> str:
        """The last number that the script has printed of what it is measured by; empty where it printed none."""
        found = re.findall(pattern, self.output)
        return found[-1] if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sources", type=Path, help="a folder of bare clones: OWNER+NAME/repo")
    parser.add_argument("--work", type=Path, default=Path("foreign-scripts"), help="a folder to work in")
    parser.add_argument("--only", default="", help="scripts whose name holds these words")
    parser.add_argument("--jobs", type=int, default=1, help="how many scripts are tried at once")
    parser.add_argument("--missing", action="store_true", help="only those that have not ended well yet")
    parser.add_argument("--table", action="store_true", help="write the table from the record, and run nothing")
    asked = parser.parse_args()
    if not asked.table:
        work = asked.work.absolute()
        make_data(work / "data")
        good = {row["name"] for row in rows_kept() if row["manyhosts"] == 0} if asked.missing else set()
        chosen = [script for script in SCRIPTS if asked.only in script.name and script.name not in good]
        for repository in sorted({script.repository for script in chosen}):
            clone(repository, work, asked.sources)
        with ThreadPoolExecutor(asked.jobs) as pool:
            for script, row in zip(chosen, pool.map(lambda script: tried(script, work), chosen), strict=True):
                keep(row)
                print(script.name, {name: row[name] for name in ("torchrun", "manyhosts", "ratio")}, flush=True)
    TABLE.write_text(table())


def clone(repository: str, work: Path, sources: Path | None) -> None:
    """Have a bare clone of `repository` (OWNER/NAME) in the folder `work`."""
    place = work / "clones" / repository.replace("/", "+")
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if sources is not None:
        place.symlink_to(sources / repository.replace("/", "+") / "repo")
        return
    url = f"https://github.com/{repository}"
    subprocess.run(["git", "clone", "--bare", "--filter=blob:none", url, str(place)], check=True)


def tried(script: Script, work: Path) -> dict[str, Any]:
    """Run `script` under torchrun, or by itself where it starts its own processes, and under `manyhosts run`."""
    commit = git(work, script, "rev-parse", "HEAD").strip()
    under: dict[str, Ended] = {}
    for way in ("torchrun", "manyhosts"):
        folder = work / "runs" / f"{script.name.replace('/', '_').replace(' ', '_')}-{way}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        archive = folder / "archive.tar"
        git(work, script, "archive", "--output", str(archive), commit, *script.paths)
        subprocess.run(["tar", "-x", "-f", str(archive), "-C", str(folder)], check=True)
        archive.unlink()
        beside = folder / script.folder
        for name, old, new in script.changes:
            path = beside / name
            text, count = re.subn(old, new, path.read_text())
            assert count, f"{script.name}: nothing to change in {name}: {old}"
            path.write_text(text)
        (folder / "start").mkdir()
        shutil.copy(HERE / "foreign_scripts_data.py", folder / "start" / "sitecustomize.py")
        under[way] = run(script, way, beside, folder / "start", work / "data")
        (work / "runs" / f"{folder.name}.log").write_text(under[way].output)
    ours, theirs = under["manyhosts"], under["torchrun"]
    return {
        "name": script.name,
        "repository": script.repository,
        "commit": commit[:10],
        "kind": script.kind,
        "rehearsed": script.gpus,
        "workers": script.workers,
        "alone": script.alone,
        "torchrun": theirs.code,
        "torchrun_metric": theirs.last_metric(script.metric),
        "torchrun_reason": reason(theirs),
        "torchrun_seconds": round(theirs.seconds, 1),
        "manyhosts": ours.code,
        "manyhosts_metric": ours.last_metric(script.metric),
        "manyhosts_reason": reason(ours),
        "manyhosts_seconds": round(ours.seconds, 1),
        "ratio": round(ours.seconds / theirs.seconds, 2) if theirs.code == ours.code == 0 and not script.gpus else None,
        "torch": version("torch"),
    }


def git(work: Path, script: Script, *words: str) -> str:
    place = work / "clones" / script.repository.replace("/", "+")
    return subprocess.run(["git", "--git-dir", str(place), *words], check=True, capture_output=True, text=True).stdout


def run(script: Script, way: str, folder: Path, start: Path, data: Path) -> Ended:
    """One run, whose output goes to a file: a pipe would wait for whatever the script leaves behind."""
    words = [word.replace("DATA", str(data)) for word in script.words]
    own = script.environment.get("PYTHONPATH", "")
    path = os.pathsep.join(part for part in (str(start), own, os.environ.get("PYTHONPATH", "")) if part)
    environment = {
        **os.environ,
        "FOREIGN_TINY": str(data),
        "OMP_NUM_THREADS": "1",
        **script.environment,
        "PYTHONPATH": path,
    }
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}
    if way == "manyhosts":
        command = [sys.executable, "-m", "manyhosts.cli.main", "run", "--workers", str(script.workers)]
        command += ["--rehearse"] if script.gpus else []
        command += ["--env", "CUDA_VISIBLE_DEVICES=0,1"] if script.gpus and script.alone else []
        command += ["--run-dir", str(start / "run")]
    elif script.alone:
        command = [sys.executable]
    else:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(script.workers),
        ]
    output = start / "output"
    began = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            code = 124
    return Ended(code, time.monotonic() - began, output.read_text(errors="replace"))


def reason(ended: Ended) -> str:
    """Why a run ended badly: the last line of it that names an error."""
    if ended.code == 0:
        return ""
    if ended.code == 124:
        return f"still running after {LIMIT_S} s"
    lines = [
        line
        for line in ended.output.splitlines()
        if re.search(r"^\S*(Error|manyhosts: .* failed with)|: error:|Error: ", line)
    ]
    own = [line for line in lines if "ChildFailedError" not in line and "elastic" not in line]
    return re.sub(
        r"^(\[\S+\]:?)+|^manyhosts: .*? failed with ", "", (own or lines or [f"exit code {ended.code}"])[-1].strip()
    )


def version(package: str) -> str:
    from importlib.metadata import version as of

    return of(package)


def keep(row: dict[str, Any]) -> None:
    """Put a row into the record, in place of the one of the same script."""
    rows = [old for old in rows_kept() if old["name"] != row["name"]]
    order = [script.name for script in SCRIPTS]
    rows = sorted([*rows, row], key=lambda each: order.index(each["name"]) if each["name"] in order else len(order))
    RECORD.write_text("".join(json.dumps(each) + "\n" for each in rows))


def rows_kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def table() -> str:
    """The page of documents with what came of all scripts."""
    rows = rows_kept()
    equal = sum(row["torchrun"] == row["manyhosts"] == 0 and not row["rehearsed"] for row in rows)
    rehearsed = [row for row in rows if row["rehearsed"]]
    worked = sum(row["manyhosts"] == 0 for row in rehearsed)
    lines = [
        "# Scripts of others, tried",
        "",
        f"{len(rows)} published scripts, as they are in their repositories, made short and given random data by",
        "`benchmarks/foreign_scripts.py`, which fetches them and writes this page. Two workers on a machine with",
        f"{os.cpu_count()} cores and no GPU, torch {rows[0]['torch'] if rows else ''}.",
        f"{equal} of the {len(rows) - len(rehearsed)} that need no GPU end well under both; {worked} of the",
        f"{len(rehearsed)} that are written for GPUs are rehearsed to their end. Under torchrun these find no GPU:",
        "they fail, give up, or continue with the CPU where they know how to.",
        "",
        "*Starts* says who starts the workers: the launcher, or the script itself, for which plain `python` stands in",
        "the place of torchrun. In brackets is the last loss or accuracy that the script prints; most scripts set no",
        "seed. Time is that of `manyhosts run` divided by that of torchrun, where both did the same; other programs",
        "ran on the machine at the same time, so tenths mean nothing.",
        "",
        "| script | commit | starts | under torchrun | under `manyhosts run` | time |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = outcome(row, "manyhosts") + (", rehearsed" if row["rehearsed"] else "")
        theirs = ("without a GPU: " if row["rehearsed"] else "") + outcome(row, "torchrun")
        starts = "script" if row["alone"] else f"launcher, {row['workers']}"
        link = f"{row['repository'].partition('/')[2]}: {row['name']} ({row['kind']})"
        time_ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(f"| {link} | `{row['commit']}` | {starts} | {theirs} | {ours} | {time_ratio} |")
    left = [script.name for script in SCRIPTS if script.name not in {row["name"] for row in rows}]
    lines += ["", f"In the list, and without a result yet: {', '.join(left)}."] if left else []
    lines += ["", "Not tried here:", "", "| script | why |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in UNTRIED.items()]
    return "\n".join(lines) + "\n"


def outcome(row: dict[str, Any], way: str) -> str:
    """How a script ended under one of the two, in a cell of the table."""
    if row[way] == 0:
        metric = row[f"{way}_metric"]
        return f"done ({metric})" if metric else "done"
    said = row[f"{way}_reason"].replace("|", "/").replace("`", "'").replace("<", "").replace(">", "")
    short = said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]}…"
    return f"exit {row[way]}: {short}"


def make_data(place: Path) -> None:
    """Small random models and data sets, for scripts that take the name of a folder."""
    if (place / "done").exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    text = " ".join(f"word{number * 7 % 97}" for number in range(6000))
    (place / "input.txt").write_text(text)
    make_models(place)
    for name, row in (
        ("sft", {"text": text[:200]}),
        ("dpo", {"prompt": "word1 ", "chosen": "word2 word3", "rejected": "word4"}),
    ):
        (place / name).mkdir(exist_ok=True)
        (place / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(32)))
    make_images(place / "images")
    (place / "done").touch()


def make_models(place: Path) -> None:
    """A small BERT and a small Llama with random weights, with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]"]
    words = {word: number for number, word in enumerate([*special, *(f"word{number}" for number in range(100))])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="[EOS]", model_max_length=64, **names)
    sizes: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    sizes |= {"intermediate_size": 64, "pad_token_id": 0, "max_position_embeddings": 128}
    for name, model in (
        ("bert", BertForSequenceClassification(BertConfig(**sizes))),
        ("llama", LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=5))),
    ):
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)


def make_images(place: Path) -> None:
    """Folders of small random pictures, one for each of two classes."""
    import numpy
    from PIL import Image

    noise = numpy.random.default_rng(0)
    for split in ("train", "validation"):
        for kind in ("one", "two"):
            folder = place / split / kind
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(8):
                Image.fromarray(noise.integers(0, 255, (64, 64, 3), dtype="uint8")).save(folder / f"{number}.png")


if __name__ == "__main__":
    main()
