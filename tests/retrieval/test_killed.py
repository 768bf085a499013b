"""Builds killed at random moments: what was committed answers, and the next build goes on to the
same index."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farspan.retrieval.passages import indexed_document
from tests.retrieval import making
from tests.retrieval.test_following import check
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

#: Moments at which a build is killed: `FARSPAN_KILLS=50` by hand.
KILLS = int(os.environ.get("FARSPAN_KILLS", "6"))
CHANGED = 60
#: Texts that a build has embedded when it is halted: not all of those that it has to.
HALF = 64
#: How often a reader opens the index while a build is in the middle of it.
OPENINGS = 5


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An index that a build is to bring up to other documents, and the seconds from its beginning
    to its end."""
    folder = tmp_path_factory.mktemp("before") / "index"
    making.make(folder, evaluate=False)
    trial = folder.parent / "trial" / "index"
    shutil.copytree(folder, trial)
    process = making.start(trial, change=CHANGED)
    making.await_line(process, making.BEGUN)
    began = time.monotonic()
    process.communicate(timeout=LIMIT_S)
    return folder, time.monotonic() - began


def test_build_killed_at_any_moment_loses_nothing_and_continues(
    before: tuple[Path, float], tmp_path: Path
):
    source, seconds = before
    rng = random.Random(30)
    old = list(making.DOCUMENTS)
    new = making.changed(CHANGED)
    for number in range(KILLS):
        folder = tmp_path / str(number) / "index"
        shutil.copytree(source, folder)
        halts = number == 0
        process = making.start(folder, change=CHANGED, halt=HALF if halts else None)
        making.await_line(process, making.HALTED if halts else making.BEGUN)
        if not halts:  # Evenly over the build, and a little beyond it.
            time.sleep((number + rng.random()) / KILLS * 1.1 * seconds)
        process.kill()
        process.wait(LIMIT_S)
        process.communicate()
        index = making.opened(folder)
        kept = [document.key for document in index.passages.documents]
        committed = kept == [indexed_document(document).key for document in new]
        assert not (halts and committed)
        check(index, new if committed else old)
        index.close()
        work, _ = making.make(folder, evaluate=False, documents=new)
        assert work.embedded <= CHANGED * 4 and not folder.with_name("index.building").exists()
        index = making.opened(folder)
        check(index, new)
        index.close()
        shutil.rmtree(folder.parent)


READER = """
import sys
from pathlib import Path
import numpy as np
from tests.retrieval import making
folder, halted, openings = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
kinds, opened, during = set(), 0, 0
while len(kinds) < 2:
    during += halted.exists()
    index = making.opened(folder)
    count = index.manifest.chunks
    assert count == len(index.stores["own"].ids()), "a mixture"
    (vector,) = index.vectors(np.array([opened % count]), "own")
    assert abs(index.stores["own"].search(vector, 1).scores[0] - 1) < 1e-3
    assert index.lexical.bm25_scores(["socket"]).any()
    kinds.add(index.manifest.files)
    index.close()
    opened += 1
    if opened == 1:
        print("reading", flush=True)
    if during == openings:
        print("read during the write", flush=True)
"""


def test_readers_during_a_write_find_the_old_or_the_new_index(
    before: tuple[Path, float], tmp_path: Path
):
    """Readers that open the index again and again, from before a write until they have seen the new
    one."""
    folder = tmp_path / "index"
    halted = tmp_path / "halted"
    shutil.copytree(before[0], folder)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(folder), str(halted), str(OPENINGS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for reader in readers:
        making.await_line(reader, "reading")
    writer = making.start(folder, change=CHANGED, halt=HALF)
    making.await_line(writer, making.HALTED)
    halted.touch()
    for reader in readers:
        making.await_line(reader, "read during the write")
    _, err = writer.communicate(timeout=LIMIT_S)
    assert writer.returncode == 0, err
    for reader in readers:
        _, err = reader.communicate(timeout=LIMIT_S)
        assert reader.returncode == 0, err
    assert making.opened(folder).manifest.documents == len(making.changed(CHANGED))
