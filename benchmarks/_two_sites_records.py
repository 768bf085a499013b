"""What `benchmarks/two_sites.py` compares and writes down, one event a line; and the table that it
makes of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from _wan_records import Session

from farspan import models
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.plan import Plan
from farspan.domain.run_events import Event, Step, Validated
from farspan.domain.train import Optimizer, Schedule, TrainSpec

RTT_MS = 103.0
VOCAB = 4096
#: At most this share of one site's time, in the median of so many seeds.
PROMISE = 0.7
SEEDS = 3
ONE = "one site"
TUNING = "tuning"
SAME = "synchronous"
DILOCO = "diloco"
#: Two sites that take the same steps send their sums in so many bits, and have a schedule so much
#: longer: with as many steps they end where one site does but for rounding, which training
#: amplifies to some thousandths of a nat, above or below.
BITS = 16
MORE = 1.04


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What every run computes. Results of different works are never put in one table."""

    layers: int
    width: int
    context: int
    #: Sequences a step.
    batch: int
    steps: int
    tune_steps: int
    validate_every: int
    validate_tokens: int
    #: Content hash.
    corpus: str

    @property
    def spec(self) -> ModelSpec:
        family = models.family("gpt2")
        return family.shape(
            d_model=self.width,
            layers=self.layers,
            vocab_size=VOCAB,
            context=self.context,
            tied=True,
        )

    def train(self, steps: int, lr: float, seed: int, arm: str) -> TrainSpec:
        steps = round(MORE * steps) if arm == SAME else steps
        return TrainSpec(
            steps=steps,
            batch=self.batch,
            seq_len=self.context,
            precision="fp32",
            seed=seed,
            wan_bits=BITS if arm == SAME else 32,
            optimizer=Optimizer(lr=lr),
            schedule=Schedule(kind="cosine", warmup_steps=max(1, steps // 20)),
            validate_every=self.validate_every,
            validate_tokens=self.validate_tokens,
            checkpoint_every_s=1e6,
            keep=1,
        )


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    session: str
    work: Work


class Probed(_Record, frozen=True, kw_only=True, tag="probed"):
    """The lab as `farspan probe` measures it, with so many workers a site."""

    clusters: dict[int, dict[str, Any]]


class Planned(_Record, frozen=True, kw_only=True, tag="planned"):
    """The planner's choice, before any run, with one worker a site or two: the faster of these,
    `tried` for seconds a step by workers a site."""

    arm: str
    tried: dict[int, float] = {}
    plan: dict[str, Any]
    step_s: float
    interval: tuple[float, float]


class Run(_Record, frozen=True, kw_only=True, tag="run"):
    """One run of an arm's plan. Without `raw` it failed."""

    arm: str
    lr: float
    seed: int
    at: float
    load_before: float
    failed: str | None = None
    #: A core's share that the lab's relay took.
    relay_share: float | None = None
    #: How it started, its steps and validations.
    raw: tuple[Event, ...] = ()


Record = Session | Probed | Planned | Run


class Point(NamedTuple):
    """One validation: seconds since the end of the first step in all, and those that steps and
    meetings took."""

    step: int
    at_s: float
    steps_s: float
    loss: float


def course(run: Run) -> list[Point]:
    """Return the validations of a run. What lies between one and the next step (the best weights
    are kept) is no step."""
    points: list[Point] = []
    first = 0.0
    last = 0.0
    pure = 0.0
    fresh = False
    for event in run.raw:
        if isinstance(event, Step):
            first = first or event.at
            pure += 0.0 if event.at == first else event.step_s if fresh else event.at - last
            last = event.at
            fresh = False
        elif isinstance(event, Validated):
            pure += (
                event.at - event.seconds - last
            )  # Replicas meet after a step, before they validate.
            points.append(Point(event.step, event.at - first, pure, event.loss))
            fresh = True
    return points


def reached(points: Sequence[Point], loss: float) -> int | None:
    """Which validation has the loss first."""
    return next((number for number, one in enumerate(points) if one.loss <= loss), None)


def read(path: Path) -> list[Record]:
    decoder = msgspec.json.Decoder(Record)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def known(records: Sequence[Record], kind: type[Any], work: Work, **values: object) -> list[Any]:
    """Return the records of a kind and a work that have these values."""
    found = (one for one in records if isinstance(one, kind) and one.work == work)
    return [
        one for one in found if all(getattr(one, key) == value for key, value in values.items())
    ]


def tuned(records: Sequence[Record], work: Work) -> dict[float, float]:
    """Return final losses of one site by learning rate, the best first."""
    found = [one for one in known(records, Run, work, arm=TUNING) if not one.failed]
    return dict(sorted(((one.lr, course(one)[-1].loss) for one in found), key=lambda pair: pair[1]))


# -- the table
#   ------------------------------------------------------------------------------------------------


def table(records: Sequence[Record], work: Work) -> str:
    """Markdown of one work, at the learning rate that is best so far."""
    if not (losses := tuned(records, work)):
        return "nothing measured\n"
    lr, *_ = losses
    made = [one for one in known(records, Run, work, lr=lr) if not one.failed and one.arm != TUNING]
    runs = {(one.arm, one.seed): one for one in made}
    plans = known(records, Planned, work)
    pairs = {
        arm: [
            (runs[ONE, seed], run)
            for (name, seed), run in sorted(runs.items())
            if name == arm and (ONE, seed) in runs
        ]
        for arm in (one.arm for one in plans if one.arm != ONE)
    }
    free = min((one for one in plans if one.arm != DILOCO), key=lambda one: one.step_s)
    failed = [
        f"- {one.arm}, lr {one.lr:g}, seed {one.seed} failed: {one.failed}"
        for one in known(records, Run, work)
        if one.failed
    ]
    return (
        "\n\n".join(
            [
                f"## {work.layers} layers x {work.width}, "
                f"{count_parameters(work.spec) / 1e6:.1f} M parameters, {work.steps} steps "
                f"of {work.batch} x {work.context} tokens, fp32, corpus {work.corpus}",
                *_sessions(records, work),
                _tuning(losses, work),
                "Seconds a step: predicted before, and measured (mean, without validations). "
                "Predicted fastest of "
                f"what computes the same: {free.arm}.",
                _grid(
                    (
                        "",
                        "plan",
                        "predicted",
                        "measured",
                        "predicted / measured",
                        "a core's share for the relay",
                    ),
                    [
                        _plan_row(one, [run for (arm, _), run in runs.items() if arm == one.arm])
                        for one in plans
                    ],
                ),
                "Seconds from the end of the first step to the validation that reaches one site's "
                "last loss. Validations, and "
                "keeping the best weights, are included for all; `steps only`: left out for all. "
                "`between`: the loss "
                f"interpolated between two validations. Synchronous: sums in {BITS} bits, a "
                f"schedule {MORE - 1:.0%} longer.",
                _grid(
                    (
                        "",
                        "seed",
                        "one site",
                        "two sites",
                        "ratio",
                        "ratio, steps only",
                        "two sites, between",
                        "at step",
                        "last loss, one site",
                        "two sites",
                    ),
                    [_row(*pair) for found in pairs.values() for pair in found],
                ),
                "\n".join(
                    [
                        *(
                            f"- {arm}: {_verdict([_ratio(*pair) for pair in found])}"
                            for arm, found in pairs.items()
                        ),
                        *failed,
                    ]
                ),
            ]
        )
        + "\n"
    )


def _sessions(records: Sequence[Record], work: Work) -> list[str]:
    """Return a line for each session that runs are of."""
    used = {one.session for one in known(records, Run, work)}
    return [
        f"{one.session}: commit {one.commit}{' with changes' if one.changed else ''}, torch "
        f"{one.versions['torch']}, "
        f"{one.cpu}, Linux {one.kernel}, {RTT_MS:g} ms, {one.bandwidth}, TCP {one.congestion}."
        for one in records
        if isinstance(one, Session) and one.session in used
    ]


def _tuning(losses: dict[float, float], work: Work) -> str:
    best, *_ = losses
    edge = (
        ", at the edge of what was tried: try more with --lr"
        if best in (min(losses), max(losses))
        else ""
    )
    tried = ", ".join(f"{lr:g}: {losses[lr]:.4f}" for lr in sorted(losses))
    return (
        f"One site's learning rate, validation loss after {work.tune_steps} steps: {tried}. "
        f"Taken: {best:g}{edge}."
    )


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def _plan_row(planned: Planned, runs: Sequence[Run]) -> list[str]:
    low, high = (planned.step_s * factor for factor in planned.interval)
    row = [planned.arm, described(planned), f"{planned.step_s:.3f} ({low:.3f} to {high:.3f})"]
    if not runs:
        return [*row, "", "", ""]
    ends = [course(run)[-1] for run in runs]
    measured = statistics.mean(end.steps_s / (end.step - 1) for end in ends)
    relay = statistics.mean(run.relay_share or 0.0 for run in runs)
    return [*row, f"{measured:.3f}", f"{planned.step_s / measured:.2f}", f"{relay:.0%}"]


def described(planned: Planned) -> str:
    """Return a plan in a line."""
    plan = msgspec.convert(planned.plan, Plan)
    parts = []
    for stage in (stage for replica in plan.replicas for stage in replica.stages):
        places = "+".join(
            f"{plan.devices[r].site}{plan.devices[r].index}" for r in stage.mesh.ranks
        )
        parts.append(f"units {stage.units[0]} to {stage.units[1]} on {places}")
    meet = (
        f", meeting every {plan.sync.every} steps{', overlapped' if plan.sync.overlap else ''}"
        if plan.sync
        else ""
    )
    return (
        f"{plan.technique}, {'; '.join(parts)}, {plan.replicas[0].microbatches} microbatches{meet}"
    )


def _reaching(one: Run, run: Run) -> tuple[Point, Point | None]:
    """Return the validations at which one site and a run first have one site's last loss."""
    base = course(one)
    points = course(run)
    at = reached(points, base[-1].loss)
    return base[reached(base, base[-1].loss) or 0], None if at is None else points[at]


def _ratio(one: Run, run: Run) -> float | None:
    goal, there = _reaching(one, run)
    return None if there is None else there.at_s / goal.at_s


def _row(one: Run, run: Run) -> list[str]:
    goal, there = _reaching(one, run)
    loss = course(one)[-1].loss
    points = course(run)
    ends = [f"{loss:.4f}", f"{points[-1].loss:.4f}"]
    row = [run.arm, str(run.seed), f"{goal.at_s:.1f}"]
    if there is None:
        return [*row, "not reached", "", "", "", "", *ends]
    before = points[max(0, points.index(there) - 1)]
    part = (
        (before.loss - loss) / (before.loss - there.loss)
        if before.loss > loss >= there.loss
        else 1.0
    )
    between = before.at_s + part * (there.at_s - before.at_s)
    ratios = [f"{there.at_s / goal.at_s:.3f}", f"{there.steps_s / goal.steps_s:.3f}"]
    return [*row, f"{there.at_s:.1f}", *ratios, f"{between:.1f}", str(there.step), *ends]


def _verdict(ratios: Sequence[float | None]) -> str:
    there = [ratio for ratio in ratios if ratio is not None]
    if not ratios:
        return "not run"
    said = f"{sum(ratio <= PROMISE for ratio in there)} of {len(ratios)} seeds within {PROMISE}"
    if missing := len(ratios) - len(there):
        return f"{said}, {missing} never reach one site's loss: MISSED"
    middle = statistics.median(there)
    kept = "kept" if middle <= PROMISE else "MISSED"
    return (
        f"median ratio {middle:.3f}, {said}: "
        f"{kept if len(there) >= SEEDS else 'too few seeds to say'}"
    )
