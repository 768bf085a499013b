"""Rates of a device: how long between two waits for it, and what launching takes."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch

from farspan.domain.train import TrainSpec
from farspan.runtime.probing import rates
from tests import tiny


class Clock:
    """Seconds that pass only with work, and with waiting for it."""

    def __init__(self, work_s: float, wait_s: float) -> None:
        self.now = 0.0
        self.events: list[str] = []
        self.seconds = {"work": work_s, "wait": wait_s}

    def __call__(self) -> float:
        return self.now

    def pass_by(self, event: str) -> None:
        self.events.append(event)
        self.now += self.seconds[event]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A device whose calls take 50 us, and whose waits 15."""
    clock = Clock(50e-6, 15e-6)
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(rates, "synchronize_device", lambda device: clock.pass_by("wait"))
    return clock


def test_a_gpu_is_waited_for_after_several_calls(clock: Clock):
    found = rates._mean_seconds(lambda: clock.pass_by("work"), torch.device("cuda"))
    assert found == pytest.approx(50e-6, rel=0.01)
    assert "work work work work wait" in " ".join(clock.events)


def test_a_cpu_is_waited_for_after_each_call(clock: Clock):
    found = rates._mean_seconds(lambda: clock.pass_by("work"), torch.device("cpu"))
    assert found == pytest.approx(65e-6)
    assert clock.events[::2] == ["work"] * (len(clock.events) // 2)
    assert clock.events[1::2] == ["wait"] * (len(clock.events) // 2)


def test_launches_are_timed_on_gpus_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rates, "RATE_S", 0.01)
    train = TrainSpec(steps=1, batch=2, seq_len=16, precision="fp32")
    planned = tiny.plan(train).devices[0]
    found = rates.measure_device_rates(planned, ((8, 8, 8),), ("fp32",), 2**40)
    assert found.launch_s is msgspec.UNSET
    assert rates.measure_launch_s(torch.device("cpu")) > 0
