"""What is built and installed is what the pages speak of: README and tour, followed word by word from a wheel."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from pages import ROOT, blocks_of, run_page

pytestmark = pytest.mark.multiprocess


def test_wheel_is_found_and_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = "import manyhosts; print(manyhosts.__file__); print(manyhosts.__version__)"
    said = subprocess.run([installed / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    file, version = said.stdout.split()
    assert Path(file).is_relative_to(installed.parent)
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (Path(file).parent / "py.typed").exists(), "type checkers look for it"


def test_script_of_the_readme_trains_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = next(block for block in blocks_of(ROOT / "README.md") if block.text.startswith("# train.py\n"))
    words = replace(script, language="bash", text="manyhosts run --workers 2 train.py\n")
    run_page([script, words], tmp_path, programs=installed)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_every_block_of_the_page_runs_from_the_wheel(page: str, installed: Path, tmp_path: Path) -> None:
    run_page(blocks_of(ROOT / page), tmp_path, programs=installed)
