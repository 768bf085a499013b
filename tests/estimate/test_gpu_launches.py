"""A GPU's launches and bytes by the estimate, and as the runtime dispatches them (counted on the
meta device)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from benchmarks.gpu_step import plan_of
from farspan import models
from farspan.domain import catalog
from farspan.domain.cluster import Cluster, Device, Host, Site, UnitTime
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan, PlannedDevice
from farspan.domain.train import TrainSpec
from farspan.estimate.compute import DeviceSpeed
from farspan.estimate.estimate_plan import price
from farspan.estimate.network import Network
from farspan.estimate.optimizer_update import update_work
from farspan.estimate.stage import Costs
from farspan.planning.size import shape_for
from tests.runtime.test_launches import count_step

ENGINE = load_engine("farspan")


def llama(parameters: int) -> ModelSpec:
    return shape_for("llama", parameters, vocab_size=8192, context=256, knobs={})


def untied(parameters: int) -> ModelSpec:
    return msgspec.structs.replace(llama(parameters), tied=False)


def h200() -> Device:
    device = catalog.load_devices()["h200"].device("h200")
    assert device is not None
    return device


def planned(
    spec: ModelSpec, rows: int, device: Device | None = None, **modes: bool
) -> tuple[Plan, Costs]:
    """A plan of one GPU whose device runs its step as `modes` say, and its costs."""
    train = TrainSpec(steps=1, batch=rows, seq_len=spec.context, precision="bf16")
    plan = plan_of(spec, train, "cuda")
    at = PlannedDevice(host="here", backend="cuda", index=0, threads=1, **modes)
    plan = msgspec.structs.replace(plan, devices=(at,))
    host = Host(name="here", devices=(device or h200(),))
    cluster = Cluster(sites=(Site(name="here", hosts=(host,)),))
    network = Network(cluster, plan.devices, ENGINE)
    return plan, Costs(models.graph(spec), train, network)


def estimated(
    spec: ModelSpec, rows: int, device: Device | None = None, **modes: bool
) -> tuple[float, float]:
    """Return the launches and the bytes of a step, by the estimate's own parts."""
    plan, costs = planned(spec, rows, device, **modes)
    assert ENGINE.gpu is not None
    update = update_work(costs, plan.replicas[0].stages[0], ENGINE.gpu)
    launches = update.launches
    size = update.unhidden
    for unit, count in costs.graph.kinds(0, costs.graph.units):
        for op in unit:
            for one in costs.operator_work(0, op, rows):
                launches += count * one.launches
                size += count * (one.bytes + one.unhidden + one.composed)
    return launches, size


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (lambda: llama(3_000_000), 8),
        (lambda: llama(15_000_000), 8),
        (lambda: untied(15_000_000), 8),
        (lambda: models.presets()["gpt2"].spec, 16),
        (lambda: models.presets()["gpt2-medium"].spec, 16),
    ],
    ids=["3m", "15m", "15m untied", "gpt2", "gpt2-medium"],
)
def test_a_steps_launches_and_bytes_are_those_that_the_runtime_dispatches(
    monkeypatch: pytest.MonkeyPatch, spec: Callable[[], ModelSpec], rows: int
) -> None:
    counter = count_step(monkeypatch, spec(), rows)
    launches, size = estimated(spec(), rows)
    assert launches == pytest.approx(counter.count, rel=0.01)
    assert size == pytest.approx(sum(one.size for one in counter.launches), rel=0.01)


@pytest.mark.parametrize("spec", [lambda: llama(15_000_000), lambda: models.presets()["gpt2"].spec])
def test_the_loss_by_operators_launches_what_the_runtime_dispatches(monkeypatch, spec):
    """On cards before Volta, for which there is no compiler."""
    counter = count_step(monkeypatch, spec(), 8, is_fused=False)
    launches, size = estimated(spec(), 8, h200().but(capability=6.1))
    assert launches == pytest.approx(counter.count, rel=0.03)
    assert size == pytest.approx(sum(one.size for one in counter.launches), rel=0.03)


def step_s(spec: ModelSpec, rows: int, device: Device | None = None, **modes: bool) -> float:
    plan, costs = planned(spec, rows, device, **modes)
    return price(plan, costs).step_s


