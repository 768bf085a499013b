"""The judge of disturbed runs sees what is wrong: a wrong loss, a missing step, another cause."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from tests.faults.judging import Ending, Struck, Trained, judge
from tests.faults.scenarios import STEPS, Fault, Kind, Scenario

CALM = Trained(losses={step: 5.0 + 1 / step for step in range(1, STEPS + 1)}, plans=("one",))
STRUCK = Struck(fault="kill:0@training", at=0.0, step=10)


def scenario(kind: Kind = "kill", technique: str = "data") -> Scenario:
    fault = Fault(kind=kind, phase="training", step=10)
    return Scenario(
        number=0,
        launcher="local",
        sites=2,
        technique=technique,
        on_fault="recover",
        faults=(fault,),
    )


def ending(trained: Trained | None = CALM, **more: object) -> Ending:
    values = {"struck": (STRUCK,), "exits": (0,), "code": None, "seconds": 1.0, **more}
    return Ending(trained=trained, **values)  # type: ignore[arg-type]


def with_loss(step: int, factor: float, plans: tuple[str, ...] = ("one",)) -> Trained:
    return Trained(losses={**CALM.losses, step: CALM.losses[step] * factor}, plans=plans)


def test_equal_losses_are_right() -> None:
    assert judge(scenario(), ending(), CALM) == ("finished", "")


@pytest.mark.parametrize("step", [1, 30, STEPS])
def test_least_difference_is_wrong_while_the_plan_stays(step: int) -> None:
    next_float = math.nextafter(CALM.losses[step], 9.0) / CALM.losses[step]
    verdict, flaw = judge(scenario(), ending(with_loss(step, next_float)), CALM)
    assert verdict == "wrong" and f"step {step}: the loss differs" in flaw


@pytest.mark.parametrize(("factor", "expected"), [(1 + 9e-6, "finished"), (1 + 2e-5, "wrong")])
def test_other_plan_has_a_tolerance(factor: float, expected: str) -> None:
    trained = with_loss(40, factor, plans=("one", "two"))
    assert judge(scenario(), ending(trained), CALM)[0] == expected


def test_replicas_under_another_plan_are_another_computation() -> None:
    trained = with_loss(40, 1.1, plans=("one", "two"))
    assert judge(scenario(technique="diloco"), ending(trained), CALM)[0] == "finished"


def test_missing_step_and_infinite_loss_are_wrong() -> None:
    fewer = replace(CALM, losses={step: CALM.losses[step] for step in range(1, STEPS)})
    assert judge(scenario(), ending(fewer), CALM)[0] == "wrong"
    assert judge(scenario(), ending(with_loss(3, math.inf)), CALM)[0] == "wrong"
    assert judge(scenario(), ending(None), CALM)[0] == "wrong"


def test_fault_that_did_not_strike_is_wrong() -> None:
    assert judge(scenario(), ending(struck=()), CALM)[0] == "wrong"


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("kill", "worker-lost", "wrong"),
        ("kill-again", "worker-lost", "ended"),
        ("kill-again", "internal", "wrong"),
        ("disk-full", "disk-full", "ended"),
        ("disk-full", "worker-lost", "wrong"),
    ],
)
def test_only_the_right_cause_is_a_right_end(kind: Kind, code: str, expected: str) -> None:
    assert judge(scenario(kind), ending(code=code), CALM)[0] == expected


def test_kills_on_a_far_host_may_be_for_memory() -> None:
    killed = ending(code="out-of-memory")
    assert judge(scenario("kill-again"), killed, CALM)[0] == "wrong"
    assert judge(replace(scenario("kill-again"), launcher="ssh"), killed, CALM)[0] == "ended"


def test_end_with_the_right_cause_must_be_curable() -> None:
    stuck = ending(code="disk-full", code_after="worker-lost")
    assert judge(scenario("disk-full"), stuck, CALM)[0] == "wrong"
    flawed = ending(with_loss(5, 1.01), code="disk-full")
    assert judge(scenario("disk-full"), flawed, CALM)[0] == "wrong"


def test_run_that_hangs_is_wrong() -> None:
    hung = ending(code="hangs", hung="nothing has happened for 300 s")
    assert judge(scenario(), hung, CALM)[0] == "wrong"
