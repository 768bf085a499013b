"""Every store through the command line: embed, search, filter, follow changed text. Its answers are
those of the default store."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from farspan.cli.main import main
from farspan.domain.install import install_command
from farspan.domain.problems import EXIT_CODES, Refusal
from farspan.domain.run import RunFolder
from farspan.retrieval import stores
from farspan.retrieval.index import OWN_VECTORS, IndexManifest, passages_of, read_manifest
from tests.cli.conftest import TINY, WORDS
from tests.examples import slow_but
from tests.retrieval import servers
from tests.retrieval.test_stores import FUNCTIONS, KINDS, QUICK, name_function, plant_library
from tests.waiting import LIMIT_S

RUN = "runs/docs"
REPLACED = "wombat"
REMOVED = "numbat"
ADDED = "quokka"
#: More than there are documents: a search shows every one that it finds.
ALL = 100
VECTORS = ("the time of a school", "--system", "model")
SEARCHES = {
    "by vectors": VECTORS,
    "by vectors and words": ("what sleeps in this world", "--system", "fused"),
    "in one team": (*VECTORS, "--where", "team=red"),
    "in one document": (*VECTORS, "--where", "team=blue", "--where", "title=note 4"),
    "in no document": (*VECTORS, "--where", "team=red", "--where", "title=note 4"),
    "for the new text": (f"the {ADDED} of this world", "--system", "model"),
    "as measured": ("people", "--where", "team=blue"),
}
Answers = dict[str, list[dict[str, Any]]]


def run_command(desk: Path, *words: str) -> dict[str, Any]:
    """Run a command in this process, from the folder `desk`; the JSON object that it prints."""
    printed = io.StringIO()
    messages = io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        patch.setenv("FARSPAN_CACHE", str(desk / "cache"))
        try:
            with redirect_stdout(printed), redirect_stderr(messages):
                code = main([*words, "--json"])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert code == 0, messages.getvalue()
    return json.loads(printed.getvalue())


def write_notes(desk: Path, texts: dict[int, str]) -> None:
    """One row for each note in `docs/notes.jsonl`, even ones of team blue, odd ones of team red."""
    rows = [
        {"title": f"note {number}", "team": "red" if number % 2 else "blue", "text": text}
        for number, text in texts.items()
    ]
    (desk / "docs/notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_texts() -> dict[int, str]:
    """The text of each note, by its number."""
    rng = random.Random(0)
    texts = {}
    for number in range(40):
        lines = [" ".join(rng.choices(WORDS, k=12)) for _ in range(4)]
        texts[number] = "\n".join([f"{WORDS[number % 12]} number {number}.", "", *lines])
    texts[1] += f"\nThe {REPLACED} sleeps."
    texts[2] += f"\nThe {REMOVED} sleeps."
    return texts


def changed_texts() -> dict[int, str]:
    """The texts with note 1 in other words, without note 2, and with a new note 40."""
    texts = first_texts()
    texts[1] = texts[1].replace(REPLACED, ADDED)
    del texts[2]
    texts[40] = f"the {ADDED} of this world"
    return texts


def search_all(desk: Path) -> Answers:
    return {
        name: run_command(desk, "search", *words, "--run", RUN, "-k", str(ALL))["answer"]["results"]
        for name, words in SEARCHES.items()
    }


def manifest_of(desk: Path) -> IndexManifest:
    return read_manifest(RunFolder(desk / RUN).index, "farspan embed")


def ids_in_store(desk: Path) -> list[int]:
    manifest = manifest_of(desk)
    index = RunFolder(desk / RUN).index
    with closing(
        manifest.sets[OWN_VECTORS].module.open(manifest.place(index, OWN_VECTORS))
    ) as store:
        return [int(number) for number in store.ids()]


def ids_of_passages(desk: Path) -> list[int]:
    index = RunFolder(desk / RUN).index
    return sorted(int(number) for number in passages_of(index, manifest_of(desk)).rows_N["id"])


def passages_in(answers: Answers) -> str:
    """All passages that a search of `answers` shows, one after the other."""
    return "\n".join(found["passage"] for results in answers.values() for found in results)


def embed_and_search_twice(desk: Path, *store: str) -> tuple[Answers, Answers]:
    """Answers of an index that is new, and of the same one after it has followed changed text."""
    embedded = run_command(desk, "embed", RUN, "--no-eval", *store)
    assert ids_in_store(desk) == ids_of_passages(desk)
    first = search_all(desk)
    write_notes(desk, changed_texts())
    followed = run_command(desk, "embed", RUN, "--no-eval", *store)
    assert 0 < followed["embedded"] < embedded["manifest"]["chunks"] / 4, "only what is new"
    assert ids_in_store(desk) == ids_of_passages(desk)
    return first, search_all(desk)


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills in the first process of this run of tests that asks for it."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            making = folder.with_suffix(".making")
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            make(making)
            making.rename(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text in `docs`, a cache and a finished run, which no test changes."""

    def train(desk: Path) -> None:
        (desk / "docs").mkdir()
        write_notes(desk, first_texts())
        (desk / "run.yaml").write_text(TINY)
        run_command(desk, "train", "run.yaml")

    return make_once(tmp_path_factory, "run-for-stores", train)


