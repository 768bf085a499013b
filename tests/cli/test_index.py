"""`farspan index FOLDER` as a person meets it: searchable without training, and without PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farspan.domain.problems import EXIT_CODES
from tests.cli.conftest import Farspan

#: Runs a command where PyTorch and what needs it cannot be imported.
WITHOUT_TORCH = """
import sys
from importlib.abc import MetaPathFinder
class Forbidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "sentence_transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Forbidden())
"""
COMMAND = f"""{WITHOUT_TORCH}
from farspan.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
LIMIT_S = 300


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Notes about animals, one file each, with headings and a question."""
    folder = tmp_path / "docs"
    folder.mkdir()
    animals = ["wombat", "numbat", "quokka", "echidna", "bilby", "possum", "koala", "dingo"]
    for number, animal in enumerate(animals):
        filler = f"The {animal} sleeps through most of the day, and looks for food at night. " * 9
        (folder / f"{animal}.md").write_text(
            f"# {animal.title()}\n\nEverything about the {animal} in one place.\n\n"
            f"## Habits\n\n{filler}\n\n## What does the {animal} eat?\n\n"
            f"It likes fruit number {number}, and digs for roots with its claws.\n"
        )
    return folder


@pytest.fixture
def command(tmp_path: Path, docs: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs farspan where no module of PyTorch can be imported."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", COMMAND, *words],
            cwd=tmp_path,
            env={**os.environ, "FARSPAN_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    return call


def answer_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_folder_is_indexed_and_searched_without_torch(command, tmp_path: Path, docs: Path):
    made = command("index", "docs", "--encoder", "own")
    assert made.returncode == 0, made.stderr
    assert "indexing 8 documents" in made.stdout
    assert "index: indexes/docs; next: farspan search ... indexes/docs" in made.stdout
    found = answer_of(command("search", "which animals dig for a root", "indexes/docs", "--json"))
    answer = found["answer"]
    assert found["run"] == "indexes/docs" and answer["system"] == "bm25"
    assert len(answer["results"]) == 5
    first = answer["results"][0]
    # Words are found by their stems, and marked where they stand.
    marked = [first["passage"][start:stop] for start, stop in first["marks"]]
    assert {"digs", "roots"} <= {*marked}
    assert "digs for roots" in first["text"] and len(first["text"]) < 310
    assert first["headings"][-1].startswith("What does the") and first["line"] > 1
    shown = command("search", "what does the quokka eat", "indexes/docs")
    assert shown.returncode == 0 and "quokka.md" in shown.stdout.splitlines()[1] + shown.stdout
    assert "fruit number 2" in shown.stdout
    refused = command("search", "quokka", "indexes/docs", "--system", "encoder")
    assert refused.returncode == EXIT_CODES["usage"]
    assert "its sets of vectors: none" in refused.stderr
    assert "search without --system" in refused.stderr


def test_words_answer_before_anything_is_measured(here: Farspan, docs: Path, tmp_path: Path):
    done = here("index", "docs", "--encoder", "own", cwd=tmp_path)
    lines = done.stdout.splitlines()
    said = lines.index("searches by words answer already; how well they find is measured now")
    assert any(line.startswith("candidates: 8 documents") for line in lines[said:])
    assert sum(line.startswith("indexing 8 documents") for line in lines) == 1
    unmeasured = here("index", "docs", "--encoder", "own", "--no-eval", "--into", "b", cwd=tmp_path)
    assert "answer already" not in unmeasured.stdout


#: What a search does without: their imports take longer than all that it does.
SLOW_IMPORTS = {"torch", "scipy", "bm25s", "urllib.request", "farspan.app.clusters"}


def test_a_search_by_words_imports_nothing_slow(here: Farspan, docs: Path, tmp_path: Path):
    assert here("index", "docs", "--encoder", "own", "--no-eval", cwd=tmp_path).returncode == 0
    words = ["search", "where does the quokka live", "indexes/docs"]
    code = f"import sys; from farspan.cli.main import main; main({words!r}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    *shown, modules = done.stdout.splitlines()
    assert "quokka" in "".join(shown).lower()
    assert SLOW_IMPORTS.isdisjoint(modules.split())


def test_index_is_followed_and_left_by_the_same_command(command, docs: Path):
    first = answer_of(command("index", "docs", "--encoder", "own", "--json"))
    assert first["index"] == "indexes/docs" and first["manifest"]["documents"] == 8
    assert first["manifest"]["sets"] == {} and first["embedded"] == 0
    again = command("index", "docs", "--json")
    assert answer_of(again)["manifest"] == first["manifest"], "the choice of --encoder is kept"
    (docs / "thylacine.md").write_text("# Thylacine\n\nIt is gone.\n")
    (docs / "dingo.md").unlink()
    (docs / "bilby.md").write_text("# Bilby\n\nIt has long ears.\n")
    stale = command("search", "long ears", "indexes/docs")
    assert "farspan index indexes/docs" in stale.stdout
    followed = command("index", "indexes/docs")
    assert followed.returncode == 0, followed.stderr
    assert "2 documents new or changed, 2 gone" in followed.stdout
    titles = {}
    for query in ("thylacine", "dingo", "long ears"):
        found = answer_of(command("search", query, "indexes/docs", "--json"))
        titles[query] = [Path(result["origin"]).name for result in found["answer"]["results"]]
    assert titles["thylacine"][:1] == ["thylacine.md"] and titles["long ears"][0] == "bilby.md"
    assert titles["dingo"] == []


@pytest.mark.parametrize("name", ["search", "build", "index_task", "evaluate", "choose"])
def test_searches_and_builds_import_no_torch(name: str):
    code = f"{WITHOUT_TORCH}\nimport farspan.retrieval.{name}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)
    code = f"import sys, farspan.retrieval.{name}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert done.stdout == "False\n"


def test_search_without_a_name_takes_the_newest_index(here: Farspan, docs: Path, tmp_path: Path):
    nothing = here("search", "quokka", cwd=tmp_path)
    assert nothing.returncode == EXIT_CODES["not-a-run"]
    write_other(tmp_path / "other")
    for folder in ("docs", "other"):
        done = here("index", folder, "--encoder", "own", "--no-eval", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for folder, query in (("docs", "quokka"), ("other", "zebra")):
        newest = tmp_path / f"indexes/{folder}/index/index.json"
        os.utime(newest, (2e9, 2e9))
        done = here("search", query, cwd=tmp_path)
        assert done.returncode == 0 and f"index: indexes/{folder}" in done.stdout
        assert query in done.stdout.partition("\n")[2].lower()
        os.utime(newest, (1e9, 1e9))


def test_newest_of_runs_and_indexes_is_searched(
    here: Farspan, run: Path, docs: Path, tmp_path: Path
):
    import shutil

    shutil.copytree(run, tmp_path / "runs/docs", ignore=shutil.ignore_patterns("index*"))
    assert here("embed", "runs/docs", "--no-eval", cwd=tmp_path).returncode == 0
    assert here("index", "docs", "--encoder", "own", "--no-eval", cwd=tmp_path).returncode == 0
    os.utime(tmp_path / "runs/docs/index/index.json", (1e9, 1e9))
    assert "index: indexes/docs" in here("search", "quokka", cwd=tmp_path).stdout
    os.utime(tmp_path / "runs/docs/index/index.json", (2e9, 2e9))
    assert "index: runs/docs" in here("search", "time", cwd=tmp_path).stdout
    # By its name, either is.
    assert "quokka.md" in here("search", "quokka", "indexes/docs", cwd=tmp_path).stdout


def write_other(folder: Path) -> None:
    folder.mkdir()
    (folder / "zebra.txt").write_text("The zebra has stripes.\n\nThey are black and white.")


def test_an_index_that_is_not_there_is_refused(here: Farspan, docs: Path, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/index.yaml").write_text(f"data: {docs}\n")
    done = here("search", "quokka", "mine", cwd=tmp_path)
    assert done.returncode == EXIT_CODES["no-index"] and "farspan index mine" in done.stderr
    absent = here("search", "quokka", "indexes/none", cwd=tmp_path)
    assert absent.returncode == EXIT_CODES["not-a-run"]


def test_vectors_of_an_index_without_any_are_not_written(here: Farspan, docs: Path, tmp_path: Path):
    done = here("index", "docs", "--encoder", "own", "--no-eval", "--to", "v.jsonl", cwd=tmp_path)
    assert done.returncode == EXIT_CODES["no-index"], done.stderr
    assert not (tmp_path / "v.jsonl").exists()
    other = here("index", "docs", "--to", "v.csv", cwd=tmp_path)
    assert other.returncode == EXIT_CODES["out-of-range"]


def test_index_refits_by_queries_of_ones_own(here: Farspan, docs: Path, tmp_path: Path):
    assert here("index", "docs", "--encoder", "own", cwd=tmp_path).returncode == 0
    animals = sorted(path.stem for path in docs.iterdir())
    queries = tmp_path / "queries.jsonl"
    qrels = tmp_path / "qrels.tsv"
    lines = [{"_id": animal, "text": f"roots for the {animal}"} for animal in animals]
    queries.write_text("".join(json.dumps(line) + "\n" for line in lines))
    qrels.write_text("".join(f"{animal}\t{docs / animal}.md\t1\n" for animal in animals))
    words = ("index", "indexes/docs", "--refit", "--queries", str(queries), "--qrels", str(qrels))
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 own queries" in done.stdout and "default: keyword search (BM25)" in done.stdout
    lonely = here("index", "indexes/docs", "--refit", "--queries", str(queries), cwd=tmp_path)
    assert lonely.returncode == EXIT_CODES["usage"] and "come together" in lonely.stderr
    shown = here("search", "--eval", "indexes/docs", cwd=tmp_path)
    assert shown.returncode == 0 and "4 own queries" in shown.stdout
