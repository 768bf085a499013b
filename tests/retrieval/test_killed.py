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

pytestmark = pytest.mark.slow

#: Moments at which a build is killed: `FARSPAN_KILLS=50` by hand.
KILLS = int(os.environ.get("FARSPAN_KILLS", "6"))
CHANGED = 60


def start(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.retrieval.making", str(folder), str(CHANGED)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An index that a build is to bring up to other documents, and the seconds from its first file
    to its end."""
    folder = tmp_path_factory.mktemp("before") / "index"
    making.make(folder, evaluate=False)
    trial = folder.parent / "trial" / "index"
    shutil.copytree(folder, trial)
    process = start(trial)
    began = wait_for(trial.with_name("index.building"), process)
    process.communicate(timeout=120)
    return folder, time.monotonic() - began


def wait_for(path: Path, process: subprocess.Popen[str]) -> float:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.0005)
    return time.monotonic()


def test_a_build_killed_at_any_moment_loses_nothing_and_is_gone_on_with(
    before: tuple[Path, float], tmp_path: Path
):
    source, seconds = before
    rng, old, new = random.Random(30), list(making.DOCUMENTS), making.changed(CHANGED)
    outcomes = set()
    for number in range(KILLS):
        folder = tmp_path / str(number) / "index"
        shutil.copytree(source, folder)
        process = start(folder)
        wait_for(folder.with_name("index.building"), process)
        # Evenly over the build, and a little beyond it.
        time.sleep((number + rng.random()) / KILLS * 1.1 * seconds)
        process.kill()
        process.communicate(timeout=60)
        index = making.opened(folder)
        kept = [document.key for document in index.passages.documents]
        committed = kept == [indexed_document(document).key for document in new]
        outcomes.add(committed)
        check(index, new if committed else old)
        index.close()
        work, _ = making.make(folder, evaluate=False, documents=new)
        assert work.embedded <= CHANGED * 4 and not folder.with_name("index.building").exists()
        index = making.opened(folder)
        check(index, new)
        index.close()
        shutil.rmtree(folder.parent)
    assert False in outcomes


READER = """
import sys, time
from pathlib import Path
import numpy as np
from tests.retrieval import making
folder, kinds, opened, deadline = Path(sys.argv[1]), set(), 0, time.monotonic() + 300
while len(kinds) < 2:
    assert time.monotonic() < deadline, "the new index never came"
    index = making.opened(folder)
    count = index.manifest.chunks
    assert index.store.count() == count == len(index.store.ids()), "a mixture"
    hits = index.store.search(np.array(index.passages.vectors_NE[opened % count]), 1)
    assert abs(hits[0].score - 1) < 1e-3
    assert index.lexical.scores("socket").any()
    kinds.add(index.manifest.files)
    index.close()
    opened += 1
    if opened == 1:
        print("reading", flush=True)
print(opened)
"""


def test_two_readers_during_a_write_find_one_index_or_the_other(
    before: tuple[Path, float], tmp_path: Path
):
    """Readers that open the index again and again, from before a write until they have seen the new
    one."""
    folder = tmp_path / "index"
    shutil.copytree(before[0], folder)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for reader in readers:
        assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
    writer = start(folder)
    out, err = writer.communicate(timeout=120)
    assert writer.returncode == 0, err
    for reader in readers:
        out, err = reader.communicate(timeout=120)
        assert reader.returncode == 0, err
        assert int(out) > 5
    assert making.opened(folder).manifest.documents == len(making.changed(CHANGED))
