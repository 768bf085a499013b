"""`farspan select` in a lab of two sites: the plan that it writes trains, trials are kept, wrong
values are refused."""

from __future__ import annotations

import json
import os

import msgspec
import pytest

from farspan import models
from farspan.app import resolving
from farspan.app.updates import ignore_update
from farspan.domain.config import RunConfig
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load, load_yaml
from farspan.domain.train import TrainSpec
from farspan_lab import state
from farspan_studies.commands.algorithm1 import epsilon
from tests.launch.conftest import up
from tests.planning.worlds import FAST, cluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab():
    name = f"select-{os.getpid()}"
    links = "links: [{between: [utah, star], rtt: 5ms}]"
    up(f"name: {name}\nsites: {{utah: {{devices: 2}}, star: {{devices: 1}}}}\n{links}\n")
    yield name
    state.down(name)


def answer(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


#: A model of which a step takes long enough for two sites to be worth a thought.
LARGER = (
    "--set",
    "model.d_model=256",
    "--set",
    "model.layers=4",
    "--set",
    "train.batch.global=32 sequences",
)
SHORT = (
    "--set",
    "parallel.allow=[data, zero1]",
    "--set",
    "train.steps=6",
    "--set",
    "train.precision=fp32",
)


def test_select_measures_trials_and_writes_the_fastest_plan_which_trains(farspan, desk, lab):
    asked = ("select", "run.yaml", "--cluster", f"lab:{lab}", *SHORT, *LARGER, "--json")
    found = answer(farspan(*asked, "--budget", "40s", "-o", "chosen.json"))
    assert found["tried"] and all(one["trial"]["status"] == "ok" for one in found["tried"])
    best = found["candidates"][found["chosen"]]
    assert best["trial"]["step_s"] == min(one["trial"]["step_s"] for one in found["tried"])
    assert best["estimate"]["step_s"] == best["trial"]["step_s"]
    plan = load(desk / "chosen.json", Plan)
    assert (
        plan.technique == best["technique"]
        and "is chosen" in found["why"]
        and "measured" in found["why"]
    )

    # The same question again: what was measured is kept, and takes nothing of the budget.
    again = answer(farspan(*asked, "--budget", "10s", "-o", "again.json"))
    kept = {one["trial"]["plan"] for one in found["tried"]}
    assert any(
        one["trial"]["plan"] in kept and one["trial"]["took_s"] == 0 for one in again["tried"]
    )

    asked = (
        "train",
        "run.yaml",
        "--cluster",
        f"lab:{lab}",
        "--plan",
        "chosen.json",
        "--run",
        "runs/chosen",
        "--json",
    )
    assert answer(farspan(*asked, *LARGER))["measurement"]["steps"] == 6


def test_the_papers_rule_prints_every_t(farspan, desk, lab):
    asked = ("select", "run.yaml", "--cluster", f"lab:{lab}", *SHORT[2:], "--algorithm", "paper")
    done = farspan(*asked, "--epsilon", "3 steps", "--delta", "0.1", "-o", "paper.json")
    assert done.returncode == 0, done.stderr
    for name in ("Tp", "Td1", "Ts1", "Td2", "Ts2", "Tz"):
        assert f"\n  {name} " in done.stdout
    assert load(desk / "paper.json", Plan).devices


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("--delta", "0"), "above 0"),
        (("--delta", "1.5"), "at most 1"),
        (("--delta", "nan"), "at most 1"),
        (("--epsilon", "0 steps"), "above 0"),
        (("--epsilon", "many"), "steps or epochs"),
        (("--epsilon", "1.2.3 steps"), "steps or epochs"),
        (("--tolerance", "-1"), "from 0 to 10"),
        (("--budget", "0s"), "above 0"),
        (("--budget", "soon"), ""),
    ],
)
def test_values_out_of_range(here, words, fact):
    done = here("select", "run.yaml", *words, "--json")
    problem = json.loads(done.stdout)["problem"]
    assert problem["code"] == "out-of-range" and fact in problem["fact"], problem


def test_a_model_that_no_device_holds_whole_is_measured_by_its_plans(desk):
    """What one device would take of it is predicted, and plans that divide it are tried; alone it
    is refused."""
    config = load_yaml(desk / "run.yaml", RunConfig)
    spec = models.presets()["gpt2-medium"].spec
    train = TrainSpec(steps=1, batch=1, seq_len=1024, precision="fp32")
    small = msgspec.structs.replace(FAST, memory=4 * 10**9)

    def measured(devices):
        # The probe's process is not asked: nothing is run.
        return resolving._trial_measures(config, None, cluster((small,) * devices), ignore_update)[
            "measure"
        ](spec, train)

    assert measured(2).speeds["fp32"].tokens_per_s > 0
    with pytest.raises(Refusal, match="out-of-memory"):
        measured(1)


def test_a_plan_is_not_written_over(farspan, desk):
    (desk / "there.json").write_text("{}")
    words = ("select", "run.yaml", "--cluster", "here", "--budget", "1m")
    done = farspan(*words, "-o", "there.json", "--json")
    problem = json.loads(done.stdout)["problem"]
    assert problem["code"] == "run-exists"
    assert problem["remedy"] == f"farspan {' '.join(words)} -o there-2.json"
    assert (desk / "there.json").read_text() == "{}"


def test_select_with_the_paper_algorithm_refuses_a_single_machine(farspan):
    done = farspan(
        "select", "run.yaml", "--algorithm", "paper", "--set", "parallel.workers=1", "--json"
    )
    problem = json.loads(done.stdout)["problem"]
    assert problem["code"] == "cannot-plan" and "--algorithm farspan" in problem["remedy"]


@pytest.mark.parametrize("text", ["1 step", "20 steps", " 3 epochs ", "0.5 epochs"])
def test_epsilon_reads_steps_and_epochs(text):
    class Resolved:
        class corpus:  # noqa: N801
            class train:  # noqa: N801
                tokens = 1000

    class Train:
        tokens_per_step = 10

    Resolved.train = Train
    assert epsilon(text)(Resolved) == {"1": 1, "20": 20, "3": 300, "0.5": 50}[text.split()[0]]


def test_an_epsilon_of_too_many_epochs_is_refused():
    class Resolved:
        class corpus:  # noqa: N801
            class train:  # noqa: N801
                tokens = 10**9

        class train:  # noqa: N801
            tokens_per_step = 10

    with pytest.raises(Refusal) as refusal:
        epsilon("900000 epochs")(Resolved)
    assert "steps of each plan" in refusal.value.problem.fact


def test_an_epsilon_of_nothing_is_refused():
    with pytest.raises(Refusal):
        epsilon("steps")
