"""How far from the best is what `farspan select` chooses, over scenarios that a seed draws?

    python benchmarks/regret.py [--scenarios 30] [--seed 0] python benchmarks/regret.py --afresh
    # of these: what is chosen and what is near the best, run anew python benchmarks/regret.py
    --intervals      # of these: how many trials lie inside what was told before any python
    benchmarks/regret.py --quick          # one small scenario; writes nothing here python
    benchmarks/regret.py --sites 3        # labs of three sites, in results/regret_3_sites.jsonl

A scenario is a lab of two sites on two cores (one each): round trip, rate and loss of the link, one
or two devices a site with speeds and memory of their own, a model, and the tokens of a step. With
three sites each has one device, and the fastest may be four times as fast as the slowest. In each,
what every technique plans for all sites and for parts of them is run for a few steps: the truth. A
plan is left out once the least that it is predicted to take, at the paces that the trials have
shown, is more than twice the best. The same trials then say what each rule's choice takes:

- `select`: ours, with its default budget of trials for a run of RUN_STEPS steps;
- `plan`: the best prediction, nothing tried;
- `algorithm 1` of arXiv 2602.02632, `always pipeshard` and `always data` on both sites, `best
  site`: the faster of Data and Shard on either site. Of these only `always data` says something of
  three sites.

All trials are appended to results/regret.jsonl as scenarios end; what is there is not run again.
With --again every rule chooses anew among the trials that are there, and only plans that nothing
has tried yet are run: for a change to the rules, not for one to what runs. The last line of a
scenario counts.

A trial that was lucky is chosen for it, and by the same trial it is then the best: of the scenarios
that are there
--afresh runs what `select` chose again, in turns with the plans that came within AGAIN of the best,
  each in ROUNDS fresh trials that no rule has seen (results/regret_afresh.jsonl). The best of these
  is the least of their medians.

It needs a Linux machine that allows labs, with nothing else running.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from wan import results, said_of_here

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.domain.struct_files import convert, cut_unfinished_line
from farspan.domain.train import Schedule, TrainSpec
from farspan.domain.trial import Trial
from farspan.estimate.estimate_plan import estimate
from farspan.launch.trial import run_trial, steps_for, trial_limits
from farspan.planning.candidate import Candidate
from farspan.planning.ranking import time_bounds_s
from farspan.planning.select_by_trials import SelectionTask, select_by_trials
from farspan.semantics.identity import plan_key
from farspan_lab import spec, state
from farspan_lab.cluster import of_lab
from farspan_studies.bench.made_corpus import make
from farspan_studies.papers import algorithm1

RESULTS = Path(__file__).parent / "results" / "regret.jsonl"
#: Replicas that meet now and then compute something else, so their steps cannot be compared.
TECHNIQUES = ("data", "zero1", "zero2", "fsdp", "hsdp", "shard", "pipeshard")
#: Steps of the run that is chosen for: 3 % of it is the budget of trials.
RUN_STEPS = 3000
#: A plan is not run once it must take so many times the best; a choice is near the best within
#: NEAR.
DROPPED = 2.0
NEAR = 0.1
#: Of Algorithm 1.
DELTA = 0.1
#: Plans that are run afresh: so near the best, so many at most, so many times each.
AGAIN = 0.2
MOST = 3
ROUNDS = 2
#: (layers, width, heads, vocabulary, context)
SHAPES = {"2M": (4, 160, 4, 4096, 128), "8M": (8, 256, 8, 8192, 128), "25M": (8, 480, 8, 8192, 128)}


class Scenario(msgspec.Struct, frozen=True):
    """One drawn world."""

    number: int
    rtt_ms: float
    gbit: float
    loss: float
    #: Of each site's devices: speed as a share of a core, and megabytes or none.
    devices: tuple[tuple[tuple[float, int | None], ...], ...]
    shape: str
    sequences: int
    seq_len: int

    @property
    def lab(self) -> dict[str, Any]:
        sites = {
            name: {
                "devices": [
                    {"speed": f"{100 * speed:.4g}%", **({"memory": f"{size}MB"} if size else {})}
                    for speed, size in devices
                ]
            }
            for name, devices in zip("abc", self.devices, strict=False)
        }
        line = {"rtt": f"{self.rtt_ms}ms", "bandwidth": f"{self.gbit}Gbit/s", "loss": self.loss}
        links = [{"between": list(pair), **line} for pair in itertools.combinations(sites, 2)]
        return {"name": f"regret-{os.getpid()}-{self.number}", "sites": sites, "links": links}

    @property
    def asked(self) -> SelectionTask:
        layers, width, heads, vocab, context = SHAPES[self.shape]
        model = models.family("gpt2").shape(
            d_model=width, layers=layers, heads=heads, vocab_size=vocab, context=context
        )
        train = TrainSpec(
            steps=RUN_STEPS,
            batch=self.sequences,
            seq_len=self.seq_len,
            precision="fp32",
            schedule=Schedule(kind="constant"),
        )
        return SelectionTask(
            model=model, train=train, engine=load_engine("farspan"), allow=TECHNIQUES
        )


def drawn(seed: int, number: int, sites: int = 2) -> Scenario:
    """Return the scenario of a seed and a number, whatever else is drawn."""
    rng = random.Random(f"{seed} {number}" if sites == 2 else f"{seed} {number} {sites}")

    def log(low: float, high: float) -> float:
        return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")

    def site() -> tuple[int, float]:
        """How many devices, and how fast."""
        return (rng.choice((1, 2, 2)), rng.uniform(0.2, 0.5)) if sites == 2 else (1, log(0.15, 0.6))

    rtt_ms = log(0.1, 150)
    gbit = log(0.1, 2)
    devices = tuple(
        tuple((float(f"{speed:.2g}"), rng.choice((None, None, 600, 900))) for _ in range(count))
        for count, speed in (site() for _ in range(sites))
    )
    return Scenario(
        number,
        rtt_ms,
        gbit,
        rng.choice((0.0, 0.0, 1e-4, 1e-3)),
        devices,
        rng.choice(tuple(SHAPES)),
        rng.choice((8, 16, 32)),
        rng.choice((32, 64, 128)),
    )


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario that was run: seconds a step of every rule's choice, None where that cannot run;
    all trials, and the plans that were tried."""

    seed: int
    scenario: Scenario
    best: str
    best_s: float
    chosen: dict[str, tuple[str, float | None]]
    trials: dict[str, Trial]
    plans: dict[str, Plan] = {}
    names: dict[str, str]
    spent_s: float
    about: dict[str, Any]

    def regret(self, rule: str) -> float:
        step_s = self.chosen[rule][1]
        return math.inf if step_s is None else step_s / self.best_s - 1


