"""An index folder that is damaged, or was made to do harm: refused with a code, and nothing outside
it is read."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from farspan.domain.problems import Refusal
from farspan.retrieval.search import search
from tests.retrieval import making

#: Files whose damage a search must notice or survive. The store's own are its library's.
FILES = (
    "documents.jsonl",
    "chunks.jsonl",
    "rows.npy",
    "fitted.safetensors",
    "covariance-own.npy",
    "words.json",
    "starts.npy",
    "documents.npy",
    "scores.npy",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "index"
    making.make(folder, evaluate=False)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "index"))


def asked(folder: Path) -> str | None:
    """The code with which a search is refused; None for an answer."""
    try:
        index = making.opened(folder)
        try:
            for system in ("bm25", "model", "fused"):
                search(index, "socket port", 20, system)
        finally:
            index.close()
    except Refusal as refusal:
        return refusal.problem.code
    return None


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused_with_a_code(folder: Path, name: str):
    file = next(folder.rglob(name))
    rng = random.Random(name)
    content = file.read_bytes()
    for damage in range(12):
        changed = bytearray(content)
        match damage % 4:
            case 0:
                changed = changed[: rng.randrange(len(changed))]
            case 1:
                changed = bytearray()
            case 2:
                for _ in range(8):
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
            case 3:
                start = rng.randrange(min(200, len(changed)))
                changed[start : start + 9] = b"999999999"
        file.write_bytes(changed)
        assert asked(folder) in (None, "no-index"), damage
    file.unlink()
    assert asked(folder) == "no-index"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", "../../../../etc"),
        ("files", "/etc"),
        ("files", ""),
        ("chunks", 10**12),
        ("chunks", -1),
        ("documents", 10**12),
        ("sets", {}),
        ("sets", {"own": {"dim": 0, "store": "qdrant", "table": ""}}),
        ("sets", {"own": {"dim": 4, "store": "os:system", "table": ""}}),
        ("sets", {"../own": {"dim": 4, "store": "qdrant", "table": ""}}),
        ("sets", {"own": {"dim": 4, "store": "qdrant", "table": 'x"; DROP TABLE a; --'}}),
        ("sets", {"encoder": {"dim": 4, "store": "qdrant", "table": ""}}),
        ("metric", "magic"),
        ("fields", 7),
    ],
)
def test_a_crafted_manifest_is_refused(folder: Path, key: str, value: object):
    manifest = json.loads((folder / "index.json").read_bytes())
    (folder / "index.json").write_text(json.dumps(manifest | {key: value}))
    assert asked(folder) in ("no-index", "out-of-range")


def test_an_array_of_objects_is_not_unpickled(folder: Path):
    np.save(next(folder.rglob("rows.npy")), np.array([{"a": 1}], object), allow_pickle=True)
    assert asked(folder) == "no-index"


def test_a_damaged_index_is_made_again(folder: Path):
    (folder / "index.json").write_text("{")
    assert asked(folder) == "no-index"
    making.make(folder, evaluate=False)
    assert asked(folder) is None
