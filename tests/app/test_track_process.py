"""What a tracker gets of a run's events, read back by TensorBoard's own reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.app import track_process
from farspan.app.track_process import RunSender, TrackEnd, hide_secrets
from farspan.app.tracking import RunTrackers
from farspan.app.updates import Note
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event, Sampled, Step, Validated, read_events
from farspan.report.history import follow_events
from farspan.report.tracked_points import PointFilter
from farspan.report.trackers import (
    find_missing,
    list_trackers,
    require_trackers,
    resolve_trackers,
)
from tests.report.fake_run import (
    START,
    make_plan,
    one_step,
    started,
    train_events,
    write_run,
)
from tests.waiting import wait_for

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def send(folder: Path, end: TrackEnd = TrackEnd(), name: str = "tensorboard") -> list[str]:
    """Send all of a run that has ended; the lines for people."""
    notes = list[str]()
    ended = threading.Event()
    ended.set()
    RunSender(RunFolder(folder), name, notes.append).follow(ended, lambda: end)
    return notes


def read(folder: Path):
    reader = accumulator.EventAccumulator(
        str(folder / "tensorboard"),
        size_guidance={accumulator.SCALARS: 0, accumulator.TENSORS: 0},
    )
    return reader.Reload()


def losses(folder: Path) -> dict[int, float]:
    return {scalar.step: scalar.value for scalar in read(folder).Scalars("train/loss")}


def float32(value: float) -> float:
    import numpy as np

    return float(np.float32(value))


def own_losses(events: Iterable[Event]) -> dict[int, float]:
    """Losses by step; of one that was made twice the later."""
    return {event.step: float32(event.loss) for event in events if isinstance(event, Step)}


def test_every_value_is_read_back(tmp_path: Path) -> None:
    plan = make_plan(60)
    events = train_events(plan, first=0, last=60, at=START, reason="done")
    assert send(write_run(tmp_path, events, plan)) == []
    reader = read(tmp_path)
    steps = [event for event in events if isinstance(event, Step)]
    validations = [event for event in events if isinstance(event, Validated)]
    expected = {
        "train/loss": [(e.step, float32(e.loss)) for e in steps],
        "train/lr": [(e.step, float32(e.lr)) for e in steps],
        "train/grad_norm": [(e.step, float32(e.grad_norm)) for e in steps],
        "train/tokens": [(e.step, e.step * plan.train.tokens_per_step) for e in steps],
        "train/tokens_per_s": [(e.step, float32(e.tokens / e.step_s)) for e in steps],
        "memory/bytes": [(e.step, float32(e.memory_bytes)) for e in steps],
        "val/loss": [(e.step, float32(e.loss)) for e in validations],
        "val/bits_per_byte": [(e.step, float32(e.bits_per_byte)) for e in validations],
    }
    assert set(reader.Tags()["scalars"]) == set(expected)
    for tag, values in expected.items():
        assert [(scalar.step, scalar.value) for scalar in reader.Scalars(tag)] == values
    assert [scalar.wall_time for scalar in reader.Scalars("train/loss")] == [e.at for e in steps]
    samples = [event for event in events if isinstance(event, Sampled)]
    texts = reader.Tensors("samples/str.join")
    assert [text.step for text in texts] == [sample.step for sample in samples]
    shown = texts[-1].tensor_proto.string_val[0].decode()
    assert [line.removeprefix("    ") for line in shown.splitlines()] == (
        samples[-1].prompt + samples[-1].text
    ).splitlines()
    assert reader.SummaryMetadata("samples/str.join").plugin_data.plugin_name == "text"


@pytest.mark.parametrize("jobs", [1, 2])
def test_resumption_replaces_the_steps_it_repeats(tmp_path: Path, jobs: int) -> None:
    """In the same job, after a fault, and in another one."""
    plan = make_plan(60)
    first = train_events(plan, first=0, last=40, at=START, reason=None, seed=1)
    second = train_events(plan, first=20, last=60, at=START + 100, reason="done", seed=2)
    if jobs == 2:
        send(write_run(tmp_path, first, plan), TrackEnd(problem="interrupted"))
        assert losses(tmp_path) == own_losses(first)
    send(write_run(tmp_path, [*first, *second], plan))
    assert losses(tmp_path) == own_losses([*first, *second])
    assert [scalar.step for scalar in read(tmp_path).Scalars("train/loss")] == list(range(1, 61))


def test_nothing_is_sent_twice(tmp_path: Path) -> None:
    plan = make_plan(20)
    events = train_events(plan, first=0, last=20, at=START, reason="done")
    send(write_run(tmp_path, events, plan))
    (before,) = (tmp_path / "tensorboard").iterdir()
    send(tmp_path)
    (after,) = set((tmp_path / "tensorboard").iterdir()) - {before}
    reader = accumulator.EventAccumulator(str(after)).Reload()
    assert reader.Tags()["scalars"] == []
    assert losses(tmp_path) == own_losses(events)


def test_kill_of_the_process_loses_nothing_that_it_has_sent(tmp_path: Path) -> None:
    plan = make_plan(30)
    events = train_events(plan, first=0, last=30, at=START, reason=None)
    folder = write_run(tmp_path, events, plan)
    process = subprocess.Popen(
        [sys.executable, "-m", "farspan.app.track_process", str(folder), "tensorboard"],
        stdin=subprocess.PIPE,
    )
    with process:
        wait_for((folder / "trackers/tensorboard.json").exists, "the first points", process)
        os.kill(process.pid, signal.SIGKILL)
    assert losses(folder) == own_losses(events)


def test_step_that_overflowed_has_no_gradient_norm(tmp_path: Path) -> None:
    plan = make_plan(2)
    events = train_events(plan, first=0, last=2, at=START, reason=None)
    events[1] = msgspec.structs.replace(events[1], grad_norm=None)
    send(write_run(tmp_path, events, plan))
    reader = read(tmp_path)
    assert [scalar.step for scalar in reader.Scalars("train/loss")] == [1, 2]
    assert [scalar.step for scalar in reader.Scalars("train/grad_norm")] == [2]


def test_numbers_too_large_for_float32_are_read_as_infinite(tmp_path: Path) -> None:
    plan = make_plan(2)
    events = train_events(plan, first=0, last=1, at=START, reason=None)
    events[1] = msgspec.structs.replace(events[1], grad_norm=1e300)
    send(write_run(tmp_path, events, plan))
    assert read(tmp_path).Scalars("train/grad_norm")[0].value == float("inf")


#: Starts of a run: after which of the steps so far, and the steps that are made then.
STARTS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=6)


@given(STARTS)
def test_curves_never_go_back(starts: list[tuple[int, int]]) -> None:
    """A tracker that cannot forget gets each step once; tokens are those of the report."""
    events = list[Event]()
    last = 0
    for number, (after, count) in enumerate(starts):
        first = min(after, last)
        last = first + count
        at = START + 100 * number
        events.append(started(at, first))
        for step in range(first + 1, last + 1):
            events.append(one_step(at + step, step, tokens=100 + step))
    points = PointFilter({}, rewinds=False)
    steps = [point.step for event in events if (point := points.take(event))]
    assert steps == list(range(1, max(steps) + 1))

    rewinding = PointFilter({}, rewinds=True)
    curve = dict[int, float]()
    for event in events:
        step = rewinding.find_rewind(event)
        if step is not None:
            curve = {known: tokens for known, tokens in curve.items() if known <= step}
        if point := rewinding.take(event):
            assert not curve or point.step > max(curve)
            curve[point.step] = point.values["train/tokens"]
    reported = {timed.step.step: timed.tokens for timed in follow_events(events).steps}
    assert curve == reported


# -- trackers that fail, and that stand still


def take_all(run: RunFolder, notes: list[str]) -> RunTrackers:
    def keep(update: object) -> None:
        assert isinstance(update, Note)
        notes.append(update.text)

    trackers = RunTrackers(run, keep)
    trackers.take(next(read_events(run.events)))
    return trackers


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    plan = make_plan(8)
    events = train_events(plan, first=0, last=8, at=START, reason="done")
    return RunFolder(write_run(tmp_path / "run", events, plan))


def test_failure_is_reported_once_and_what_is_missing_is_sent_when_it_is_over(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track_process, "RETRY_S", 0.0)
    run.tensorboard.write_text("in the way")
    notes = list[str]()
    ended = threading.Event()
    sender = RunSender(run, "tensorboard", notes.append)
    following = threading.Thread(target=sender.follow, args=(ended, TrackEnd))
    following.start()
    wait_for(lambda: bool(notes), "the report of the failure")
    run.tensorboard.unlink()
    wait_for((run.trackers / "tensorboard.json").exists, "the points")
    ended.set()
    following.join()
    assert len(notes) == 1 and "the tracker tensorboard fails" in notes[0]
    assert losses(run.path) == own_losses(read_events(run.events))


def test_tracker_that_fails_to_the_end_is_reported(run: RunFolder) -> None:
    run.tensorboard.write_text("in the way")
    notes = list[str]()
    take_all(run, notes).finish(TrackEnd(), 60.0)
    assert "the tracker tensorboard lacks the end of this run" in notes[-1]


def test_tracker_that_stands_still_is_ended(run: RunFolder) -> None:
    import psutil

    notes = list[str]()
    trackers = take_all(run, notes)
    children = psutil.Process().children()
    (process,) = [child for child in children if "farspan.app.track_process" in child.cmdline()]
    process.suspend()
    trackers.finish(TrackEnd(), 0.2)
    assert not process.is_running()
    assert "the tracker tensorboard was ended" in notes[-1]


@pytest.mark.parametrize("name", ["tensorboard", "trackers"])
def test_no_file_is_written_through_a_link(run: RunFolder, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run.path / name).symlink_to(elsewhere)
    (note,) = send(run.path)
    assert "path-unusable" in note
    assert list(elsewhere.iterdir()) == []


def test_secrets_of_the_environment_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    address = "https://ada:love%2Flace@mlflow.example/x?sslpassword=enigma"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    shown = hide_secrets(f"no answer from {address} with 0123456789abcdef")
    assert "mlflow.example" in shown
    for secret in ("0123456789abcdef", "lace", "enigma"):
        assert secret not in shown


# -- what run.yaml names


def test_listing_the_trackers_imports_no_library() -> None:
    program = (
        "import sys; from farspan.report import trackers; trackers.list_trackers(); "
        "[trackers.find_missing(name) for name in trackers.list_trackers()]; "
        "print({'wandb', 'mlflow', 'tensorboard', 'torch'} & set(sys.modules))"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_trackers_are_named_by_run_yaml() -> None:
    assert list_trackers() == ["mlflow", "tensorboard", "wandb"]
    assert resolve_trackers("auto") == ("tensorboard",)
    assert resolve_trackers(()) == ()
    assert resolve_trackers("mlflow") == ("mlflow",)
    assert resolve_trackers(["wandb", "mlflow", "wandb"]) == ("wandb", "mlflow")
    with pytest.raises(Refusal) as refusal:
        resolve_trackers(["wandbb"])
    assert refusal.value.problem.code == "out-of-range"
    assert "train.trackers: wandb" in refusal.value.problem.remedy


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hides modules of trackers from whoever looks for them."""
    from farspan.report import trackers

    present = trackers.find_spec

    def hide(missing: str) -> None:
        monkeypatch.setattr(
            trackers, "find_spec", lambda name: None if name == missing else present("json")
        )

    return hide


@pytest.mark.parametrize(
    ("tracker", "module"),
    [
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("mlflow", "sqlalchemy"),
        ("tensorboard", "tensorboard"),
    ],
)
def test_missing_library_is_refused_with_its_command(
    without_libraries: Callable[[str], None], tracker: str, module: str
) -> None:
    without_libraries(module)
    with pytest.raises(Refusal) as refusal:
        require_trackers((tracker,))
    problem = refusal.value.problem
    assert problem.code == "extra-missing" and f"[{tracker}]" in problem.remedy
    assert module in problem.fact
    assert find_missing("wandb" if tracker != "wandb" else "mlflow") is None


def test_auto_is_no_tracker_where_tensorboard_is_not_installed(
    without_libraries: Callable[[str], None],
) -> None:
    without_libraries("tensorboard")
    assert resolve_trackers("auto") == ()
    require_trackers("auto")