def test_a_small_models_step_takes_as_long_as_its_launches_where_they_were_timed():
    small = llama(3_000_000)
    assert ENGINE.gpu is not None
    timed = h200().but(launch_s=ENGINE.launch_s / ENGINE.gpu.launch_cost)
    assert step_s(small, 8, timed) == step_s(small, 8)
    twice = h200().but(launch_s=2 * ENGINE.launch_s / ENGINE.gpu.launch_cost)
    launches, _ = estimated(small, 8)
    more = step_s(small, 8, twice) - step_s(small, 8)
    assert more == pytest.approx(launches * ENGINE.launch_s, rel=0.01)


def test_a_recorded_step_takes_no_time_of_the_host():
    """Its kernels follow each other within the GPU."""
    small = llama(3_000_000)
    launches, size = estimated(small, 8)
    assert ENGINE.gpu is not None
    slow = h200().but(launch_s=1e-3)
    recorded = step_s(small, 8, graph=True)
    assert recorded == step_s(small, 8, slow, graph=True) < step_s(small, 8) / 4
    gaps = launches * ENGINE.gpu.kernel_gap_s
    assert gaps < recorded < gaps + 10 * size / 4.8e12
    # Of a large one launches overlap with its kernels.
    medium = models.presets()["gpt2-medium"].spec
    saved = step_s(medium, 16) - step_s(medium, 16, graph=True)
    assert 0 < saved < 0.01 * step_s(medium, 16)


def test_compiled_blocks_launch_and_move_less():
    for spec in (llama(15_000_000), models.presets()["gpt2-medium"].spec):
        eager = estimated(spec, 16)
        compiled = estimated(spec, 16, compile=True)
        assert compiled[0] < eager[0] and compiled[1] < eager[1]
    # 149 and 131 ms on an H200 before the head's products were padded.
    medium = models.presets()["gpt2-medium"].spec
    saved = step_s(medium, 16) - step_s(medium, 16, compile=True)
    assert saved == pytest.approx(0.018, rel=0.1)


@pytest.mark.parametrize(
    ("capability", "flops"),
    [(9.0, 0.43), (8.0, 0.56), (8.6, 0.5), (7.5, 0.3), (12.0, 0.5), (msgspec.UNSET, 0.3)],
)
def test_attention_has_the_rate_of_the_kernel_that_a_card_takes(capability, flops):
    """The share of the data sheet's that long sequences reach, with heads of 64."""
    card = h200().but(capability=capability)
    speed = DeviceSpeed(card, "bf16", ENGINE)
    assert speed.attention_flops(10**9, 64) == pytest.approx(flops * 989e12, rel=1e-3)
    assert speed.attention_flops(256, 64) < 0.5 * speed.attention_flops(10**9, 64)
    # As gpt2-medium's in a step: half of the products of whole attention.
    spec = models.presets()["gpt2-medium"].spec
    _, costs = planned(spec, 16, card)
    attention = costs.graph.block[2]
    found = sum(one.flops for one in costs.operator_work(0, attention, 16))
    assert spec.layers * found == pytest.approx(2.9e12, rel=0.01)


def test_attention_in_fp32_has_a_share_of_the_rate_in_fp32():
    speed = DeviceSpeed(h200(), "fp32", ENGINE)
    assert ENGINE.gpu is not None
    assert speed.attention_flops(10**9, 128) == pytest.approx(67e12 * ENGINE.gpu.full_attention)


def test_other_engines_and_cpus_are_as_before():
    for name in ("torch2024", "alpa2022", "megatron2021", "compiled2024"):
        assert load_engine(name).gpu is None
    own = ENGINE.on({"cpu"}).on_device("cpu")
    assert own.gpu is None and own.kernels == ENGINE.kernels


def test_times_of_units_that_were_launched_one_by_one_do_not_slow_a_recorded_step():
    """They took as long as their launches: of the kernels they tell that these took less."""
    small = llama(3_000_000)
    graph = models.graph(small)
    measured = [
        UnitTime(
            model=graph.units_hash,
            unit=unit,
            dtype="bf16",
            rows=8,
            seq_len=small.context,
            forward_s=5e-4,
            backward_s=1e-3,
        )
        for unit in ("embedding", "block", "head")
    ]
    timed = h200().but(units=tuple(measured), launch_s=1e-3)
    assert step_s(small, 8, timed) > 5 * 1.5e-3
    assert step_s(small, 8, timed, graph=True) == pytest.approx(step_s(small, 8, graph=True))
    # Of a compiled block the same share is left as of a predicted one.
    shares = [step_s(small, 8, one, compile=True) for one in (timed, h200())]
    eager = [step_s(small, 8, one) for one in (timed, h200())]
    assert shares[0] < eager[0] and shares[1] < eager[1]
