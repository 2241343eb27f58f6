"""The house rules that a program can check: which way imports run, what stays light, what every file begins with."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args

import click
import pytest

import manyhosts
from manyhosts.config.strategy_settings import StrategySettings
from manyhosts.strategies.traits import Traits
from manyhosts.table import Table

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "manyhosts"
FILES = sorted(PACKAGE.rglob("*.py"))
OTHER_FILES = [path for folder in ("tests", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]

FLOORS = [  # from the ground up
    ["errors"],  # the ground's own ground: those beside it in the design raise them
    ["device", "events", "host_memory", "imports", "own_frames", "refusals", "units", "table"],
    ["config", "cluster", "records"],
    ["hosts", "communication", "data", "listeners"],
    ["control", "rehearsal"],
    ["strategies", "snapshot", "planner", "lab", "trials", "callbacks"],
    ["launchers", "study", "elastic"],
    ["model"],
    ["loss"],
    ["evaluation"],
    ["training", "doctor", "report"],
    ["export", "prove", "measure", "tune", "watch", "reproduce", "analysis", "notebook"],
    ["serve", "deploy"],
    ["cli"],
    ["__main__"],
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
WITHOUT_TORCH = [
    "errors",
    "events",
    "host_memory",
    "imports",
    "own_frames",
    "refusals",
    "units",
    "table",
    "cli",
    "config",
    "cluster",
    "records",
    "hosts",
    "control",
    "launchers",
    "listeners",
    "planner",
    "trials",
    "tune",
]
"""Import torch late, if at all: they answer on login nodes, and at once."""
TEMPLATE = "control/agent/fork_server_process.py"
"""The process that workers are forked from exists to have torch loaded. It is started, never imported."""


def parts_named_in(source: str, module: str) -> set[str]:
    """The folders of manyhosts that a file imports, late and for types too, or names in a string to be imported."""
    named = [name.split(".") for name in _names_in(ast.parse(source), module)]
    return {words[1] for words in named if words[0] == "manyhosts" and len(words) > 1} - {"__version__"}


def _names_in(tree: ast.Module, module: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"manyhosts(?!\.(toml|lock)$)(\.\w+)+(:\w+)?", str(node.value)
        ):
            yield str(node.value).partition(":")[0]


def module_of(path: Path) -> str:
    """`manyhosts.data.order`; a folder's `__init__` keeps that word, so that relative imports count right."""
    return ".".join(["manyhosts", *path.relative_to(PACKAGE).with_suffix("").parts])


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def in_package(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_file_imports_downward_only() -> None:
    assert not {in_package(path): wrong for path in FILES if (wrong := upward(path))}


def upward(path: Path) -> str:
    """What is wrong with the imports of a file; empty where nothing is."""
    part = part_of(path)
    if part == "__init__":
        return ""  # the face: it names everything, and imports it when asked
    if part not in FLOOR_OF:
        return f"{part} stands on no floor: give it one, or a place in a folder that has one"
    others = parts_named_in(path.read_text(), module_of(path)) - {part}
    if unknown := sorted(others - FLOOR_OF.keys()):
        return f"{part} names {unknown}, which stand on no floor"
    above = sorted(other for other in others if FLOOR_OF[other] >= FLOOR_OF[part])
    return f"{part} (floor {FLOOR_OF[part]}) may not import {above}" if above else ""


def test_the_picture_of_the_floors_is_the_floors() -> None:
    picture = (ROOT / "docs" / "decisions" / "0001-floors.md").read_text().partition("```text\n")[2].partition("```")[0]
    assert [line.split()[1:] for line in reversed(picture.splitlines())] == FLOORS


def test_no_circle_of_imports_anywhere() -> None:
    modules = {module_of(path): path for path in FILES if path.stem != "__init__"}
    graph = {name: imported_by(path.read_text(), name, modules.keys()) for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail("these import each other in a circle: " + " -> ".join(circle.args[1]))


def imported_by(source: str, module: str, known: Collection[str]) -> set[str]:
    """The files of manyhosts, among `known`, that a file imports, late and for types too."""
    found = set()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for name in _names_in(ast.Module(imports, []), module):
        while name and name not in known:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", module}


def test_circle_is_seen_behind_type_checking_and_in_functions() -> None:
    known = {"manyhosts.data.order", "manyhosts.training.loop.loop"}
    for source in (
        "if TYPE_CHECKING:\n    from manyhosts.training.loop.loop import Loop",
        "def late():\n    from ..training.loop import loop",
    ):
        assert imported_by(source, "manyhosts.data.order", known) == {"manyhosts.training.loop.loop"}


def test_fewer_than_a_hundred_files_have_one_importer() -> None:
    """A small file that one other file imports is a part of it, or its subject is read alone (decision 0161)."""
    modules = {module_of(path): path for path in FILES if path.stem != "__main__"}
    known = {name for name, path in modules.items() if path.stem != "__init__"}
    importers = Counter(found for name, path in modules.items() for found in imported_by(path.read_text(), name, known))
    assert importers["manyhosts.errors"] > 100, "imports are not seen"
    assert sum(count == 1 for count in importers.values()) < 100


@pytest.mark.parametrize(
    "source",
    [
        "from manyhosts import training",
        "from manyhosts.training.trainer import Trainer",
        "from ..training import trainer",
        "from .. import training",
        "def late():\n    import manyhosts.training.loop.loop",
        "if TYPE_CHECKING:\n    from manyhosts.training import Trainer",
        "PLACES = {'trainer': 'manyhosts.training.trainer:Trainer'}",
    ],
)
def test_no_way_of_importing_is_overlooked(source: str) -> None:
    assert parts_named_in(source, "manyhosts.data.order") == {"training"}


def test_light_parts_start_without_torch() -> None:
    light = [path for path in FILES if part_of(path) in WITHOUT_TORCH and in_package(path) != TEMPLATE]
    names = [module_of(path).removesuffix(".__init__") for path in light]
    code = f"import sys, importlib\nfor name in {names}:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, f'{name} imports torch'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_launchers_never_import_torch_not_even_late() -> None:
    for path in FILES:
        if part_of(path) in ("hosts", "control", "launchers") and in_package(path) != TEMPLATE:
            names = _names_in(ast.parse(path.read_text()), module_of(path))
            assert "torch" not in {name.split(".")[0] for name in names}, in_package(path)


def test_first_line_says_what_the_file_is() -> None:
    for path in FILES + OTHER_FILES:
        first = path.read_text().partition("\n")[0]
        assert first.startswith('"""'), f"{path}: the first line is no docstring"
        assert first.removesuffix('"""').endswith((".", ":", "?")), f"{path}: the first line is no whole sentence"
        assert not re.match(r'"""this (module|file)', first, re.IGNORECASE), path


def test_asserts_give_their_reason() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text())
        mute = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert) and not node.msg]
        assert not mute, f"{in_package(path)}: asserts without words in lines {mute}"


