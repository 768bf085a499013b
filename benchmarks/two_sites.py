"""Do two sites help? Seconds to one site's final validation loss, over an emulated 103 ms and 1
Gbit/s.

    python benchmarks/two_sites.py [--seeds 0 1 2] [--steps 150] [--batch 16] [--techniques
    pipeshard,diloco] python benchmarks/two_sites.py --quick          # a look of a minute or two;
    writes nothing here

The promise: two sites, each on a core of its own, reach one site's final validation loss in at most
0.7 of its time. The lab is that of wan.py, and one site is its site a alone. It is measured as
`farspan probe` does, and the planner is asked for plans of one site, of both with every technique
that takes the same steps (with sums in 16 bits between sites, and a schedule 4 % longer), and of
both with DiLoCo; each time for one worker a site and for two that share its core, of which the plan
is taken that is faster in a trial. All have a complete schedule; the text is the built-in corpus,
the model GPT-2-like. The learning rate is tuned first, on one site (shorter runs, seed 0), and is
then everyone's.

Seconds count from the end of a run's first step to the first validation, itself included, whose
loss is at most one site's last of that seed, for one site as for two. The table is made by
_two_sites_records.py.

All is appended to results/two_sites.jsonl as it comes. What is there already is not run again (a
failed run is, with
--retry), so the same command goes on where it was stopped. The table is printed, and written beside
  it as Markdown. It needs a Linux machine that allows labs, with nothing else running.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import _wan_cells as cells
import msgspec
import wan
from _two_sites_records import (
    DILOCO,
    ONE,
    RTT_MS,
    SAME,
    TUNING,
    VOCAB,
    Planned,
    Probed,
    Record,
    Run,
    Work,
    course,
    described,
    known,
    read,
    table,
    tuned,
)
from _wan_plans import ENGINE
from _wan_records import append

from farspan import techniques
from farspan.corpus.prepare import prepare_corpus
from farspan.domain.cluster import Cluster
from farspan.domain.config import DataConfig, TokenizerConfig
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.domain.run import cache_folder
from farspan.domain.run_events import Started, Step, Validated
from farspan.launch.cluster_measurement import measure_cluster
from farspan.launch.trial import run_trial, trial_limits
from farspan.planning.candidate import Candidate
from farspan.planning.rank_plans import rank_plans
from farspan_lab.cluster import of_lab

RESULTS = Path(__file__).parent / "results" / "two_sites.jsonl"
TUNING_SEED = 0
#: Workers a site that the planner is asked about.
WORKERS = (1, 2)
#: Steps of a trial.
TRIED = 6


class Bench:
    """One session: its lab, and the file that it appends to."""

    def __init__(
        self, given: argparse.Namespace, work: Work, corpus: Path, file: IO[bytes], out: Path
    ) -> None:
        self.given = given
        self.work = work
        self.corpus = corpus
        self._file = file
        self.records = read(out)
        self.session = time.strftime("%Y-%m-%dT%H:%M:%S")
        self.labs = dict[float, str]()

    def write(self, record: Record) -> None:
        self.records.append(record)
        append(self._file, record)

    def known(self, kind: type[Any], **values: object) -> list[Any]:
        """Return the records of a kind that have these values, for this work."""
        return known(self.records, kind, self.work, **values)

    # -- plans
    #   --------------------------------------------------------------------------------------------

    def plan(self, arms: dict[str, list[str]]) -> None:
        """Measure the lab and choose every arm's plan, where that was not done."""
        if not self.known(Probed):
            print("probing", flush=True)
            status = cells.status(self.labs[RTT_MS])
            measured = measure_cluster(of_lab(status), self.work.spec, lambda text: None).cluster
            plain = {
                count: msgspec.to_builtins(wan.bare(measured, count), str_keys=True)
                for count in WORKERS
            }
            self.write(Probed(session=self.session, work=self.work, clusters=plain))
        clusters = [
            msgspec.convert(one, Cluster, str_keys=True)
            for one in self.known(Probed)[0].clusters.values()
        ]
        for arm, names in arms.items():
            if self.known(Planned, arm=arm):
                continue
            parts = [
                one.first(len(one.sites[0].hosts[0].devices)) if arm == ONE else one
                for one in clusters
            ]
            best_by = {
                count: self._best(one, names, arm)
                for count, one in zip(WORKERS, parts, strict=True)
            }
            found = {count: best for count, best in best_by.items() if best is not None}
            tried = {
                count: took for count, one in found.items() if (took := self._took(one)) is not None
            }
            if not tried:
                sys.exit(f"the planner has no plan that runs for: {arm}")
            best = found[min(tried, key=tried.__getitem__)]
            self.write(
                made := Planned(
                    session=self.session,
                    work=self.work,
                    arm=arm,
                    plan=msgspec.to_builtins(best.plan),
                    step_s=best.estimate.step_s,
                    interval=best.estimate.interval,
                    tried=tried,
                )
            )
            print(f"{arm}: {described(made)}; {made.step_s:.3f} s a step predicted", flush=True)

    def _best(self, cluster: Cluster, names: Sequence[str], arm: str) -> Candidate | None:
        """Return the planner's choice with all devices. DiLoCo counts though no published run is as
        small."""
        train = self.work.train(self.work.steps, 1e-3, 0, arm)
        found = rank_plans(
            self.work.spec,
            cluster,
            train,
            load_engine(ENGINE),
            allow=names,
            corpus=self.work.corpus,
            parts=False,
        ).candidates
        asked = [one for one in found if one.eligible or one.technique == DILOCO]
        return min(asked or found, key=lambda one: one.time_s, default=None)

    def _took(self, one: Candidate) -> float | None:
        """Seconds a step in a trial."""
        cluster = of_lab(cells.status(self.labs[RTT_MS]))
        within = trial_limits(one.plan, cluster, one.estimate.step_s, TRIED)
        return run_trial(one.plan, self.corpus, cluster, "local", within).step_s

    # -- runs
    #   --------------------------------------------------------------------------------------------

    def run(self, arm: str, lr: float, seed: int) -> None:
        """One run, unless it is there."""
        if any(
            not one.failed or not self.given.retry
            for one in self.known(Run, arm=arm, lr=lr, seed=seed)
        ):
            return
        about: dict[str, Any] = {
            "session": self.session,
            "work": self.work,
            "arm": arm,
            "lr": lr,
            "seed": seed,
            "at": time.time(),
            "load_before": os.getloadavg()[0],
        }
        plan = msgspec.convert(self.known(Planned, arm=ONE if arm == TUNING else arm)[0].plan, Plan)
        steps = self.work.tune_steps if arm == TUNING else self.work.steps
        plan = msgspec.structs.replace(plan, train=self.work.train(steps, lr, seed, arm))
        try:
            with cells.Relay(lab := self.labs[RTT_MS]) as relay:
                events = cells.run(
                    plan, self.corpus, of_lab(cells.status(lab)), self.given.deadline
                )
            raw = tuple(event for event in events if isinstance(event, Started | Step | Validated))
            cpu_s, *_ = relay.between(raw[0].at, raw[-1].at)
            made = Run(**about, raw=raw, relay_share=cpu_s / (raw[-1].at - raw[0].at))
        except Exception as error:  # Whatever a run dies of, the others go on.
            made = Run(**about, failed=wan.why(error))
        self.write(made)
        end = None if made.failed else course(made)[-1]
        said = f"loss {end.loss:.4f} after {end.at_s:.1f} s" if end else f"failed: {made.failed}"
        print(f"{arm}, lr {lr:g}, seed {seed}: {said}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=None, metavar="N", help="default: 0 1 2"
    )
    parser.add_argument("--steps", type=int, help="of every run (default: 150)")
    parser.add_argument(
        "--tune-steps", type=int, help="of the runs that tune the learning rate (default: 75)"
    )
    parser.add_argument(
        "--lr", type=float, nargs="+", help="that are tried (default: 3e-4 6e-4 1.2e-3 2.4e-3)"
    )
    parser.add_argument("--batch", type=int, help="sequences of 256 tokens a step (default: 16)")
    parser.add_argument(
        "--techniques",
        type=lambda text: text.split(","),
        default=list(techniques.technique_names()),
        help="that two sites may use, with commas (default: all)",
    )
    parser.add_argument(
        "--deadline", type=float, default=1800.0, metavar="S", help="of a run (default: 1800)"
    )
    parser.add_argument("--retry", action="store_true", help="make runs that failed again")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, one seed, into a temporary file"
    )
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.name} in results")
    given = parser.parse_args()
    usual: dict[str, Any] = {"seeds": [0, 1, 2], "steps": 150, "tune_steps": 75, "batch": 16}
    usual |= {"lr": [3e-4, 6e-4, 1.2e-3, 2.4e-3], "shape": (4, 256, 256), "validate": (10, 16384)}
    if given.quick:
        usual |= {"seeds": [0], "steps": 20, "tune_steps": 4, "batch": 8, "lr": [3e-3]}
        usual |= {"shape": (2, 64, 64), "validate": (5, 1024)}
    for key, value in usual.items():
        setattr(given, key, value if getattr(given, key, None) is None else getattr(given, key))
    if unknown := set(given.techniques) - set(techniques.technique_names()):
        parser.error(
            f"no technique {min(unknown)}; there are: {', '.join(techniques.technique_names())}"
        )
    return given