@pytest.fixture(scope="module")
def default_answers(
    trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Answers, Answers]:
    def search_default_store(folder: Path) -> None:
        answers = embed_and_search_twice(shutil.copytree(trained, folder / "desk"))
        (folder / "answers.json").write_text(json.dumps(answers))

    folder = make_once(tmp_path_factory, "default-store", search_default_store)
    first, followed = json.loads((folder / "answers.json").read_text())
    return first, followed


# Of the module, and named first by the test: what is skipped trains no run.
@pytest.fixture(scope="module", params=slow_but(QUICK, KINDS))
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `--store` is given; a server that it names runs until its tests end."""
    name, modules, server = KINDS[request.param]
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        pytest.skip(f"waits for the library {absent[0]}: make stores")
    if server is None:
        yield name
        return
    with pytest.MonkeyPatch.context() as environment, server() as location:
        environment.setenv("PGPASSWORD", servers.PASSWORD)
        yield f"{name}:{location}"


def check_same(answers: Answers, expected: Answers) -> None:
    """Fail on other passages, another order, or scores that differ by more than 1e-4."""
    for name, results in expected.items():
        assert [found["id"] for found in answers[name]] == [found["id"] for found in results], name
        for score in ("score", "word_score", "vector_score"):
            found, wanted = ([each[score] for each in some] for some in (answers[name], results))
            assert found == pytest.approx(wanted, abs=1e-4), (name, score)


def check_filters(answers: Answers) -> None:
    teams = {found["metadata"]["team"] for found in answers["in one team"]}
    assert teams == {"red"} and len(answers["in one team"]) > 10
    assert [found["title"] for found in answers["in one document"]] == ["note 4"]
    assert answers["in no document"] == []
    assert {found["metadata"]["team"] for found in answers["as measured"]} == {"blue"}


def test_store_embeds_follows_and_filters_like_the_default_store(
    store: str, trained: Path, default_answers: tuple[Answers, Answers], tmp_path: Path
):
    desk = shutil.copytree(trained, tmp_path / "desk")
    first, followed = embed_and_search_twice(desk, "--store", store)
    manifest = manifest_of(desk)
    assert manifest.recipe.store == store
    assert manifest.place(desk, OWN_VECTORS).name, "chroma needs one in a folder too"
    for answers in (first, followed):
        check_filters(answers)
    assert REPLACED in passages_in(first) and REMOVED in passages_in(first)
    assert ADDED not in passages_in(first)
    assert REPLACED not in passages_in(followed) and REMOVED not in passages_in(followed)
    titles = {found["title"] for found in followed["for the new text"]}
    assert "note 40" in titles and "note 2" not in titles
    check_same(first, default_answers[0])
    check_same(followed, default_answers[1])


@pytest.mark.slow
def test_embed_refuses_a_chroma_collection_that_names_a_function_and_runs_none(
    trained: Path, tmp_path: Path
):
    pytest.importorskip("chromadb", reason="waits for the library chromadb: make stores")
    desk = shutil.copytree(trained, tmp_path / "desk")
    built = tmp_path / "built"
    run_command(desk, "embed", RUN, "--no-eval", "--store", "chroma")
    old = manifest_of(desk).place(RunFolder(desk / RUN).index, OWN_VECTORS).folder
    name_function(old / "chroma.sqlite3", FUNCTIONS["vectors"])
    # One more note at the end: the index that follows copies the store and adds to it.
    write_notes(desk, {**first_texts(), 40: f"the {ADDED} of this world"})
    library = plant_library(tmp_path / "library", built)
    path = os.pathsep.join([str(library), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "farspan", "embed", RUN, "--no-eval", "--store", "chroma"],
        cwd=desk,
        env={**os.environ, "FARSPAN_CACHE": str(desk / "cache"), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == EXIT_CODES["store-foreign"], done.stdout + done.stderr
    assert not built.exists()
    # The fix mends it.
    (fix,) = re.findall("fix: +(mv .*)", done.stderr)
    subprocess.run(shlex.split(fix), cwd=desk, check=True)
    run_command(desk, "embed", RUN, "--no-eval", "--store", "chroma")
    assert ids_in_store(desk) == ids_of_passages(desk)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "chroma-server"])
def test_store_without_its_library_names_an_extra_that_pip_finds(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    name, modules, _ = KINDS[kind]
    monkeypatch.delitem(sys.modules, f"{stores.__name__}.{name}", raising=False)
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Refusal) as refusal:
        stores.load(name)
    problem = refusal.value.problem
    assert problem.code == "extra-missing"
    extras = importlib.metadata.metadata("farspan").get_all("Provides-Extra") or []
    assert problem.remedy in map(install_command, extras)