def test_exemptions_name_their_code_and_nothing_is_unfinished() -> None:
    for path in FILES + OTHER_FILES:
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert not re.search(r"\b(TODO|FIXME|XXX)\b", line), f"{path}:{number}: an unfinished thing"
            for exemption in re.findall(r"#\s*(type: ignore\S*|noqa\S*( [A-Z]+\d+)?)", line):
                has_code = re.search(r"type: ignore\[|noqa: ?", exemption[0])
                assert has_code, f"{path}:{number}: {exemption[0]} without its code"


def test_no_file_is_named_after_nothing() -> None:
    empty = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}
    assert not [path for path in FILES + OTHER_FILES if empty & {path.stem, *path.relative_to(ROOT).parts}]


def test_public_names_are_sorted_and_importable() -> None:
    assert manyhosts.__all__ == sorted(manyhosts.__all__, key=lambda name: (not name.isupper(), name))  # ruff's order
    for name in manyhosts.__all__:
        assert getattr(manyhosts, name) is not None, name
    assert dir(manyhosts) == sorted(manyhosts.__all__)


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        manyhosts.Trainr  # noqa: B018


def tables() -> list[tuple[str, Table, str]]:
    """Every name of every table, with the module that holds the table."""
    found = []
    for path in FILES:
        if "Table(" in path.read_text() and part_of(path) != "table":
            module = importlib.import_module(module_of(path).removesuffix(".__init__"))
            held = {id(value): value for value in vars(module).values() if isinstance(value, Table)}
            found += [(module.__name__, table, name) for table in held.values() for name in table.names()]
    return found


