"""One prepared cache and one tiny trained run for all tests of the command line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farspan.cli.main import main

WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "thing",
    "life",
    "world",
    "school",
    "state",
    "family",
    "group",
]
TINY = """\
data: docs
tokenizer: {vocab: 300}
model: {layers: 1, d_model: 16, heads: 2, context: 32}
train: {steps: 4, precision: fp32, batch: {global: 2 sequences}, validate_every: 2}
index: {encoder: own}
"""
Farspan = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with text in `docs` and a run.yaml; its cache is `cache`."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "docs").mkdir()
    rng = random.Random(0)
    for number in range(40):
        text = "\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(20))
        (folder / "docs" / f"{number:02}.txt").write_text(text)
    (folder / "my docs").mkdir()
    (folder / "my docs" / "plan.json").write_text("{}")
    (folder / "run.yaml").write_text(TINY)
    return folder


@pytest.fixture(scope="session")
def variables(desk: Path) -> dict[str, str]:
    return {"FARSPAN_CACHE": str(desk / "cache"), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def environment(variables: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **variables}


@pytest.fixture(scope="session")
def farspan(desk: Path, environment: dict[str, str]) -> Farspan:
    """Runs `python -m farspan WORDS...` in the desk."""

    def call(*words: str, cwd: Path = desk, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "farspan", *words],
            cwd=cwd,
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=900,
        )

    return call


@pytest.fixture
def here(
    desk: Path,
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Farspan:
    """As `farspan`, in this process: for the many commands that are refused before they start any
    other."""

    def call(*words: str, cwd: Path = desk, **more: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        for name, value in {**variables, **more}.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = main(list(words))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, said.out, said.err)

    return call


@pytest.fixture(scope="session")
def run(desk: Path, farspan: Farspan) -> Path:
    """A finished run, `runs/docs` in the desk."""
    done = farspan("train", "run.yaml")
    assert done.returncode == 0, done.stderr
    return desk / "runs" / "docs"
