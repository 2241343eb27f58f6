"""The package as a user has it: built as a wheel, and installed where nothing else of this checkout is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment that has the wheel, and the libraries of this one."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"  # of its own: what an earlier build has left must not come into this one
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "wheel"), str(source)]
    said = subprocess.run([*pip, *build], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    [wheel] = (folder / "wheel").glob("manyhosts-*.whl")
    made = folder / "environment"
    venv.create(made, with_pip=False, symlinks=True)
    programs = made / "bin"
    said = subprocess.run(
        [*pip, "--python", str(programs / "python"), "install", "--no-deps", str(wheel)], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    [packages] = made.glob("lib/python*/site-packages")
    # The libraries lie in this environment; a line of a .pth file leads to them, and not to this checkout.
    (packages / "libraries.pth").write_text("\n".join(paths_of_libraries()) + "\n")
    return programs


def paths_of_libraries() -> list[str]:
    """Where the libraries of this environment lie."""
    own = Path(sysconfig.get_path("purelib"))
    lines = [
        line.strip()
        for file in own.glob("*.pth")
        if "manyhosts" not in file.name
        for line in file.read_text().splitlines()
    ]
    return [str(own), *(line for line in lines if Path(line).is_absolute() and Path(line).is_dir())]
