"""What farspan says and computes, as a file: `python -m tests.golden.freeze --out FILE [--whole]`.

The dump holds estimates of every engine, the plans that techniques make and that searches choose,
what `--json` prints, and exit codes; and what behaviour.py adds: twenty loss curves, the answers of
an index to thirty questions, the server's OpenAPI, keys and types of JSON objects, and bytes over
links.

Two trees are compared on one machine, to the last bit of every loss and score. PYTHON is the one
interpreter for both, such as that of NEW/.venv; PYTHONPATH puts the old tree before the
installed one, also in the workers that it starts:

    git worktree add /tmp/old COMMIT
    cd /tmp/old && PYTHONPATH=/tmp/old PYTHON -m tests.golden.freeze --whole --out /tmp/old.xz
    cd NEW && PYTHONPATH=NEW PYTHON -m tests.golden.freeze --whole --against /tmp/old.xz
    git worktree remove /tmp/old

The first line that each prints names the package that it dumps. Where COMMIT's own freeze.py knows
fewer parts, put today's beside the old code first: `cp -r NEW/tests/golden /tmp/old/tests/`, and
with it the helpers of tests/ that it imports, should these fail there. `--parts` dumps and compares
only some parts. It ends with 1 where anything differs. What the new dump has in addition is no
difference, but a new key of a JSON object is.

`golden.json.xz` is the part of a dump that the tests repeat. Bits differ between kinds of
processors, so the tests compare losses and scores `--loose`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import math
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import farspan
from farspan import models
from farspan.cli.main import main
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.domain.trial import Trial
from farspan.estimate.estimate_plan import estimate
from farspan.planning.candidate import Candidate, Refused
from farspan.planning.rank_plans import rank_plans
from farspan.planning.select_by_trials import SelectionTask, select_by_trials
from farspan.planning.why import explain_choice
from farspan_studies.papers import algorithm1
from tests.golden.behaviour import curves, keys_of, link_bytes, openapi, priced_bytes, small_run
from tests.golden.commands import COMMANDS, desk
from tests.golden.compare import differences
from tests.golden.worlds import unplanned, world

GOLDEN = Path(__file__).parent / "golden.json.xz"
ENGINES = ("farspan", "torch2024", "alpa2022")
WORLDS = 45
UNPLANNED = 60
SELECTED = 12
#: Of hashes, dates, versions and measured times nothing is kept.
VOLATILE = {
    "hash",
    "version",
    "checked",
    "created",
    "commit",
    "date",
    "inputs",
    "took_s",
    "environment",
    "corpus_hash",
}
#: Sentences for people, which may be said better: left out with `--no-prose`, as is all of a
#: problem but its code.
PROSE = {
    "why",
    "unchosen",
    "assumptions",
    "findings",
    "evidence",
    "notes",
    "against",
    "left_out",
    "unknown",
    "choice",
}


def rankings(folder: Path, numbers: range) -> Iterator[tuple[str, Any]]:
    """Every technique on every part of every world under every engine, as it is put in order."""
    for seed in numbers:
        asked = world(seed, folder)
        for name in ENGINES:
            found = rank_plans(
                asked.model,
                asked.cluster,
                asked.train,
                load_engine(name),
                objective=asked.objective,
            )
            yield (
                f"rank {asked.name} {name}",
                {
                    "objective": asked.objective,
                    "chosen": found.chosen,
                    "candidates": [_listed(one) for one in found.listed],
                    "why": explain_choice(found),
                },
            )
            if name == "farspan":
                yield (
                    f"rank bytes {asked.name}",
                    [
                        priced_bytes(one.plan, asked.cluster, name)
                        for one in found.listed
                        if isinstance(one, Candidate)
                    ],
                )


def estimates(folder: Path, numbers: range) -> Iterator[tuple[str, Any]]:
    """Plans that no technique emits, priced under every engine."""
    for seed in numbers:
        plan, cluster = unplanned(seed, folder)
        for name in ENGINES:
            yield (
                f"estimate {seed} {name}",
                estimate(plan, models.graph(plan.model), cluster, load_engine(name)).as_json(),
            )
        yield f"estimate bytes {seed}", priced_bytes(plan, cluster, "farspan")


def selections(folder: Path, numbers: range) -> Iterator[tuple[str, Any]]:
    """What selections choose where each trial takes a seeded share more or less than predicted; the
    paper's too."""
    for seed in numbers:
        asked = world(seed, folder)

        def measure(plan: Plan, step_s: float) -> Trial:
            at = [device.index for device in plan.devices]
            stages = [len(one.stages) for one in plan.replicas]
            drawn = zlib.crc32(f"{plan.technique} {at} {stages}".encode()) % 1000
            if drawn > 900:
                return Trial(plan="", status="oom", took_s=12.0)
            took = step_s * (0.7 + 0.9 * drawn / 1000)
            return Trial(plan="", status="ok", took_s=12.0, steps=(took,) * 3, step_s=took)

        question = SelectionTask(
            model=asked.model,
            train=asked.train,
            engine=load_engine("farspan"),
            objective=asked.objective,
        )
        found = select_by_trials(asked.cluster, question, measure, budget_s=200.0)
        yield (
            f"select {asked.name}",
            {
                "chosen": found.ranking.chosen,
                "ended": found.ended,
                "spent_s": found.spent_s,
                "tried": [
                    (one.technique, one.where, trial.status, trial.step_s)
                    for one, trial in found.tried
                ],
                "candidates": [_listed(one) for one in found.ranking.listed],
            },
        )
        if len(asked.cluster.hosts) == 2:
            yield (
                f"select by algorithm1 {asked.name}",
                algorithm1.choose(asked.cluster, question, measure, 0.1, say=lambda one: None),
            )


