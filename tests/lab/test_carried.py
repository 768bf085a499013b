"""What a lab's line carries in a step is what the plan's list of communications says
(`semantics.communications`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from farspan import models
from farspan.app import training
from farspan.app.plans import best_plan
from farspan.app.resolving import resolve_run
from farspan.domain.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TokenizerConfig,
    TrainConfig,
)
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.estimate.traffic import traffic
from farspan_lab import state
from farspan_lab.cluster import of_lab
from tests.lab.conftest import OWN, parsed, traces

pytestmark = pytest.mark.slow

TWO = (
    f"name: {OWN}-carried\nsites: {{utah: {{devices: 2}}, mass: {{}}}}\nlinks: [{{between: [utah, "
    f"mass], rtt: 4ms}}]\n"
)
#: Steps of a short and of a long run: what both send once falls out of the difference.
SHORT = 20
LONG = 60


@pytest.fixture(scope="module")
def lab():
    made = state.up(parsed(TWO))
    yield made.lab.name
    state.down(made.lab.name)
    assert traces() == []


def carried(lab: str, technique: str, steps: int, text: Path, folder: Path) -> tuple[int, Plan]:
    """Bytes that the line carried while a run of so many steps went on, both ways, headers and
    all."""
    config = RunConfig(
        data=DataConfig(source=str(text), val="10%"),
        tokenizer=TokenizerConfig(vocab=300),
        model=ModelConfig(layers=3, d_model=96, heads=2, context=32, tied=False),
        train=TrainConfig(
            steps=steps, batch=BatchConfig(global_=12), precision="fp32", validate_every=1000
        ),
        parallel=ParallelConfig(cluster=f"lab:{lab}", technique=technique),
        checkpoint=CheckpointConfig(every="1h"),
    )
    run = training.make_run(
        folder, config, best_plan(resolve_run(config, trial=False), config.parallel)
    )
    before = sum(way.bytes for way in state.status(lab).traffic)
    training.train_run(run)
    return sum(way.bytes for way in state.status(lab).traffic) - before, run.load_plan()


def listed(plan: Plan, lab: str) -> float:
    """Bytes of a step between the sites, by the list."""
    cluster = of_lab(state.status(lab))
    costs = Costs(
        models.graph(plan.model),
        plan.train,
        Network(cluster, plan.devices, load_engine(plan.engine)),
    )
    return sum(
        size
        for exchange in traffic(plan, costs)
        for (a, b), size in exchange.by_hosts.items()
        if costs.network.site(a) != costs.network.site(b)
    )


@pytest.mark.parametrize("technique", ["zero2", "pipeshard"])
def test_bytes_over_a_lab_link_per_step_equal_the_listed_traffic(
    lab: str, technique: str, text: Path, tmp_path: Path
):
    (short, plan), (long, _) = (
        carried(lab, technique, steps, text, tmp_path / f"{steps}") for steps in (SHORT, LONG)
    )
    assert {device.site for device in plan.devices} == {"utah", "mass"}
    step = (long - short) / (LONG - SHORT)
    # Headers of packets, their acknowledgements, and what workers tell one another beside: the
    # gradient's norm, each second that they live.
    assert step == pytest.approx(listed(plan, lab), rel=0.05)


def test_parts_of_a_checkpoint_arrive_though_rank_0_still_copies_its_own(
    lab: str, text: Path, tmp_path: Path
):
    config = RunConfig(
        data=DataConfig(source=str(text), val="10%"),
        tokenizer=TokenizerConfig(vocab=300),
        model=ModelConfig(layers=4, d_model=512, heads=4, context=32, tied=False),
        train=TrainConfig(
            steps=3, batch=BatchConfig(global_=12), precision="fp32", validate_every=1000
        ),
        parallel=ParallelConfig(cluster=f"lab:{lab}", technique="pipeshard"),
        checkpoint=CheckpointConfig(every="1h"),
    )
    run = training.make_run(
        tmp_path / "run", config, best_plan(resolve_run(config, trial=False), config.parallel)
    )
    assert {device.site for device in run.load_plan().devices} == {"utah", "mass"}
    training.train_run(run)
    assert list((run.path / "checkpoints").glob("step-*"))
