"""An index whose making was stopped, however that happened, goes on where it was and is the same in
the end."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from farspan.domain.problems import Refusal
from farspan.retrieval.index import OWN_VECTORS, Origin
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.search import search
from tests.retrieval import making
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

#: Bytes of a whole block: its digest, and 32 texts of four streams of 32 numbers.
BLOCK = 32 + 32 * 4 * 32 * 4


def finish(folder: Path) -> tuple[int, int]:
    """Texts that a process which is left alone embeds, and those that it finds."""
    process = making.start(folder)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    embedded, kept = map(int, out.splitlines()[-1].split())
    return embedded, kept


def features(folder: Path) -> list[Path]:
    return sorted(folder.with_name("index.building").rglob("*.features"))


def stop(folder: Path, texts: int, number: signal.Signals) -> None:
    """Start a making, and send it a signal before it embeds more than so many texts."""
    process = making.start(folder, halt=texts)
    making.await_line(process, making.HALTED)
    process.send_signal(number)
    # The thread that waits for a line computes its batch to the end: then Ctrl-C ends the process.
    process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0


def interrupt(folder: Path, texts: int) -> None:
    """A making in this process that is stopped when so many texts are embedded."""
    with pytest.raises(KeyboardInterrupt):
        making.make(folder, stop_after=texts)


def content(folder: Path) -> dict[str, bytes]:
    """All files of an index but its store's, which has random names and times in it."""
    files = (file for file in folder.rglob("*") if file.is_file() and "store" not in file.parts)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def vectors(folder: Path) -> list[list[tuple[int, float]]]:
    """What the store finds for some vectors: ids and scores."""
    index = making.opened(folder)
    queries = (
        np.random.default_rng(0)
        .normal(size=(5, index.manifest.sets[OWN_VECTORS].dim))
        .astype(np.float32)
    )
    found = [
        [*zip(*index.stores[OWN_VECTORS].search(query, 2000), strict=True)] for query in queries
    ]
    index.close()
    return found


