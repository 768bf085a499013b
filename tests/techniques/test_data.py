"""Plans of the data technique hand out every row once and fit memory, or say why there is none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farspan import models
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.estimate.memory import memory_bytes
from farspan.techniques.data import FILL, plan
from tests.estimate.test_estimate import cluster, train_spec

MODEL = models.family("llama").shape(d_model=128, layers=3, vocab_size=1000, context=64)


@given(st.integers(1, 9), st.integers(1, 200), st.integers(0, 200_000_000), st.booleans())
def test_every_row_has_one_rank_and_a_microbatch_fits(devices, batch, spare, recompute):
    train = train_spec(batch=batch, recompute=recompute)
    here = cluster(devices, memory=memory_bytes(MODEL, train, 0, "cpu") + spare)
    made = plan(MODEL, here, train, corpus="c")
    if isinstance(made, Problem):
        too_few = batch < devices
        assert made.code == ("cannot-plan" if too_few else "out-of-memory")
        assert too_few or memory_bytes(MODEL, train, 1, "cpu") > FILL * here.devices[0].memory
        return
    (stage,) = made.replicas[0].stages
    assert sum(stage.rows) == batch and min(stage.rows) >= 1
    assert max(stage.rows) - min(stage.rows) <= 1 and list(stage.rows) == sorted(stage.rows, reverse=True)
    assert stage.layers == (0, MODEL.layers) and stage.mesh.shape == (devices,) and stage.mesh.axes == ("data",)
    usable = FILL * here.devices[0].memory
    assert 1 <= stage.micro_rows <= stage.rows[0]
    assert memory_bytes(MODEL, train, stage.micro_rows, "cpu") <= usable
    microbatches = -(-stage.rows[0] // stage.micro_rows)
    if microbatches > 1:  # One microbatch fewer would not fit.
        assert memory_bytes(MODEL, train, -(-stage.rows[0] // (microbatches - 1)), "cpu") > usable
    assert len(made.devices) == devices and [d.index for d in made.devices] == list(range(devices))


@given(st.integers(2, 9), st.integers(1, 8))
def test_workers_that_share_too_little_memory_are_told_how_many_fit(asked, fit):
    train = train_spec(batch=100)
    total = round(memory_bytes(MODEL, train, 1, "cpu") * (fit + 0.5) / FILL)
    made = plan(MODEL, cluster(asked, memory=total // asked), train, corpus="c")
    assert isinstance(made, Plan) == (asked <= fit)
    if isinstance(made, Problem):
        assert made.remedy == f"set parallel.workers: {fit}"
        assert isinstance(plan(MODEL, cluster(fit, memory=total // fit), train, corpus="c"), Plan)


def test_the_same_inputs_give_the_same_plan():
    first, second = (plan(MODEL, cluster(3), train_spec(), corpus="c") for _ in range(2))
    assert isinstance(first, Plan) and isinstance(second, Plan) and first.hash == second.hash
