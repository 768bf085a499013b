"""Steps that ask the host for nothing, as a CUDA graph has them, against the same steps one by one.

A CPU records none: it makes each when it is launched. What they compute, what the host learns of it
a step later, and that nothing in between reads from the device or writes to it, is the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farspan.domain.model import ModelSpec
from farspan.domain.plan import find_flaw
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Saved, Step, Validated, Warned
from farspan.domain.train import Muon, Optimizer, Regularization, TrainSpec
from farspan.planning.size import shape_for
from farspan.runtime import cuda_graph
from farspan.runtime.parallel.device_step import DeviceStep, StepLayout
from farspan.runtime.parallel.pipeline import Pipeline
from farspan.runtime.state import train_state
from tests import tiny
from tests.runtime import stored_tensors
from tests.runtime.launches import meta_executor
from tests.runtime.test_trainer import TRAIN, Start

#: A clip that every step reaches.
CLIPPED = Optimizer(lr=1e-2, clip=0.1)
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "clipped": {"optimizer": CLIPPED},
    "unclipped": {"optimizer": Optimizer(lr=1e-2, clip=0.0)},
    "muon": {"optimizer": Optimizer(lr=1e-2, clip=0.1, muon=Muon())},
    "average": {"optimizer": Optimizer(lr=1e-2, average=0.9)},
    "bf16": {"precision": "bf16", "optimizer": CLIPPED},
    "bf16 muon average": {
        "precision": "bf16",
        "optimizer": Optimizer(lr=1e-2, muon=Muon(), average=0.9),
    },
    "dropout and mask": {
        "regularization": Regularization(dropout=0.2, mask=0.1, reshuffle=True),
    },
}


@pytest.fixture(autouse=True)
def _numbers_of_the_device(monkeypatch):
    """Steps made one by one take their numbers from the device too, as on a GPU; on one thread."""
    monkeypatch.setattr(train_state, "RECORDING_DEVICES", frozenset({"cpu"}))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_folder(
    path, *, recorded: bool, microbatches: int = 1, documents: int = 1, **changes: Any
) -> RunFolder:
    train = replace(TRAIN, steps=20, validate_every=7, **changes)
    plan = tiny.plan(train)
    (replica,) = plan.replicas
    plan = replace(
        plan,
        replicas=(replace(replica, microbatches=microbatches),),
        devices=(replace(plan.devices[0], graph=recorded),),
    )
    if not (path.parent / "corpus").exists():
        tiny.corpus(path.parent / "corpus", documents=documents)
    return tiny.run_folder(path, plan)


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return stored_tensors.weights(stored_tensors.newest(run))


def outcome(start: Start) -> list[tuple[float, ...]]:
    steps = [(s.step, s.loss, s.grad_norm, s.lr, s.tokens) for s in start.steps]
    validated = [(v.step, v.loss) for v in start.events if isinstance(v, Validated)]
    return steps + validated


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_are_the_same_to_the_last_bit(tmp_path, case, microbatches):
    runs = {}
    for recorded in (False, True):
        run = run_folder(
            tmp_path / str(recorded),
            recorded=recorded,
            microbatches=microbatches,
            documents=5 if case == "dropout and mask" else 1,
            **CASES[case],
        )
        start = Start(run)
        reason, trainer = start.train()
        assert reason == "done" and (trainer.recorded is not None) == recorded
        runs[recorded] = (outcome(start), weights(run))
    assert runs[True][0] == runs[False][0]
    for name, weight in runs[False][1].items():
        assert torch.equal(weight, runs[True][1][name]), name


def test_every_step_is_reported_before_what_follows_it(tmp_path):
    start = Start(run_folder(tmp_path / "run", recorded=True))
    start.train()
    reported = 0
    for event in start.events:
        if isinstance(event, Step):
            reported += 1
            assert event.step == reported
        elif isinstance(event, Validated | Saved):
            assert event.step == reported
    assert reported == 20


def test_a_recorded_run_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    whole = Start(run_folder(tmp_path / "whole", recorded=True))
    whole.train()
    run = run_folder(tmp_path / "run", recorded=True)
    first = Start(run, until=9)
    reason, _ = first.train()
    assert reason == "interrupted"
    second = Start(run)
    second.train()
    losses = [step.loss for start in (first, second) for step in start.steps]
    assert losses == [step.loss for step in whole.steps]
    for name, weight in weights(whole.run).items():
        assert torch.equal(weight, weights(run)[name]), name


@pytest.mark.parametrize("optimizer", [CLIPPED, Optimizer(lr=1e-2, muon=Muon(), average=0.9)])
def test_a_loss_that_is_not_finite_changes_nothing_until_the_host_refuses(
    tmp_path, monkeypatch, optimizer
):
    """The step after it is launched before the host has seen it."""
    made = Pipeline.run_microbatches
    snapshots = list[list[torch.Tensor]]()

    def poisoned(pipeline, read, scale, on_loss=None):
        state = executor[0].state
        snapshots.append([x.clone() for x in (*state.master, *state.exp_avg, *state.exp_avg_sq)])
        loss = made(pipeline, read, scale, on_loss)
        if len(snapshots) == 6:
            for grad in state.grad:
                grad.fill_(float("nan"))
        return loss

    executor = []
    monkeypatch.setattr(Pipeline, "run_microbatches", poisoned)
    build = DeviceStep.__init__
    monkeypatch.setattr(
        DeviceStep,
        "__init__",
        lambda step, given, *rest: executor.append(given) or build(step, given, *rest),
    )
    start = Start(run_folder(tmp_path / "run", recorded=True, optimizer=optimizer))
    with pytest.raises(Refusal, match="gradient is not finite at step 6; the update was not made"):
        start.train()
    assert [step.step for step in start.steps] == [1, 2, 3, 4, 5]
    state = executor[0].state
    now = [*state.master, *state.exp_avg, *state.exp_avg_sq]
    assert len(snapshots) == 7
    for before, after in zip(snapshots[5], now, strict=True):
        assert torch.equal(before, after)


def test_a_plan_that_cannot_be_recorded_is_refused():
    """Its file may have been edited: a scale of the loss that the host changes, and other devices,
    are not in a graph."""
    one = tiny.plan(TRAIN)
    two = tiny.plan(TRAIN, rows=(1, 1))
    half = replace(one, train=replace(TRAIN, precision="fp16"))
    for plan, is_refused in ((one, False), (two, True), (half, True)):
        recorded = [replace(device, graph=True) for device in plan.devices]
        flaw = find_flaw(replace(plan, devices=tuple(recorded)))
        assert ("CUDA graph" in flaw) == is_refused


class HostCalls(TorchDispatchMode):
    """Collects what makes the host wait for a device, or copies between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        result = operator(*given, **(named or {}))
        name = operator._schema.name.split("::")[1]
        if name in ("_local_scalar_dense", "nonzero", "item"):
            self.calls.append(name)
        tensors = [x for x in tree_leaves((given, named, result)) if isinstance(x, torch.Tensor)]
        # A number of the host may stand beside a device's tensors: it goes with the launch.
        places = {x.device.type for x in tensors if x.dim() or name in ("copy_", "_to_copy")}
        if len(places) > 1:
            self.calls.append(name)
        return result


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_nothing_in_a_recorded_step_asks_the_host(monkeypatch, muon, microbatches):
    monkeypatch.setattr(train_state, "RECORDING_DEVICES", frozenset({"meta"}))
    spec = small_llama()
    optimizer = Optimizer(average=0.99, **({"muon": Muon()} if muon else {}))
    train = TrainSpec(
        steps=1,
        batch=8,
        seq_len=spec.context,
        precision="bf16",
        optimizer=optimizer,
        regularization=Regularization(dropout=0.1),
    )
    executor, _ = meta_executor(monkeypatch, spec, train, microbatches=microbatches)
    step = DeviceStep(executor, train, StepLayout((8 // microbatches,) * microbatches, 256))
    step.run()  # Once before, as what a run computes once is not recorded.
    with HostCalls() as host:
        step.run()
    assert host.calls == []


def test_a_recorded_step_of_a_small_model_launches_few_kernels(monkeypatch):
    spec = small_llama()
    counted = {}
    for name, optimizer in {"adamw": Optimizer(), "muon": Optimizer(muon=Muon())}.items():
        monkeypatch.setattr(train_state, "RECORDING_DEVICES", frozenset({"meta"}))
        train = TrainSpec(
            steps=1, batch=8, seq_len=spec.context, precision="bf16", optimizer=optimizer
        )
        executor, counter = meta_executor(monkeypatch, spec, train)
        step = DeviceStep(executor, train, StepLayout((8,), spec.context))
        step.run()
        with counter:
            step.run()
        counted[name] = counter.count
    assert 100 < counted["adamw"] <= 200
    assert counted["adamw"] < counted["muon"] <= 300


def small_llama() -> ModelSpec:
    return shape_for("llama", 3_000_000, vocab_size=8192, context=256, knobs={})


class Replayed:
    """Stands for a card: what it recorded it does again, in the way of a kind of fault."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def __call__(self, device: torch.device) -> Any:
        return self._record

    def _record(self, function: Any) -> Any:
        if self._fault == "refuses":
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel")
        if self._fault == "refuses halfway":
            with pytest.raises(ZeroDivisionError):
                interrupted(function)
            raise RuntimeError("operation failed due to a previous error during capture")
        if self._fault == "does nothing":
            return lambda: None
        return function


def interrupted(function: Any) -> None:
    """Call a function that fails in its backward pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", lambda *given: 1 / 0)
        function()


@pytest.mark.parametrize("fault", ["", "refuses", "refuses halfway", "does nothing"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_graph_is_kept_only_where_it_does_what_the_step_does(
    tmp_path, monkeypatch, fault, precision
):
    changes = {"precision": precision, "optimizer": Optimizer(lr=1e-2, muon=Muon(), average=0.9)}
    plain = Start(run_folder(tmp_path / "plain", recorded=True, **changes))
    plain.train()
    monkeypatch.setattr(cuda_graph, "RECORDERS", {"cpu": Replayed(fault)})
    start = Start(run_folder(tmp_path / "run", recorded=True, **changes))
    _, trainer = start.train()
    assert outcome(start) == outcome(plain)
    for name, weight in weights(plain.run).items():
        assert torch.equal(weight, weights(start.run)[name]), name
    assert trainer.recorded.recorded == (not fault)
    warnings = [event.message for event in start.events if isinstance(event, Warned)]
    assert len(warnings) == bool(fault)
    if fault:
        assert warnings[0].startswith("the step could not be recorded as a CUDA graph: ")
        assert "CUDA kernel" not in warnings[0]