def main() -> None:
    given = arguments()
    corpus, manifest = prepare_corpus(
        DataConfig(source="pydocs"),
        TokenizerConfig(vocab=VOCAB),
        cache_folder() / "corpora",
        workers=1,
        write_line=print,
    )
    (layers, width, context) = given.shape
    (every, tokens) = given.validate
    work = Work(
        layers=layers,
        width=width,
        context=context,
        batch=given.batch,
        steps=given.steps,
        tune_steps=given.tune_steps,
        validate_every=every,
        validate_tokens=tokens,
        corpus=manifest.hash,
    )
    synchronous = [name for name in techniques.technique_names() if name != DILOCO]
    asked = [name for name in synchronous if name in given.techniques]
    arms = {ONE: synchronous}
    arms |= {SAME: asked} if asked else {}
    arms |= {DILOCO: [DILOCO]} if DILOCO in given.techniques else {}
    # A lab must be taken down also when the benchmark is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        out, file = stack.enter_context(wan.results(given, RESULTS))
        bench = Bench(given, work, corpus, file, out)
        bench.labs = stack.enter_context(wan.labs((RTT_MS,)))
        bench.write(wan.started(bench.session, bench.labs))
        bench.plan(arms)
        for lr in given.lr:
            bench.run(TUNING, lr, TUNING_SEED)
        best = next(iter(tuned(bench.records, work)), None)
        if best is None:
            sys.exit("no learning rate could be tried; --retry tries again")
        for seed in given.seeds:
            for arm in arms:
                bench.run(arm, best, seed)
        print(f"\n{table(bench.records, work)}")
        works = dict.fromkeys(one.work for one in bench.records if isinstance(one, Run))
        made = [table(bench.records, one) for one in works]
        out.with_suffix(".md").write_text("\n".join(["# Do two sites help?\n", *made]))


if __name__ == "__main__":
    main()
