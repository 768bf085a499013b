"""A run folder that an earlier farspan left behind, stopped in the middle, is still good for
everything."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the run and its corpus; the run's record names the corpus where it lies
    now."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(Path(__file__).parent / "run-0.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    record = folder / "run" / "run.json"
    record.write_text(
        json.dumps(json.loads(record.read_text()) | {"corpus": str(folder / "corpus")})
    )
    return folder


def answer(old: Path, *words: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "farspan", *words, "--json"],
        cwd=old,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_run_folder_of_an_older_version_is_reported_exported_generated_from_resumed_and_embedded(
    old: Path,
) -> None:
    assert answer(old, "report", "run")["measurement"]
    assert (
        answer(old, "generate", "time", "--run", "run", "--tokens", "4")["step"] == 1000
    )  # The best
    assert answer(old, "export", "run", "--out", "model")
    assert (old / "model" / "model.safetensors").exists()
    resumed = answer(old, "resume", "run", "--trust")["measurement"]
    assert isinstance(resumed, dict) and resumed["steps"] >= 3000 - 1074
    answer(old, "embed", "run", "--no-eval")
    found = answer(old, "search", "document", "--run", "run")["answer"]
    assert isinstance(found, dict) and found["results"]