@pytest.mark.parametrize(
    ("module", "table", "name"), [pytest.param(*row, id=f"{row[1].kind}-{row[2]}") for row in tables()]
)
def test_every_name_of_every_table_leads_to_code(module: str, table: Table, name: str) -> None:
    try:
        assert table.load(name) is not None
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] == "manyhosts":
            raise
        pytest.skip(f"{table.kind} {name!r} of {module} needs the extra that brings {missing.name}")


def test_everything_that_is_asked_for_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {}
    for file in ("runtime.txt", "dev.txt"):
        for line in (ROOT / "requirements" / file).read_text().splitlines():
            if not line.startswith("#"):
                name, _, version = line.partition("==")
                assert version, f"{file}: {line!r} has no exact version"
                pinned[name.lower()] = version
    asked = [*project["dependencies"], *project["optional-dependencies"]["examples"]]
    asked += project["optional-dependencies"]["dev"]
    for requirement in asked:
        name = re.split(r"[<>=!~\[; ]", requirement)[0].lower()
        assert name in pinned, f"{name} is in pyproject.toml and in no file of requirements/"


TRAINER_ARGUMENTS = (
    "model optimizer data loss step metrics schedule strategy precision micro_batch_size clip_gradients snapshots "
    "validate_every early_stopping listeners init_from seed virtual_workers batch_norm lr_scaling warmup compile "
    "backend record_samples run_dir on_bad_step schedule_every audit weight balance activation_checkpointing "
    "threads keep_pictures callbacks best"
)
OPTIONS = {
    "run": "--on --cluster --hosts --hostfile --workers --nodes --workers-per-node --restarts --hang-timeout "
    "--head-timeout --ports --no-sync --bring --warm "
    "--no-check --encrypt --show --log-size --no-prefix --env --set --profile --metrics-port "
    "--run-dir --resume --module --no-python --rehearse --detach --dry-run --trace",
    "snapshots ls": "--json --quick --trace",
    "snapshots show": "--json --trace",
    "snapshots verify": "--json --trace",
    "snapshots prune": "--keep --dry-run --json --trace",
    "doctor": "--on --cluster --hosts --hostfile --nodes --run-dir --data --json --trace",
    "join": "--secret-file --address --folder --trace",
    "prove": "--workers --steps --only --set --json --dry-run --trace",
    "plan": "--workers --nodes --workers-per-node --on --cluster --hosts --hostfile --machines --network --price "
    "--set --env --calibrate --seconds --patience --all --json --dry-run --trace",
    "study": "--workers --nodes --workers-per-node --on --cluster --hosts --hostfile --budget --repeat --vary --set "
    "--env --price --proposal --weak --run-dir --json --dry-run --trace",
    "runs": "--json --trace",
    "reproduce": "--here --dry-run --json --trace",
    "env lock": "--on --cluster --hosts --hostfile --nodes --output --trace",
    "env container": "--output --trace",
    "analyse": "--data --snapshot --workers --slice --resamples --worst --json --trace",
    "report": "--output --markdown --trace",
    "tune": "--search --metric --budget --trials --price --warn --sampler --pruner --seed --workers --nodes "
    "--workers-per-node --at-once --on --cluster --hosts --hostfile --env --set --storage --study --run-dir --json "
    "--dry-run --trace",
    "watch": "--web --port --trace",
    "export": "--format --bf16 --int8 --snapshot --model --preprocess --licence --output --json --dry-run --trace",
    "serve": "--host --port --snapshot --model --follow --preprocess --workers --threads --batch --batch-wait --queue "
    "--max-body --max-samples --body-timeout --timeout --grace --keep --keep-share --keep-mb --behind-sagemaker "
    "--dry-run --trace",
    "deploy": "--to --name --output --apply --dry-run --trace",
    "status": "--json --trace",
    "logs": "--follow --trace",
    "cancel": "--trace",
    "init": "--dry-run --loop --trace",
    **{f"lab {order}": "--lab --trace" for order in ["cut", "mend", "freeze", "thaw", "kill", "boot", "slow", "hosts"]},
    "lab clean": "--trace",
    "lab with": "",
}
RATCHET = "each one is read by everybody for ever: a setting that `--set` reaches, or a field of a value, may be enough"


def test_trainer_has_no_new_argument() -> None:
    found = set(inspect.signature(manyhosts.Trainer).parameters)
    assert found == set(TRAINER_ARGUMENTS.split()), RATCHET


