"""What a user reads where farspan cannot start: another Python, a clone that is not installed."""

from __future__ import annotations

import ast
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from farspan import __main__ as start
from farspan.domain.problems import EXIT_CODES

ROOT = Path(__file__).parents[2]
#: What an unfit Python reads before it is refused.
FIRST_FILES = ("__init__.py", "_version.py", "__main__.py")
#: Runs `python -m farspan` as a Python of another version would.
AS_VERSION = """
import runpy, sys
sys.version_info = {version}
sys.argv = ["farspan", "--version"]
runpy.run_module("farspan", run_name="__main__")
"""


def run_start(version: tuple[int, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AS_VERSION.format(version=version)],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("version", [(3, 8, 18), (3, 11, 3), (3, 14, 0)])
def test_unfit_python_is_refused_with_the_versions_that_fit(version: tuple[int, ...]) -> None:
    done = run_start(version)
    assert done.returncode == EXIT_CODES["version-mismatch"]
    lines = done.stderr.splitlines()
    assert [line.split()[0] for line in lines] == [
        "error[version-mismatch]:",
        "where:",
        "fact:",
        "fix:",
    ]
    assert ".".join(map(str, version)) in lines[2] and "3.11.4" in lines[2]


@pytest.mark.parametrize("version", [(3, 11, 4), (3, 13, 9)])
def test_fit_python_starts(version: tuple[int, ...]) -> None:
    assert run_start(version).returncode == 0


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newer = (".".join(map(str, v)) for v in (start.OLDEST_PYTHON, start.NEWER_PYTHON))
    assert project["requires-python"] == f">={oldest},<{newer}"


@pytest.mark.parametrize("name", FIRST_FILES)
def test_old_python_can_read_what_refuses_it(name: str) -> None:
    ast.parse((ROOT / "farspan" / name).read_text(), feature_version=(3, 7))


def test_clone_that_is_not_installed_names_the_line_that_installs_it(tmp_path: Path) -> None:
    clone = tmp_path / "my clone"
    shutil.copytree(
        ROOT / "farspan", clone / "farspan", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "constraints.txt", clone)
    # Isolated, and without the libraries of this environment.
    program = "import sys, runpy; sys.path.insert(0, '.'); sys.argv = ['farspan']; "
    program += "runpy.run_module('farspan', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == EXIT_CODES["extra-missing"], done.stderr
    remedy = shlex.split(done.stderr.splitlines()[-1].removeprefix("  fix:"))
    assert remedy[1:] == [
        *("-m", "pip", "install", "-c", str(clone / "constraints.txt"), "-e", str(clone)),
    ]
