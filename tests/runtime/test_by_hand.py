"""Workers that no launcher watches: whoever is left behind saves or says why, and ends by
itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from msgspec.structs import replace

from farspan.domain.plan import Mesh, Plan
from farspan.domain.problems import EXIT_CODES
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event, Finished, Saved, Step, read_events
from farspan.domain.struct_files import save
from farspan.domain.train import TrainSpec
from tests import tiny, waiting
from tests.ports import reserved_port
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

#: Without an end.
TRAIN = TrainSpec(steps=10**6, batch=6, seq_len=16, precision="fp32", validate_every=10**6, seed=3)
#: The exit code of a worker that has lost another one.
LOST = 24
#: Who says nothing for this long is lost.
SOON = "heartbeat.SILENCE_S, heartbeat.BEAT_S = 6.0, 0.5"
WORKER = """
import os, signal, sys
from farspan.runtime import worker
from farspan.runtime.comm import worker_group, heartbeat

{first}
sys.exit(worker.main())
"""


@contextmanager
def by_hand(run: RunFolder, world: int, first: str = "") -> Iterator[list[subprocess.Popen[bytes]]]:
    """The workers of a run, each of which does something `first`."""
    place = {"WORLD_SIZE": str(world), "FARSPAN_SECRET": "of these workers alone"}
    with reserved_port() as port:
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER.format(first=first), str(run.plan), str(run.path)],
                env={**os.environ, **place, "RANK": str(rank)},
            )
            for rank in range(world)
        ]
        try:
            yield workers
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def wait_for(run: RunFolder, kind: type[Event], after: int = -1) -> None:
    """Wait until the run has had an event of this kind, of a step after `after`."""

    def happened() -> bool:
        return run.events.exists() and any(
            isinstance(event, kind) and event.step > after for event in read_events(run.events)
        )

    waiting.wait_for(happened, f"an event {kind.__name__}")


def test_a_worker_whose_launcher_is_killed_saves_and_ends(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    launcher = (
        "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); "
        "sys.stdin.read()"
    )
    worker = [sys.executable, "-m", "farspan.runtime.worker", str(run.plan), str(run.path)]
    with subprocess.Popen(
        [sys.executable, "-c", launcher, *worker],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        pid = int(process.stdout.readline())
        wait_for(run, Step)
        process.kill()
    try:
        wait_for(run, Finished)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    *_, saved, finished = read_events(run.events)
    assert isinstance(finished, Finished) and finished.reason == "interrupted"
    assert isinstance(saved, Saved) and saved.step == finished.step < 10**6


def test_a_worker_that_stands_still_is_named_by_the_others(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    with by_hand(run, 2, SOON) as workers:
        wait_for(run, Step)
        workers[1].send_signal(signal.SIGSTOP)
        assert workers[0].wait(LIMIT_S) == LOST
        assert "rank 1" in named(run)
        *_, finished = read_events(run.events)
        assert isinstance(finished, Finished) and finished.reason == "failed"


def test_worker_that_hangs_before_the_first_step_is_named_by_the_others(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    stands_still = """
def build(*given, build=worker.build):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return build(*given)