class Afresh(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario's chosen plan and those near the best, by key: seconds a step of trials that chose
    nothing."""

    seed: int
    number: int
    chosen: str
    step_s: dict[str, list[float]]
    names: dict[str, str]
    about: dict[str, Any]

    @property
    def regret(self) -> float:
        usual = {key: statistics.median(found) for key, found in self.step_s.items() if found}
        return usual[self.chosen] / min(usual.values()) - 1 if self.chosen in usual else math.inf


class World:
    """Trials of one scenario, each plan once."""

    def __init__(self, corpus: Path, cluster: Cluster, before: Done | None) -> None:
        self._corpus = corpus
        self._cluster = cluster
        self.trials: dict[str, Trial] = {} if before is None else dict(before.trials)
        self.plans: dict[str, Plan] = {} if before is None else dict(before.plans)
        self.names: dict[str, str] = {} if before is None else dict(before.names)

    def run(self, plan: Plan, step_s: float, name: str) -> Trial:
        key = plan_key(plan)
        if key not in self.trials:
            self.trials[key] = run_trial(
                plan,
                self._corpus,
                self._cluster,
                "local",
                trial_limits(plan, self._cluster, step_s, steps_for(step_s)),
            )
            said = self.trials[key]
            took = (
                f"{said.step_s:.3f} s"
                if said.step_s
                else f"{said.status}: {said.problem and said.problem.what}"
            )
            print(f"  {name}: {took}, predicted {step_s:.3f} s", flush=True)
        self.plans[key] = plan
        self.names.setdefault(key, name)
        return self.trials[key]

    def step_s(self, plan: Plan | None) -> float | None:
        found = None if plan is None else self.trials.get(plan_key(plan))
        return None if found is None else found.step_s


def named(one: Candidate) -> str:
    return f"{one.technique} on {one.where}"


def run(seed: int, scenario: Scenario, about: dict[str, Any], before: Done | None = None) -> Done:
    """Every rule's choice, and the truth; `before` has trials of the same scenario."""
    with up(seed, scenario) as (asked, corpus, cluster):
        return measured(seed, scenario, asked, World(corpus, cluster, before), cluster, about)


@contextlib.contextmanager
def up(seed: int, scenario: Scenario) -> Iterator[tuple[SelectionTask, Path, Cluster]]:
    """Return the scenario's question, its corpus, and its lab as a cluster."""
    asked = scenario.asked
    made = spec.read(convert(scenario.lab, spec.LabFile, "scenario"), "scenario")
    status = state.up(made)
    try:
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder, "corpus")
            manifest = make(corpus, asked.model.vocab_size, 400_000, seed)
            yield msgspec.structs.replace(asked, corpus=manifest.hash), corpus, of_lab(status)
    finally:
        state.down(made.name)


