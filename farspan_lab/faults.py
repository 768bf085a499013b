"""Faults that `farspan chaos` makes: what is hurt, when, and for how long.

`kill:1@20` kills rank 1 after step 20; `stop:1@20+8s` lets it stand still for 8 s, without `+8s`
for ever; `cut:a-b@20+8s` cuts a link both ways, `cut:a>b@20` one way. In place of a step, `@save`
is during the next save and `@recovery` while the run recovers from the fault before.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from farspan.domain.problems import Refusal
from farspan.domain.units import parse_duration

Kind = Literal["kill", "stop", "cut", "cut-one-way"]
Phase = Literal["step", "save", "recovery"]
_FORM = re.compile(
    r"(?P<kind>kill|stop|cut):(?:(?P<rank>\d+)|(?P<a>[a-z0-9-]+?)(?P<way>[->])(?P<b>[a-z0-9-]+))"
    r"@(?P<at>\d+|save|recovery)(?:\+(?P<lasts>\S+))?"
)
#: Between a fault that is seen and one that comes while the run recovers: a part of this.
RECOVERY_S = 1.5
#: A fault that passes takes longer than silence may last, or less.
SHORT_S = 1.5
LONG_S = 8.0


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    phase: Phase
    #: Of `kill` and `stop`.
    rank: int | None = None
    #: Of a cut: from the first to the second, or both ways.
    sites: tuple[str, str] | None = None
    #: Not before this one.
    step: int = 0
    #: Seconds after which it passes; None where it does not.
    lasts_s: float | None = None

    def __str__(self) -> str:
        first, second = self.sites or ("", "")
        what = (
            f"{first}{'-' if self.kind == 'cut' else '>'}{second}" if self.sites else str(self.rank)
        )
        at = self.step if self.phase == "step" else self.phase
        lasts = "" if self.lasts_s is None else f"+{self.lasts_s:g}s"
        return f"{self.kind.partition('-')[0]}:{what}@{at}{lasts}"


def parse(text: str) -> Injection:
    """Return the fault that a text names. Raises Refusal (out-of-range)."""
    form = _FORM.fullmatch(text)
    if form is None or (form["kind"] == "cut") == (form["rank"] is not None):
        raise Refusal(
            "out-of-range",
            what="this is no fault",
            where=f"--fault {text}",
            fact="faults are written as kill:1@20, stop:1@20+8s, cut:a-b@20+8s or cut:a>b@save",
            remedy="farspan chaos --help",
        )
    at = form["at"]
    return Injection(
        kind="cut-one-way" if form["way"] == ">" else form["kind"],  # type: ignore[arg-type]
        phase="step" if at.isdecimal() else at,  # type: ignore[arg-type]
        rank=None if form["rank"] is None else int(form["rank"]),
        sites=(form["a"], form["b"]) if form["a"] else None,
        step=int(at) if at.isdecimal() else 0,
        lasts_s=None if form["lasts"] is None else parse_duration(form["lasts"]),
    )


def drawn(
    seed: int, count: int, world: int, links: Sequence[tuple[str, str]], steps: int
) -> tuple[Injection, ...]:
    """So many faults at random, in the order of their steps: of a run of `steps` steps by `world`
    workers, over links between these sites. Every kind and phase is drawn; cuts pass, so that the
    plan may stay."""
    rng = random.Random(seed)
    at = sorted(rng.sample(range(2, max(3 + count, steps - 2)), count))
    injections = list[Injection]()
    for number, step in enumerate(at):
        kind: Kind = rng.choice(
            ("kill", "stop", "cut", "cut-one-way") if links else ("kill", "stop")
        )
        phase: Phase = rng.choice(
            ("step", "step", "save", "recovery") if number else ("step", "save")
        )
        cut = kind.startswith("cut")
        a, b = rng.choice(links) if cut else ("", "")
        lasts = (
            rng.choice((SHORT_S, LONG_S))
            if cut
            else rng.choice((None, SHORT_S))
            if kind == "stop"
            else None
        )
        injections.append(
            Injection(
                kind=kind,
                phase=phase,
                rank=None if cut else rng.randrange(world),
                sites=rng.choice(((a, b), (b, a))) if cut else None,
                step=step,
                lasts_s=lasts,
            )
        )
    return tuple(injections)
