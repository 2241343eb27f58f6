"""Which variables a script sets before it imports torch, read from its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhosts.launchers import scripts
from manyhosts.launchers.scripts import set_before_torch

CASES = {
    'import os\nos.environ["OMP_NUM_THREADS"] = "3"\nimport torch': ("OMP_NUM_THREADS",),
    'import os\nos.environ.setdefault("PYTORCH_JIT", "0")\nimport torch': ("PYTORCH_JIT",),
    'from os import environ\nenviron.update({"MKL_DEBUG": "1"}, TORCH_LOGS="x")\nimport torch': (
        "MKL_DEBUG",
        "TORCH_LOGS",
    ),
    'import os\nif True:\n    os.environ["CUDA_VISIBLE_DEVICES"] = "1"\nfrom torch import nn': (
        "CUDA_VISIBLE_DEVICES",
    ),
    'import os\ntry:\n    os.putenv("KMP_AFFINITY", "x")\nfinally:\n    pass\nimport torch': ("KMP_AFFINITY",),
    'import os\nimport torch\nos.environ["OMP_NUM_THREADS"] = "3"': (),
    'import os\nos.environ["WANDB_MODE"] = "offline"\nos.environ["TORCHELASTIC_X"] = "1"\nimport torch': (),
    'import os\ndef later():\n    os.environ["OMP_NUM_THREADS"] = "3"\nimport torch': (),
    'import os\nimport transformers\nos.environ["TORCH_LOGS"] = "3"': (),
    'import os\nprint(os.environ["OMP_NUM_THREADS"])\nimport torch': (),
    "not python (": (),
}


@pytest.mark.parametrize(("source", "names"), CASES.items(), ids=range(len(CASES)))
def test_variables_are_found_up_to_the_import_of_torch(source: str, names: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    assert set_before_torch(script) == names
    assert (scripts.preload(str(script), "script") == ()) == bool(names or "not python" in source)


def test_modules_beside_the_script_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import settings\nimport torch\n")
    (tmp_path / "settings.py").write_text("import more\nimport script\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "__init__.py").write_text('import os\nos.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"\n')
    assert set_before_torch(tmp_path / "script.py") == ("TORCH_DISTRIBUTED_DEBUG",)


def test_module_is_read_where_it_is_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").write_text('import os\nos.environ["OMP_NUM_THREADS"] = "3"\nimport torch\n')
    assert scripts.preload("pack.train", "module") == ()
    assert scripts.preload("other.train", "module") != ()
