"""Work shared by forks: everything once, in order, whatever becomes of them.

Each case runs in a process of its own, without the threads of a test runner, beside which nothing
is forked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from farspan.domain.train import TrainSpec
from farspan.planning import rank_plans as ranking
from farspan.planning.fork_map import fork_map
from farspan.planning.plan_question import model_of
from tests.planning.test_select_by_trials import ENGINE
from tests.planning.worlds import FAST, SLOW, cluster
from tests.waiting import wait_for


def each_item_once_and_answers_in_order() -> None:
    folder = Path(tempfile.mkdtemp())

    def work(item: int) -> tuple[int, int]:
        (folder / str(item)).open("x").close()  # No item is taken twice.
        (folder / f"process-{os.getpid()}").touch()
        # Every process gets an item: none goes on before all three have one.
        wait_for(lambda: len(list(folder.glob("process-*"))) == 3, "three processes at work")
        return item * item, os.getpid()

    found = fork_map(work, range(40), 3, tuple[int, int])
    assert [square for square, _ in found] == [item * item for item in range(40)]
    assert len({pid for _, pid in found}) == 3 and os.getpid() in {pid for _, pid in found}
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # Nobody is left to wait for.


def what_a_killed_fork_leaves_undone_is_done_here() -> None:
    here = os.getpid()

    def work(item: int) -> int:
        time.sleep(0.01)
        if os.getpid() != here and item > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert fork_map(work, range(30), 2, int) == list(range(30))


def an_error_is_this_processes_own() -> None:
    def work(item: int) -> int:
        if item == 7:
            raise ValueError("seven")
        return item

    with pytest.raises(ValueError, match="seven"):
        fork_map(work, range(10), 2, int)


def beside_other_threads_nothing_is_forked() -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert set(fork_map(lambda item: os.getpid(), range(8), 4, int)) == {os.getpid()}
    finally:
        done.set()
        other.join()


def a_ranking_is_the_same_from_one_process_and_from_several() -> None:
    here = cluster((FAST, FAST), (SLOW, SLOW), (FAST, SLOW), rtt_s=0.01)
    train = TrainSpec(steps=100, batch=16, seq_len=1024, precision="fp16")

    def ranked(many: int) -> ranking.Ranking:
        with patch.object(ranking, "MANY", many), patch.object(ranking, "count_cores", lambda: 3):
            return ranking.rank_plans(model_of("gpt2"), here, train, ENGINE)

    assert ranked(1) == ranked(1000)


CASES = (
    each_item_once_and_answers_in_order,
    what_a_killed_fork_leaves_undone_is_done_here,
    an_error_is_this_processes_own,
    beside_other_threads_nothing_is_forked,
    a_ranking_is_the_same_from_one_process_and_from_several,
)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_in_a_process_of_its_own(case: str) -> None:
    words = [sys.executable, "-m", "tests.planning.test_fork_map", case]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    globals()[sys.argv[1]]()


def test_fork_map_results_have_one_type_whichever_process_computed_them():
    """A whole number in a field of fractions is a fraction in every process."""
    for processes in (1, 2):
        assert {
            type(made) for made in fork_map(lambda item: item, [1, 2, 3], processes, float)
        } == {float}