worker.build = build
"""
    with by_hand(run, 2, SOON + stands_still) as workers:
        assert workers[0].wait(LIMIT_S) == LOST
        assert "rank 1" in named(run)
        assert list(read_events(run.events)) == []  # What has not started has no end.


def named(run: RunFolder, rank: int = 0) -> str:
    """Whom a worker has lost."""
    problem = json.loads((run.logs / f"rank-{rank}.problem.json").read_text())
    assert problem["code"] == "worker-lost"
    return problem["what"]


def test_rendezvous_with_a_missing_worker_fails_and_reports_how_many_came(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    with by_hand(
        run, 2, "worker_group.WORKER_START_S = 10.0\nif os.environ['RANK'] == '1': sys.exit(0)"
    ) as workers:
        assert workers[0].wait(LIMIT_S) == LOST
    problem = json.loads((run.logs / "rank-0.problem.json").read_text())
    assert problem["what"] == "the 2 workers did not meet" and "1/2" in problem["fact"]


def test_more_workers_than_the_plan_has_are_refused(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    with by_hand(run, 2) as workers:
        assert workers[0].wait(LIMIT_S) == EXIT_CODES["plan-mismatch"]
        assert workers[1].wait(LIMIT_S) != 0  # It may find rank 0 gone before it has read the plan.
    problem = json.loads((run.logs / "rank-0.problem.json").read_text())
    assert problem["what"] == "the plan is for 1 worker, not 2"


def test_a_plan_that_was_edited_into_one_that_cannot_be_is_refused(tmp_path):
    (whole,) = tiny.plan(TRAIN, rows=(6,)).replicas
    twice = (replace(whole, stages=(replace(whole.stages[0], rows=(3,)),)),) * 2
    apart = [
        replace(
            one,
            stages=(replace(one.stages[0], mesh=Mesh(ranks=(rank,), shape=(1,), axes=("data",))),),
        )
        for rank, one in enumerate(twice)
    ]
    run = tiny.run_folder(
        tmp_path / "run", replace(tiny.plan(TRAIN, rows=(3, 3)), replicas=tuple(apart))
    )
    with by_hand(run, 2) as workers:
        assert workers[0].wait(LIMIT_S) == EXIT_CODES["plan-mismatch"]
    assert "never meet" in json.loads((run.logs / "rank-0.problem.json").read_text())["fact"]


def test_tokens_that_one_worker_has_otherwise_are_refused(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    other = """
def fingerprint(tokens, fingerprint=worker.split_fingerprint):
    tokens = tokens.copy()
    tokens[len(tokens) // 2] ^= int(os.environ["RANK"])
    return fingerprint(tokens)

worker.split_fingerprint = fingerprint
"""
    with by_hand(run, 2, other) as workers:
        assert workers[0].wait(LIMIT_S) == EXIT_CODES["plan-mismatch"]
    problem = json.loads((run.logs / "rank-0.problem.json").read_text())
    assert problem["what"] == "the workers have unlike tokens" and problem["where"] == "rank 1"


def test_damaged_tokens_are_named_by_whichever_worker_reads_them_first(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    corpus = tmp_path / "corpus"
    save(tiny.corpus(corpus, verified=True), run.corpus)
    content = (corpus / "train.bin").read_bytes()
    (corpus / "train.bin").write_bytes(content[:2000] + bytes(4000))
    with by_hand(run, 2) as workers:
        codes = [worker.wait(LIMIT_S) for worker in workers]
    assert EXIT_CODES["corpus-damaged"] in codes
    rank = codes.index(EXIT_CODES["corpus-damaged"])
    problem = json.loads((run.logs / f"rank-{rank}.problem.json").read_text())
    assert problem["where"] == str(corpus / "train.bin")
    assert "the block at byte 0 " in problem["fact"]
    assert problem["remedy"] == f"farspan prepare {run.config}"


def divided(plan: Plan) -> Plan:
    """The same plan with everything divided over the data axis, which workers exchange in threads
    of their own."""
    (replica,) = plan.replicas
    stage = replace(replica.stages[0], zero=3)
    return replace(plan, replicas=(replace(replica, stages=(stage,)),))


@pytest.mark.parametrize("dead", [0, 1])
def test_when_one_dies_the_others_end_whatever_their_threads_wait_for(tmp_path, dead):
    """And all name it, though each of them breaks connections, too, when it goes."""
    run = tiny.run_folder(tmp_path / "run", divided(tiny.plan(TRAIN, rows=(2, 2, 2))))
    others = {0, 1, 2} - {dead}
    with by_hand(run, 3) as workers:
        wait_for(run, Step)
        workers[dead].kill()
        assert [workers[rank].wait(LIMIT_S) for rank in others] == [LOST, LOST]
    for rank in others:
        assert named(run, rank) == f"rank {dead} on here was lost"
