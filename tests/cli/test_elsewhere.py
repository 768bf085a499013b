"""A run's embedder and its vectors, taken elsewhere by the command line."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest

from farspan.domain.problems import EXIT_CODES
from tests.cli.conftest import Farspan

pytestmark = pytest.mark.slow


@pytest.fixture
def alone(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("index*")))


def test_embedder_and_vectors_are_written_once_there_is_an_index(
    alone: Path, farspan: Farspan, tmp_path: Path
):
    words = ("export", str(alone), "--format", "sentence-transformers")
    refused = farspan(*words)
    assert (
        refused.returncode == EXIT_CODES["no-index"] and f"farspan embed {alone}" in refused.stderr
    )
    assert not (alone / "sentence-transformers").exists()
    wrong = farspan("embed", str(alone), "--to", str(tmp_path / "out.csv"))
    assert wrong.returncode == EXIT_CODES["out-of-range"] and not (alone / "index").exists()

    done = farspan("embed", str(alone), "--no-eval", "--to", str(tmp_path / "out.jsonl"), "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)["manifest"]
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(lines) == manifest["chunks"]
    assert all(len(json.loads(line)["vector"]) == manifest["dim"] for line in lines)
    assert f"{manifest['dim']} numbers" in (tmp_path / "out.jsonl.load.md").read_text()

    done = farspan(*words)
    assert done.returncode == 0 and "SentenceTransformer(" in done.stdout, done.stderr
    files = list((alone / "sentence-transformers").iterdir())
    assert "modules.json" in {file.name for file in files}
    (tmp_path / "sibling").write_text("")
    assert len({stat.S_IMODE(file.stat().st_mode) for file in [tmp_path / "sibling", *files]}) == 1
    card = (alone / "sentence-transformers" / "README.md").read_text()
    assert (
        card.startswith("---\nlibrary_name: sentence-transformers\n")
        and f"| vectors | {manifest['dim']} n" in card
    )
    assert farspan(*words).returncode == EXIT_CODES["run-exists"]