def afresh(one: Done, about: dict[str, Any]) -> Afresh:
    """Return the chosen plan and those near the best, in turns."""
    known = {key: made.step_s for key, made in one.trials.items() if made.step_s is not None}
    chosen = next(
        key for key, step_s in known.items() if (one.names[key], step_s) == one.chosen["select"]
    )
    near = sorted(
        (key for key in known if known[key] <= (1 + AGAIN) * one.best_s), key=lambda key: known[key]
    )
    found: dict[str, list[float]] = {key: [] for key in dict.fromkeys([*near[:MOST], chosen])}
    with up(one.seed, one.scenario) as (_, corpus, cluster):
        for _ in range(ROUNDS):
            world = World(corpus, cluster, None)
            for key, steps in found.items():
                made = world.run(one.plans[key], known[key], one.names[key])
                steps += [] if made.step_s is None else [made.step_s]
    return Afresh(
        seed=one.seed,
        number=one.scenario.number,
        chosen=chosen,
        step_s=found,
        about=about,
        names={key: one.names[key] for key in found},
    )


def run_afresh(scenarios: list[Done], path: Path) -> None:
    """All that were not run afresh yet, and how many choices are near the best by these trials."""
    with open(path, "ab+") as file:
        cut_unfinished_line(path)
        file.seek(0)
        found = [msgspec.json.decode(line, type=Afresh) for line in file.read().splitlines()]
        done = {(one.seed, one.number) for one in found}
        for one in scenarios:
            if (one.seed, one.scenario.number) not in done:
                found.append(afresh(one, said_of_here()))
                file.write(msgspec.json.encode(found[-1]) + b"\n")
                file.flush()
    for one in sorted(found, key=lambda one: one.number):
        print(f"{one.number}: {one.names[one.chosen]} +{one.regret:.1%}")  # type: ignore[attr-defined]
    near = sum(one.regret <= NEAR for one in found)
    apart = [
        max(steps) / min(steps) - 1
        for one in found
        for steps in one.step_s.values()
        if len(steps) > 1
    ]
    print(
        f"within {NEAR:.0%} of the best of fresh trials: {near} of {len(found)}; trials of one "
        "plan are "
        f"{statistics.median(apart):.1%} apart in the median, {max(apart):.1%} at most"
    )


def intervals(scenarios: list[Done]) -> str:
    """How many trials lie inside the interval that is told of them with nothing probed, and how far
    off they are."""
    inside = 0
    alone = list[float]()
    factors = list[float]()
    for one in scenarios:
        with up(one.seed, one.scenario) as (_, _, cluster):
            for key, made in one.trials.items():
                plan = one.plans[key]
                told = estimate(plan, models.graph(plan.model), cluster, load_engine(plan.engine))
                if made.step_s is not None:
                    factors.append(made.step_s / told.step_s)
                    alone += factors[-1:] if len(plan.devices) == 1 else []
                    inside += told.interval[0] <= factors[-1] <= told.interval[1]
    tenths = statistics.quantiles(factors, n=10)
    return (
        f"{inside} of {len(factors)} trials inside their interval; they took {tenths[4]:.2f} times "
        "as long as "
        f"predicted in the median, a tenth less than {tenths[0]:.2f}, a tenth more than "
        f"{tenths[8]:.2f}; single "
        f"devices {min(alone):.2f} to {max(alone):.2f}"
    )


