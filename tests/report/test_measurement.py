"""Measurements against hand calculation."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from farspan.domain.cost import Measurement
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Finished, Saved, Validated, Warned
from farspan.report import measurement as measuring
from farspan.report.history import SLOW_START_STEPS, follow_events, is_complete, open_run
from tests.report.fake_run import (
    ESTIMATE,
    make_plan,
    one_step,
    resumed_run,
    started,
    train_events,
    write_run,
)


def measure(folder: Path) -> Measurement | None:
    return measuring.measure_run(open_run(folder))


def validated(step: int, loss: float, at: float = 0.0) -> Validated:
    return Validated(
        at=at, step=step, loss=loss, bits_per_byte=loss / 2, tokens=1000, seconds=0.1, best=False
    )


def test_figures_of_a_run_with_one_start_equal_those_computed_by_hand(tmp_path):
    plan = make_plan(20)
    events = [started(100.0, plan=plan, peak_flops=4e12)]
    # Ten slow steps would be the median without the warm-up rule: 5 x 9 s, then 2, 1, 2, 4, 2 s.
    for number, step_s in enumerate([9, 9, 9, 9, 9, 2, 1, 2, 4, 2], 1):
        events.append(one_step(100.0 + 10 * number, number, step_s=step_s, loss=float(number)))
    events += [
        validated(5, 3.0),
        validated(10, 3.5),
        Finished(at=230.0, step=10, reason="deadline", seconds=130.0),
    ]
    measured = measure(write_run(tmp_path / "run", events, plan))

    # 6 N + 12 L d T by hand: N = 6 (4 d^2 + 2 d f) + V d, d = 384, f = 1536, V = 8192, L = 6, T =
    # 256.
    weights = 6 * (4 * 384**2 + 2 * 384 * 1536) + 8192 * 384
    flops_per_token = 6 * weights + 12 * 6 * 384 * 256
    assert measured.step_s == 2.0
    assert measured.tokens_per_s == 1024.0
    assert measured.tflops_per_device == pytest.approx(flops_per_token * 1024 / 1e12)
    assert measured.mfu == pytest.approx(flops_per_token * 1024 / 4e12)
    assert measured.run_s == 130.0
    assert measured.usd == pytest.approx(0.026 / 130.0 * 130.0)
    assert (measured.steps, measured.tokens, measured.memory_bytes) == (10, 20_480, 10**9 + 10)
    assert measured.train_loss == 5.5
    assert (measured.val_loss, measured.best_val_loss, measured.bits_per_byte) == (3.5, 3.0, 1.75)
    assert measured.perplexity == pytest.approx(math.exp(3.5))
    assert measured.reason == "deadline"


def test_steps_after_the_checkpoint_are_counted_once_and_all_time_counts(tmp_path):
    plan = make_plan(12)
    events = [started(0.0, 0, plan)]
    events += [one_step(float(n), n, loss=100.0, step_s=1.0) for n in range(1, 9)]
    events += [validated(8, 1.0), Saved(at=8.0, step=4, path="c/4", size_bytes=1, seconds=0.1)]
    # Killed at 8 s after step 8; resumed an hour later from step 4 on, and it got to step 6 only.
    events += [started(3600.0, 4, plan), one_step(3602.0, 5, loss=50.0, step_s=2.0)]
    events += [one_step(3605.0, 6, loss=60.0, step_s=3.0), validated(6, 2.0)]
    folder = write_run(tmp_path / "run", events, plan)
    measured = measure(folder)
    assert (measured.steps, measured.tokens) == (6, 6 * 2048)
    assert measured.run_s == 8.0 + 5.0
    assert measured.train_loss == pytest.approx((4 * 100 + 50 + 60) / 6)
    # The validation at step 8 is not of the model that the run ended with.
    assert (measured.val_loss, measured.best_val_loss) == (2.0, 2.0)
    assert (measured.mfu, measured.reason) == (None, "unfinished")
    history = follow_events(events)
    assert [timed.time_s for timed in history.steps] == [1.0, 2.0, 3.0, 4.0, 10.0, 13.0]
    assert [timed.tokens for timed in history.steps] == [2048 * n for n in range(1, 7)]
    assert history.lost_steps == 4


def test_each_start_has_its_own_warm_up(tmp_path):
    plan = make_plan(40)
    events = [started(0.0, 0, plan), *(one_step(float(n), n) for n in range(1, 21))]
    events += [started(100.0, 20, plan), *(one_step(100.0 + n, n) for n in range(21, 41))]
    cold = [timed.step.step for timed in follow_events(events).steps if not timed.warm]
    assert cold == [*range(1, 1 + SLOW_START_STEPS), *range(21, 21 + SLOW_START_STEPS)]


def test_rate_per_device_is_kept_when_the_number_of_workers_changes(tmp_path):
    one = make_plan(40)
    two = make_plan(40, world=2)
    events = [started(0.0, 0, one), *(one_step(float(n), n, step_s=0.2) for n in range(1, 21))]
    events += [
        started(100.0, 20, two),
        *(one_step(100.0 + n, n, step_s=0.1) for n in range(21, 41)),
    ]
    measured = measure(write_run(tmp_path / "run", events, one))
    alone = measure(write_run(tmp_path / "alone", events[:21], one))
    assert measured.tflops_per_device == pytest.approx(alone.tflops_per_device)


def test_a_whole_run_agrees_with_its_events(tmp_path):
    measured = measure(resumed_run(tmp_path / "run", steps=300))
    assert (measured.steps, measured.tokens, measured.reason) == (300, 300 * 2048, "done")
    assert 0.08 < measured.step_s < 0.1
    assert measured.usd == pytest.approx(ESTIMATE.usd / ESTIMATE.run_s * measured.run_s)


def test_run_of_a_single_step_is_measured(tmp_path):
    plan = make_plan(1)
    measured = measure(
        write_run(tmp_path / "run", [started(0.0), one_step(3.0, 1, step_s=0.5)], plan)
    )
    assert (measured.step_s, measured.steps, measured.val_loss, measured.perplexity) == (
        0.5,
        1,
        None,
        None,
    )


def test_an_unfinished_last_line_is_left_out(tmp_path):
    folder = resumed_run(tmp_path / "run", steps=50)
    whole = measure(folder)
    with open(folder / "events.jsonl", "ab") as file:
        file.write(msgspec.json.encode(one_step(1e10, 51))[:-9])
    assert measure(folder) == whole


def test_a_warning_given_before_a_start_adds_no_time(tmp_path):
    """A resuming worker warns of a corrupt checkpoint before it says that it has started."""
    plan = make_plan(12)
    warned = Warned(at=5000.0, message="corrupt checkpoint")
    events = [started(0.0, 0, plan), *(one_step(float(n), n) for n in range(1, 9))]
    events += [warned, started(5001.0, 4, plan), one_step(5002.0, 5)]
    history = follow_events(events)
    assert history.run_s == 8.0 + 1.0
    assert history.warnings == (warned,)
    assert follow_events(events[9:]).warnings == (warned,)


@pytest.mark.parametrize(
    "reason", ["done", "deadline", "early-stop", "interrupted", "failed", None]
)
def test_a_run_that_ended_by_itself_has_nothing_left_to_train(tmp_path, reason):
    plan = make_plan(20)
    folder = RunFolder(
        write_run(
            tmp_path / "run", train_events(plan, first=0, last=9, at=0.0, reason=reason), plan
        )
    )
    assert is_complete(folder) == (reason in ("done", "deadline", "early-stop"))
    folder.events.unlink()
    assert not is_complete(folder)


@pytest.mark.parametrize("missing", ["plan.json", "events.jsonl"])
def test_measure_refuses_a_run_folder_with_missing_files(tmp_path, missing):
    folder = write_run(tmp_path / "run", [started(0.0)], make_plan(5))
    assert measure(folder) is None
    (folder / missing).unlink()
    with pytest.raises(Refusal) as refused:
        measure(folder)
    assert refused.value.problem.code == "not-a-run"
