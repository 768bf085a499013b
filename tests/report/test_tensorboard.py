"""TensorBoard's own reader gets the values that went in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from farspan.domain.run_events import Event, Sampled, Step, Validated, read_events
from farspan.report.tensorboard import TensorBoard, crc32c
from tests.report.fake_run import START, make_plan, train_events, write_run

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def show(events: Iterable[Event], folder: Path) -> None:
    board = TensorBoard(folder)
    for event in events:
        board.show(event)


def read(folder: Path):
    found = accumulator.EventAccumulator(
        str(folder), size_guidance={accumulator.SCALARS: 0, accumulator.TENSORS: 0}
    )
    return found.Reload()


def float32(value: float) -> float:
    import numpy as np

    return float(np.float32(value))


def test_crc32c_of_rfc_3720():
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes([0xFF] * 32)) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


def test_every_value_is_read_back(tmp_path):
    plan = make_plan(60)
    events = train_events(plan, first=0, last=60, at=START, reason="done")
    show(events, tmp_path)
    found = read(tmp_path)
    steps = [event for event in events if isinstance(event, Step)]
    validations = [event for event in events if isinstance(event, Validated)]
    expected = {
        "train/loss": [(e.step, float32(e.loss)) for e in steps],
        "train/lr": [(e.step, float32(e.lr)) for e in steps],
        "train/grad_norm": [(e.step, float32(e.grad_norm)) for e in steps],
        "train/tokens_per_s": [(e.step, float32(e.tokens / e.step_s)) for e in steps],
        "memory/bytes": [(e.step, float32(e.memory_bytes)) for e in steps],
        "val/loss": [(e.step, float32(e.loss)) for e in validations],
        "val/bits_per_byte": [(e.step, float32(e.bits_per_byte)) for e in validations],
    }
    assert set(found.Tags()["scalars"]) == set(expected)
    for tag, values in expected.items():
        assert [(scalar.step, scalar.value) for scalar in found.Scalars(tag)] == values
    assert [scalar.wall_time for scalar in found.Scalars("train/loss")] == [e.at for e in steps]
    samples = [event for event in events if isinstance(event, Sampled)]
    texts = found.Tensors("samples/str.join")
    assert [text.step for text in texts] == [sample.step for sample in samples]
    shown = texts[-1].tensor_proto.string_val[0].decode()
    assert [line.removeprefix("    ") for line in shown.splitlines()] == (
        samples[-1].prompt + samples[-1].text
    ).splitlines()
    assert found.SummaryMetadata("samples/str.join").plugin_data.plugin_name == "text"


def test_a_resumption_replaces_the_steps_it_repeats(tmp_path):
    plan = make_plan(60)
    first = train_events(plan, first=0, last=40, at=START, reason=None, seed=1)
    second = train_events(plan, first=20, last=60, at=START + 100, reason="done", seed=2)
    show(first, tmp_path)
    show(second, tmp_path)
    expected = [float32(e.loss) for e in first if isinstance(e, Step) and e.step <= 20]
    expected += [float32(e.loss) for e in second if isinstance(e, Step)]
    found = read(tmp_path).Scalars("train/loss")
    assert [scalar.step for scalar in found] == list(range(1, 61))
    assert [scalar.value for scalar in found] == expected
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 2
    show([*first, *second], tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_kill_loses_nothing_shown(tmp_path):
    plan = make_plan(30)
    folder = write_run(
        tmp_path / "run", train_events(plan, first=0, last=30, at=START, reason=None), plan
    )
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from farspan.domain.run_events import read_events; from farspan.report.tensorboard import "
        "TensorBoard\n"
        "board = TensorBoard(Path(sys.argv[2]))\n"
        "for event in read_events(Path(sys.argv[1])): board.show(event)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, str(folder / "events.jsonl"), str(tmp_path / "tb")]
    assert subprocess.run(command, timeout=180, env={**os.environ}).returncode == -signal.SIGKILL
    losses = [float32(e.loss) for e in read_events(folder / "events.jsonl") if isinstance(e, Step)]
    assert [scalar.value for scalar in read(tmp_path / "tb").Scalars("train/loss")] == losses


def test_a_step_that_overflowed_has_no_gradient_norm(tmp_path):
    events = train_events(make_plan(2), first=0, last=2, at=START, reason=None)
    events[1] = msgspec.structs.replace(events[1], grad_norm=None)
    show(events, tmp_path)
    found = read(tmp_path)
    assert [scalar.step for scalar in found.Scalars("train/loss")] == [1, 2]
    assert [scalar.step for scalar in found.Scalars("train/grad_norm")] == [2]


def test_numbers_too_large_for_float32_are_read_as_infinite(tmp_path):
    events = train_events(make_plan(2), first=0, last=1, at=START, reason=None)
    events[1] = msgspec.structs.replace(events[1], grad_norm=1e300)
    show(events, tmp_path)
    assert read(tmp_path).Scalars("train/grad_norm")[0].value == float("inf")