def commands(of: Sequence[tuple[str, ...]], name: str) -> Iterator[tuple[str, Any]]:
    """Exit codes of commands, and what they print with `--json`."""
    with desk() as folder:
        for words in of:
            out = io.StringIO()
            said = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
                try:
                    code = main([*words, "--json"] if words[0] != "--version" else list(words))
                except SystemExit as ended:
                    code = int(ended.code or 0)
            text = out.getvalue().replace(str(folder), "DESK")
            answer = json.loads(text) if text.startswith("{") else None
            # Keys once more: those of what is volatile or prose are left out of the answer.
            keys = {"keys": json.dumps(keys_of(answer))}
            yield f"{name} {' '.join(words)}", {"exit": code, "json": answer, "all_keys": keys}


def _listed(one: Candidate | Refused) -> dict[str, Any]:
    """A candidate, or a technique without a plan, under the same keys, as older dumps have them."""
    about = {"technique": one.technique, "where": one.where, "places": one.places}
    if isinstance(one, Refused):
        blank = {"plan": None, "estimate": None, "unchosen": None, "eligible": False, "usd": None}
        times = {"time_s": math.inf, "queue_s": 0.0, "lease_s": math.inf}
        return {**about, **blank, **times, "problem": one.problem}
    names = ("plan", "time_s", "queue_s", "lease_s", "unchosen", "eligible", "usd")
    figures = {name: getattr(one, name) for name in names}
    return {**about, **figures, "estimate": one.estimate.as_json(), "problem": None}


def plain(value: Any) -> Any:
    """Without what is volatile; infinities as words."""
    value = msgspec.to_builtins(value, enc_hook=str)
    return _plain(value)


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _plain(part) for key, part in value.items() if key not in VOLATILE}
        case list() | tuple():
            return [_plain(part) for part in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def without_prose(value: Any) -> Any:
    """A dump without what may be said better."""
    match value:
        case {"code": code, "remedy": _}:
            return {"code": code}
        case dict():
            return {key: without_prose(part) for key, part in value.items() if key not in PROSE}
        case list():
            return [without_prose(part) for part in value]
    return value


#: Commands of several seconds; none needs what another has written.
SLOW = tuple(
    words
    for words in COMMANDS
    if words[:2] in (("reproduce", "fabric"), ("reproduce", "slm-cost"))
    or words[0] == "fit"
    or "70B" in words
)
QUICK = tuple(words for words in COMMANDS if words not in SLOW)
BEHAVIOUR = {"curves": curves, "bytes": link_bytes, "small": small_run, "openapi": openapi}
#: The parts of a dump; what the tests repeat of them.
PARTS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    "rank": lambda folder: rankings(folder, range(0, WORLDS, 9)),
    "estimate": lambda folder: estimates(folder, range(0, UNPLANNED, 4)),
    "select": lambda folder: selections(folder, range(3)),
    "farspan": lambda folder: commands(QUICK, "farspan"),
    "slow farspan": lambda folder: commands(SLOW, "slow farspan"),
    **BEHAVIOUR,
}
WHOLE = {
    "rank": lambda folder: rankings(folder, range(WORLDS)),
    "estimate": lambda folder: estimates(folder, range(UNPLANNED)),
    "select": lambda folder: selections(folder, range(SELECTED)),
    "farspan": lambda folder: commands(QUICK, "farspan"),
    "slow farspan": lambda folder: commands(SLOW, "slow farspan"),
    **BEHAVIOUR,
}


def dump(names: Sequence[str], *, whole: bool) -> dict[str, Any]:
    """These parts, or of them what the tests repeat. Each key begins with the name of its part."""
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for key, value in (WHOLE if whole else PARTS)[name](Path(folder)):
                found[key] = plain(value)
                print(key, file=sys.stderr)
    return found


def part_of(key: str) -> str:
    """The part that makes this entry of a dump."""
    first = key.split()[0]
    return "slow farspan" if first == "slow" else first


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return found


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the dump here")
    parser.add_argument(
        "--whole", action="store_true", help="all questions, not only those that the tests repeat"
    )
    parser.add_argument("--no-prose", action="store_true", help="without sentences for people")
    parser.add_argument("--against", type=Path, help="say how it differs from this older dump")
    parser.add_argument(
        "--loose", action="store_true", help="the older dump is of another kind of processor"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these (default: all)")
    given = parser.parse_args()
    print(f"of {Path(farspan.__file__).parent}", file=sys.stderr)
    found = dump(given.parts or list(PARTS), whole=given.whole)
    if given.no_prose:
        found = without_prose(found)
    if given.out:
        given.out.write_bytes(lzma.compress(json.dumps(found, sort_keys=True).encode()))
    if given.against:
        old = read(given.against)
        if given.parts:
            old = {key: value for key, value in old.items() if part_of(key) in given.parts}
        if given.no_prose:
            old = without_prose(old)
        lines = list(differences(old, found, 1e-12, loose=given.loose))
        print("\n".join([*lines, f"{len(old)} entries, {len(lines)} differences"]))
        return int(bool(lines))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "100")
    raise SystemExit(_main())