def measured(
    seed: int,
    scenario: Scenario,
    asked: SelectionTask,
    world: World,
    cluster: Cluster,
    about: dict[str, Any],
) -> Done:
    first = asked.rank(cluster)
    predicted = None if first.chosen is None else first.candidates[first.chosen]
    names: dict[str, str] = {}

    def measure(plan: Plan, step_s: float) -> Trial:
        return world.run(plan, step_s, names.get(plan_key(plan), plan.technique))

    names |= {plan_key(one.plan): named(one) for one in first.candidates}
    selection = select_by_trials(cluster, asked, measure)
    ranking = selection.ranking
    ours = None if ranking.chosen is None else ranking.candidates[ranking.chosen]
    paper = None
    if len(cluster.hosts) == 2:
        paper = algorithm1.choose(cluster, asked, measure, DELTA)
    truth(world, [*ranking.candidates, *first.candidates])
    rules: dict[str, Plan | None] = {
        "select": ours and ours.plan,
        "plan": predicted and predicted.plan,
        "algorithm 1": paper and paper.plan,
    }
    fixed = {one.name: one for one in paper.candidates} if paper else {}
    rules["always pipeshard"] = fixed["tp"].plan if fixed else None
    whole = [
        one for one in first.candidates if one.technique == "data" and one.where == "all devices"
    ]
    rules["always data"] = whole[0].plan if whole else None
    sites = [
        fixed[name]
        for name in ("td1", "ts1", "td2", "ts2")
        if fixed and fixed[name].trial is not None
    ]
    ran = [one for one in sites if one.trial is not None and one.trial.step_s is not None]
    rules["best site"] = (
        min(ran, key=lambda one: one.trial.step_s or math.inf).plan if ran else None
    )  # type: ignore[union-attr]
    foretold = {plan_key(one.plan): one.estimate.step_s for one in first.candidates}
    for rule, plan in rules.items():
        if plan is not None and plan_key(plan) not in world.trials:
            world.run(plan, foretold[plan_key(plan)], rule)
    done = {key: one.step_s for key, one in world.trials.items() if one.step_s is not None}
    best = min(done, key=done.__getitem__)
    return Done(
        seed=seed,
        scenario=scenario,
        best=world.names[best],
        best_s=done[best],
        trials=world.trials,
        chosen={
            rule: ("none" if plan is None else world.names[plan_key(plan)], world.step_s(plan))
            for rule, plan in rules.items()
        },
        plans=world.plans,
        names=world.names,
        spent_s=selection.spent_s,
        about=about,
    )


def truth(world: World, candidates: list[Candidate]) -> None:
    """Run every technique's plans on both sites and on either, but those that must take far longer
    than the best."""
    seen = set()
    for one in sorted(candidates, key=lambda one: one.time_s):
        place = (one.technique, one.places)
        known = [t.step_s for t in world.trials.values() if t.step_s is not None]
        least = one.estimate.step_s * time_bounds_s(one)[0] / one.time_s
        if place in seen or (known and least > DROPPED * min(known)):
            continue
        seen.add(place)
        world.run(one.plan, one.estimate.step_s, named(one))


def table(found: list[Done]) -> str:
    rules = list(found[0].chosen)
    lines = [
        f"| scenario | best | s a step | {' | '.join(rules)} |",
        "|" + "---|" * (3 + len(rules)),
    ]
    for one in found:
        what = one.scenario
        devices = " + ".join("/".join(f"{speed:g}" for speed, _ in site) for site in what.devices)
        cells = (
            "fails"
            if one.regret(rule) == math.inf
            else f"+{one.regret(rule):.0%}"
            if one.regret(rule)
            else "0"
            for rule in rules
        )
        world = f"{what.number}: {what.rtt_ms:g} ms, {what.gbit:g} Gbit/s, {devices}, {what.shape}"
        lines.append(f"| {world} | {one.best} | {one.best_s:.3g} | {' | '.join(cells)} |")
    near = {rule: sum(one.regret(rule) <= NEAR for one in found) for rule in rules}
    lines.append(
        f"| within {NEAR:.0%} of the best | | | "
        f"{' | '.join(f'{near[rule]} of {len(found)}' for rule in rules)} |"
    )
    worst = {rule: statistics.median(one.regret(rule) for one in found) for rule in rules}
    lines.append(f"| median | | | {' | '.join(f'+{worst[rule]:.0%}' for rule in rules)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenarios", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sites", type=int, choices=(2, 3), default=2)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--afresh", action="store_true")
    parser.add_argument("--intervals", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    path = RESULTS if given.sites == 2 else RESULTS.with_stem(f"{RESULTS.stem}_{given.sites}_sites")
    with results(given, path) as (out, file):
        lines = out.read_bytes().splitlines() if out.exists() else []
        read = [msgspec.json.decode(line, type=Done) for line in lines]
        found = {one.scenario.number: one for one in read if one.seed == given.seed}
        if given.afresh:
            run_afresh(
                [found[number] for number in sorted(found)], path.with_stem(f"{path.stem}_afresh")
            )
            return
        if given.intervals:
            print(intervals([found[number] for number in sorted(found)]))
            return
        for number in range(1 if given.quick else given.scenarios):
            before = found.get(number)
            scenario = drawn(given.seed, number, given.sites)
            if before is None or given.again:
                print(scenario, flush=True)
                found[number] = run(given.seed, scenario, said_of_here(), before)
                file.write(msgspec.json.encode(found[number]) + b"\n")
                file.flush()
        made = table([found[number] for number in sorted(found)])
        spent = sorted(one.spent_s for one in found.values())
        print(
            f"\n{made}\n\ntrials of `select`: {statistics.median(spent):.0f} s, {spent[0]:.0f} to "
            f"{spent[-1]:.0f}"
        )
        if not given.quick:
            out.with_suffix(".md").write_text(f"# What is chosen, against the best\n\n{made}\n")


if __name__ == "__main__":
    main()