def answers_by_words(folder: Path) -> None:
    """Fail unless an index without vectors, of a build that was stopped, answers and says why."""
    index = making.opened(folder)
    assert index.manifest.sets == {} and index.manifest.origin is None
    found = search(index, "port of a socket", 5)
    assert found.system == "bm25" and "socket" in found.results[0].title
    assert len(found.results) == 5
    index.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The index of a making that nothing disturbed, and the texts that it embedded."""
    folder = tmp_path_factory.mktemp("whole") / "index"
    embedded, kept = finish(folder)
    assert embedded > 600 and kept == 0
    return folder, embedded


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_build_embeds_only_what_is_missing(tmp_path: Path, whole, number: signal.Signals):
    folder = tmp_path / "index"
    every = whole[1]
    rng = random.Random(number)
    for _ in range(2):
        stop(folder, int(rng.uniform(0.1, 0.3) * every), number)
        answers_by_words(folder)
    blocks = [file.stat().st_size // BLOCK for file in features(folder)]
    embedded, kept = finish(folder)
    assert embedded + kept == every
    # The last block of each list of texts is a smaller one.
    assert 0 < 32 * sum(blocks) <= kept < 32 * (sum(blocks) + len(blocks))
    assert content(folder) == content(whole[0]) and vectors(folder) == vectors(whole[0])
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]


def test_damaged_or_incomplete_features_are_computed_again(tmp_path: Path, whole):
    folder = tmp_path / "index"
    rng = random.Random(1)
    interrupt(folder, 500)
    blocks = sum(file.stat().st_size // BLOCK for file in features(folder))
    for file in filter(lambda file: file.stat().st_size, features(folder)):
        damaged = bytearray(file.read_bytes())
        damaged[rng.randrange(len(damaged) // 2, len(damaged))] ^= 0xFF
        file.write_bytes(damaged[: -rng.randrange(1, BLOCK // 4)])
    _, kept = finish(folder)
    assert 0 < kept < 32 * blocks
    assert content(folder) == content(whole[0]) and vectors(folder) == vectors(whole[0])


def test_features_of_another_model_are_never_used(tmp_path: Path):
    folder = tmp_path / "index"
    interrupt(folder, 200)
    other = Origin(model="another", tokenizer="t")
    assert making.make(folder, seed=6, evaluate=False, origin=other)[0].kept == 0


def test_features_computed_for_an_evaluation_are_reused_without_one(tmp_path: Path):
    folder = tmp_path / "index"
    interrupt(folder, 100)
    assert making.make(folder, evaluate=False)[0].kept >= 100
    assert b'"evaluation": null' in content(folder)["index.json"]
    assert making.make(folder)[0].embedded > 0, "asked for, an evaluation is made"
    assert making.make(folder, evaluate=False)[0].embedded == 0, (
        "and is no reason to make the index again"
    )


def test_second_build_at_once_is_refused_and_the_old_index_answers(tmp_path: Path):
    folder = tmp_path / "index"
    making.make(folder, evaluate=False)
    before = vectors(folder)
    process = making.start(folder, halt=300)
    try:
        making.await_line(process, making.HALTED)
        assert vectors(folder) == before
        with pytest.raises(Refusal) as refusal:
            making.make(folder)
        assert refusal.value.problem.code == "run-busy"
    finally:
        process.kill()
        process.communicate()
    assert making.make(folder)[0].kept > 0
    assert vectors(folder) == before


def test_open_index_keeps_answering_after_another_replaces_it(tmp_path: Path):
    folder = tmp_path / "index"
    making.make(folder, evaluate=False)
    old = making.opened(folder)
    query = np.ones(old.manifest.sets[OWN_VECTORS].dim, np.float32)
    before = old.stores[OWN_VECTORS].search(query, 10).ids.tolist()
    making.make(folder)
    assert len([entry for entry in folder.iterdir() if entry.is_dir()]) == 1
    assert (
        old.stores[OWN_VECTORS].search(query, 10).ids.tolist() == before
        and old.lexical.bm25_scores(["socket"]).any()
    )
    old.close()


def test_searches_while_an_index_is_replaced_find_the_old_or_the_new(tmp_path: Path):
    """Opened again and again while one index takes the place of another: never a mixture, never a
    failure."""
    folder = tmp_path / "index"
    making.make(folder, evaluate=False)
    other = threading.Thread(target=making.make, args=(folder,))
    other.start()
    opened = 0
    while other.is_alive() or not opened:
        index = making.opened(folder)
        assert len(index.stores[OWN_VECTORS].ids()) == index.manifest.chunks
        index.close()
        opened += 1
    other.join()
    assert making.opened(folder).manifest.evaluation


def test_leftovers_of_killed_builds_are_removed_by_the_next(tmp_path: Path):
    for left in (
        "index.building/x",
        "index.building/lock",
        "index.building/store/x",
        "index/0123456789abcdef/store/x",
    ):
        (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / left).write_text("x")
    making.make(tmp_path / "index", evaluate=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]
    assert len(list((tmp_path / "index").iterdir())) == 2


def test_time_to_go_counts_work_found_on_disk_as_done_but_not_as_speed():
    now = [0.0]
    work = IndexWork(lambda: now[0])
    work.add_expected("embedding", 1000)
    work.start_kind("embedding")
    assert work.eta_s() is None
    for _ in range(4):
        work.add_done(100, kept=True)
    assert work.eta_s() is None and work.share == pytest.approx(0.4)
    for _ in range(2):
        now[0] += 5.0
        work.add_done(100)
    assert work.eta_s() == pytest.approx(400 * 5 / 100)


def test_features_need_no_folder():
    with IndexWork().features("x") as features:
        features.write(np.zeros(3, np.float32))
        assert features.read(3) is None
