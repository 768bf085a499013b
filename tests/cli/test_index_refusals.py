"""What an index does not belong to, or cannot answer, is said with the command that mends it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from farspan.app.indexing import MAX_QUERY_CHARS
from farspan.domain.problems import EXIT_CODES
from tests.cli.conftest import Farspan
from tests.examples import slow_after


@pytest.fixture(scope="module")
def searched(run: Path, tmp_path_factory: pytest.TempPathFactory, farspan: Farspan) -> Path:
    """A run with an index that no test changes."""
    folder = tmp_path_factory.mktemp("searched") / "run"
    path = Path(shutil.copytree(run, folder, ignore=shutil.ignore_patterns("index*")))
    done = farspan("embed", str(path), "--no-eval")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def indexed(run: Path, tmp_path: Path, here: Farspan) -> Path:
    path = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("index*")))
    done = here("embed", str(path), "--no-eval")
    assert done.returncode == 0, done.stderr
    return path


def refused(done, code: str) -> str:
    assert done.returncode == EXIT_CODES[code], done.stderr
    return done.stderr


@pytest.mark.parametrize("what", slow_after(1, ["model", "tokenizer"]))
def test_an_index_of_another_model_is_refused_and_made_again(
    indexed: Path, here: Farspan, what: str
):
    manifest = json.loads((indexed / "index/index.json").read_bytes())
    manifest["origin"][what] = "0123456789abcdef"
    (indexed / "index/index.json").write_text(json.dumps(manifest))
    message = refused(
        here("search", "time", "--run", str(indexed), "--system", "model"), "no-index"
    )
    assert f"another {what}" in message and f"farspan embed {indexed}" in message
    assert here("search", "time", "--run", str(indexed), "--system", "bm25").returncode == 0, (
        "words need no model"
    )
    assert here("embed", str(indexed), "--no-eval").returncode == 0
    assert here("search", "time", "--run", str(indexed), "--system", "model").returncode == 0


def test_a_missing_store_is_refused(indexed: Path, here: Farspan):
    shutil.rmtree(next((indexed / "index").rglob("own")))
    message = refused(
        here("search", "time", "--run", str(indexed), "--system", "model"), "no-index"
    )
    assert "fix:   farspan embed" in message


def test_embed_without_the_tokenizer_of_its_run_names_another_copy(indexed: Path, here: Farspan):
    (indexed / "tokenizer.json").unlink()
    message = refused(here("embed", str(indexed)), "path-missing")
    fix = message.split("fix:")[1].split("(from")[0].split()
    assert fix[0] == "cp"
    shutil.copy(fix[1], fix[2])
    assert here("embed", str(indexed), "--no-eval").returncode == 0


def test_search_warns_that_the_text_changed_until_it_is_embedded(
    indexed: Path, here: Farspan, desk: Path
):
    new = desk / "docs" / "zz.txt"
    try:
        new.write_text(
            "Quokkas live on an island.\n\nThey eat leaves, and sleep in the shade of a school."
        )
        done = here("search", "quokkas island", "--run", str(indexed))
        assert "the text has changed" in done.stdout and f"farspan embed {indexed}" in done.stdout
        done = here("embed", str(indexed), "--no-eval")
        assert done.returncode == 0 and "1 document new or changed, 0 gone" in done.stdout
        found = here("search", "quokkas island", "--run", str(indexed))
        assert "zz.txt:1" in found.stdout and "has changed" not in found.stdout
    finally:
        new.unlink()


@pytest.mark.parametrize("query", ["", "  \n", "x" * (MAX_QUERY_CHARS + 1), "time " * 25_000])
def test_queries_that_ask_nothing_or_everything_are_refused(
    searched: Path, here: Farspan, query: str
):
    refused(here("search", query, "--run", str(searched)), "usage")


@pytest.mark.parametrize(
    "query",
    ["🙂 🍵", "שלום עולם", "a'; DROP TABLE chunks; --", '{"$ne": 1}', "\\ % _ *", "time" * 400],
)
@pytest.mark.parametrize("system", ["bm25", "fused"])
def test_odd_queries_and_filters_are_only_words(
    searched: Path, here: Farspan, query: str, system: str
):
    done = here(
        "search",
        query,
        "--run",
        str(searched),
        "--system",
        system,
        "--where",
        f"title={query}",
        "--json",
    )
    assert done.returncode == 0 and json.loads(done.stdout)["answer"]["results"] == []
    assert here("search", query, "--run", str(searched), "--system", system).returncode == 0