def options_of(command: click.Command, name: str = "") -> dict[str, set[str]]:
    """Every command below `command`, with its long options."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        found: dict[str, set[str]] = {}
        for verb in command.list_commands(context):
            below = command.get_command(context, verb)
            assert below is not None, verb
            found |= options_of(below, f"{name} {verb}".strip())
        return found
    words = [word for parameter in command.params if isinstance(parameter, click.Option) for word in parameter.opts]
    return {name: {word for word in words if word.startswith("--")}}


def test_command_line_has_no_new_option() -> None:
    found = options_of(importlib.import_module("manyhosts.cli.main").cli)
    assert found == {name: set(words.split()) for name, words in OPTIONS.items()}, RATCHET


HELP = """
import json, sys
before = set(sys.modules)
from manyhosts.cli.main import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)), file=sys.stderr)
"""


def test_help_of_every_verb_loads_nothing_but_python_and_click() -> None:
    """So it takes little longer than Python itself, and answers on a login node that has no torch."""
    # `lab with` takes everything behind it as the command to run, `--help` too.
    verbs = [name.split() for name in OPTIONS if name != "lab with"]
    asked = [["--help"], ["lab", "--help"], ["env", "--help"], *([*verb, "--help"] for verb in verbs)]
    done = subprocess.run([sys.executable, "-c", HELP, json.dumps(asked)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "['click', 'manyhosts']\n"), done.stderr
    assert done.stdout.count("Usage: manyhosts") == len(asked)


KNOW_STRATEGIES = {
    "__init__.py",  # mh.FSDP
    "config/strategies.py",
    "planner/strategies/strategy.py",
    "strategies/table.py",
}
"""The tables in which a strategy has a line: four, and no other file outside its own names it."""
OF_FSDP = (
    "config/sharded_layers.py",
    "config/fully_sharded.py",
    "config/local_steps.py",  # copies in parts that step alone
    "measure/in_worker/in_parts.py",
    "planner/strategies/fsdp.py",
    "planner/strategies/sharded_layers.py",
    "planner/strategies/local_sgd.py",
    "strategies/fsdp/",
    "strategies/local_parts.py",
    "strategies/sharded_layers.py",
    "strategies/units.py",
)
OF_ASYNCHRONOUS = ("config/asynchronous.py", "planner/strategies/asynchronous.py", "strategies/asynchronous/")


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (r"\b(fsdp|FSDP|fully_sharded)\b", OF_FSDP),
        (r"\.asynchronous\b|parameter.server\b|ParameterServer|[Hh]ogwild|[Pp]ipe[Dd]ream", OF_ASYNCHRONOUS),
    ],
    ids=["fsdp", "asynchronous"],
)
def test_a_strategy_is_known_by_its_own_files_and_by_tables(names: str, own: tuple[str, ...]) -> None:
    """One that comes next adds files of its own, and a line to each of these."""
    named = {in_package(path) for path in FILES if re.search(names, path.read_text())}
    assert {path for path in named if not path.startswith(own)} == KNOW_STRATEGIES


OF_PARTS_OF_LAYERS = (
    "config/sharded_layers.py",
    "planner/strategies/sharded_layers.py",
    "strategies/sharded_layers.py",
)
OF_COPIES_ALONE = ("config/local_steps.py", "strategies/local_parts.py")


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (r"sharded_layers|ShardedLayers|fsdp\+tensor", OF_PARTS_OF_LAYERS),
        (r"local_parts|MeanInParts|OuterStepsInParts|(fsdp|diloco)\+(fsdp|diloco|local-sgd)", OF_COPIES_ALONE),
    ],
    ids=["fsdp+tensor", "fsdp+local-sgd"],
)
def test_a_combination_is_known_by_its_own_files_and_by_the_same_tables(names: str, own: tuple[str, ...]) -> None:
    """But for the face: it has no name in Python that its parts have not, or the mesh."""
    named = {in_package(path) for path in FILES if re.search(names, path.read_text())}
    assert {path for path in named if not path.startswith(own)} == KNOW_STRATEGIES - {"__init__.py"}


def test_updates_that_wait_for_no_worker_are_at_most_a_thousand_statements() -> None:
    """All three strategies, with their settings and what a plan knows of them."""
    files = [path for path in FILES if in_package(path).startswith(OF_ASYNCHRONOUS)]
    assert sum(isinstance(node, ast.stmt) for path in files for node in ast.walk(ast.parse(path.read_text()))) <= 1000


def test_all_other_ways_to_train_and_what_they_exchange_are_at_most_eight_thousand_statements() -> None:
    files = [path for path in FILES if in_package(path).startswith(("strategies/", "communication/"))]
    others = [path for path in files if not in_package(path).startswith(OF_ASYNCHRONOUS)]
    assert sum(isinstance(node, ast.stmt) for path in others for node in ast.walk(ast.parse(path.read_text()))) <= 8000


def test_what_a_run_is_has_at_most_so_many_statements() -> None:
    """Both faces included; and with what needs no run to be known, which stands below it (decision 0184)."""
    counts = {
        room: sum(isinstance(node, ast.stmt) for path in files for node in ast.walk(ast.parse(path.read_text())))
        for room in ("training", "evaluation", "loss", "model")
        if (files := [path for path in FILES if part_of(path) == room])
    }
    assert counts["training"] <= 6639
    assert sum(counts.values()) <= 9588


def questions_to_a_strategy(source: str, module: str) -> list[str]:
    """Where a file asks which strategy it has, not for what that does: reads of traits, and `isinstance` of one.

    Of the class of a strategy, of its settings, or of a protocol that some strategies have.
    """
    tree = ast.parse(source)
    places = {node.name: (module, node.name) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            places |= {each.asname or each.name: (node.module, each.name) for each in node.names}
        elif isinstance(node, ast.Import):
            places |= {each.asname: (each.name, "") for each in node.names if each.asname}
    return [ast.unparse(node) for node in ast.walk(tree) if _reads_trait(node) or _asks_for_kind(node, places)]


def _reads_trait(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    of_variable = node.attr in {each.name for each in dataclasses.fields(Traits)} and isinstance(node.value, ast.Name)
    return node.attr == "traits" or of_variable


def _asks_for_kind(node: ast.AST, places: Mapping[str, tuple[str, str]]) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    if node.func.id not in ("isinstance", "issubclass"):
        return False
    found = []
    for each in ast.walk(node.args[1]):
        if isinstance(each, ast.Name) and each.id in places:
            found.append(places[each.id])
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in places:
            found.append((places[each.value.id][0], each.attr))
    return any(_is_of_strategy(*place) for place in found)


def _is_of_strategy(module: str, name: str) -> bool:
    if not module.startswith("manyhosts") or (
        module != "manyhosts" and module.split(".")[1] not in ("strategies", "config")
    ):
        return False
    kind = getattr(importlib.import_module(module), name, None)
    kinds = get_args(kind) or (kind,)
    return any(
        isinstance(each, type)
        and (each.__module__.startswith("manyhosts.strategies") or issubclass(each, StrategySettings))
        for each in kinds
    )


def test_fewer_than_ten_places_ask_which_strategy_it_is() -> None:
    """What a strategy is, it answers itself: by a method of the class that all derive from, or of its settings."""
    others = [path for path in FILES if part_of(path) != "strategies"]
    found = {in_package(path): questions_to_a_strategy(path.read_text(), module_of(path)) for path in others}
    asked = [f"{file}: {each}" for file, questions in found.items() for each in questions]
    assert 0 < len(asked) < 10, asked


@pytest.mark.parametrize(
    "source",
    [
        "if strategy.traits.synchronous: ...",
        "traits = parts.strategy.traits",
        "def check(traits):\n    return traits.holds_full_model",
        "from manyhosts.config.strategies import DDP as Asked\nisinstance(settings.strategy, Asked)",
        "from manyhosts.config.strategies import FSDP\nisinstance(own, (int, FSDP))",
        "from manyhosts.config.strategies import Strategy\nisinstance(given, Strategy)",
        "import manyhosts as mh\nisinstance(settings.strategy, mh.DDP | mh.FSDP)",
        "from manyhosts.strategies.ddp import DataParallel\nisinstance(parts.strategy, DataParallel)",
        "from manyhosts.strategies.strategy import InTwo\nissubclass(kind, InTwo)",
    ],
)
def test_no_question_to_a_strategy_is_overlooked(source: str) -> None:
    assert len(questions_to_a_strategy(source, "manyhosts.training.fit")) == 1


def test_a_tensor_of_torch_is_no_strategy() -> None:
    assert not questions_to_a_strategy("from torch import Tensor\nisinstance(each, Tensor)", "manyhosts.training.fit")
