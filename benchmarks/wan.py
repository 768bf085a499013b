"""Seconds a step of every technique, and of stock PyTorch, over emulated wide-area links.

    python benchmarks/wan.py [--only 'ddp-*,data'] [--model paper] [--sequences 32] [--rtt 20,103]
    python benchmarks/wan.py --slow 0.25 --rtt 20                       # unlike devices: those of
    site b half as fast python benchmarks/wan.py --drawn 4 --seed 7 --only 'farspan/*'      # cells
    that a seed draws python benchmarks/wan.py --quick --only ddp-25,1f1b-4,data          # a look;
    writes nothing here

Two sites of two workers in a `farspan lab`, 1 Gbit/s between them, TCP alike for all. Each site has
one core of its own (so the machine needs two) and each worker one thread: the two of a site share
it. Contestants are stock PyTorch (`torch/...`, see wan_contestants.py) and farspan's own workers
running one plan each (`farspan/...`: _wan_plans.py).

Before any plan runs, the lab is measured over every link as `farspan probe` does, and every plan is
priced. Then cells run one at a time in fresh processes: all contestants over all links, then all
again. All is appended to results/wan.jsonl as it comes. What is there already is not run again (a
failed cell is, with --retry), so the same command goes on where it was stopped; delete the file to
start over. The table is printed, and written beside it as Markdown.

It needs a Linux machine that allows labs, with nothing else running.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import _wan_cells as cells
import _wan_plans as plans
import msgspec
from _wan_plans import Work
from _wan_records import Cell, Predicted, Probed, Record, Session, append, read, table

from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import convert, parse_yaml
from farspan.estimate.estimate_plan import estimate
from farspan.launch.cluster_measurement import measure_cluster
from farspan_lab import spec, state
from farspan_lab.cluster import of_lab

RESULTS = Path(__file__).parent / "results" / "wan.jsonl"
RTTS_MS = (0.1, 20.0, 57.0, 103.0)
BANDWIDTH = "1Gbit/s"
#: Contestants of a drawn column.
DRAWN = 4


class Bench:
    """One session: its labs by round trip, and the file that it appends to."""

    def __init__(
        self,
        given: argparse.Namespace,
        work: Work,
        labs: dict[float, str],
        file: IO[bytes],
        records: list[Record],
    ) -> None:
        self.given = given
        self.work = work
        self.labs = labs
        self._file = file
        self.records = records
        self.session = time.strftime("%Y-%m-%dT%H:%M:%S")

    def write(self, record: Record) -> None:
        self.records.append(record)
        append(self._file, record)

    def known(self, kind: type[Any], **values: object) -> list[Any]:
        """Return the records of a kind that have these values, for this work."""
        found = (one for one in self.records if isinstance(one, kind) and one.work == self.work)
        return [
            one for one in found if all(getattr(one, key) == value for key, value in values.items())
        ]

    # -- predictions
    #   --------------------------------------------------------------------------------------------

    def predict(self, asked: Mapping[float, Sequence[str]]) -> None:
        """Measure every link that was not, price every plan that was not: contestants by round
        trip."""
        for rtt_ms, names in asked.items():
            missing = [name for name in names if not self._is_priced(name, rtt_ms)]
            if not missing:
                continue
            if not self.known(Probed, rtt_ms=rtt_ms):
                print(f"probing {rtt_ms:g} ms", flush=True)
                status = cells.status(self.labs[rtt_ms])
                found = measure_cluster(
                    of_lab(status),
                    self.work.spec,
                    lambda text: None,
                    seq_len=self.work.seq_len,
                )
                plain = msgspec.to_builtins(bare(found.cluster))
                self.write(
                    Probed(session=self.session, work=self.work, rtt_ms=rtt_ms, cluster=plain)
                )
            measured = msgspec.convert(
                self.known(Probed, rtt_ms=rtt_ms)[0].cluster, Cluster, str_keys=True
            )
            for name in missing:
                self.write(self._priced(name, rtt_ms, measured))

    def _is_priced(self, name: str, rtt_ms: float) -> bool:
        found = self.known(Predicted, rtt_ms=rtt_ms, contestant=name)
        return bool(found) and not (found[-1].problem and self.given.retry)

    def _priced(self, name: str, rtt_ms: float, cluster: Cluster) -> Predicted:
        about: dict[str, Any] = {
            "session": self.session,
            "work": self.work,
            "rtt_ms": rtt_ms,
            "contestant": name,
        }
        task = plans.question(self.work, cluster, self.given.warmup + self.given.steps)
        try:
            plan = plans.plan(name, self.work, task)
            found = estimate(plan, task.graph, cluster, task.engine)
        except Exception as error:  # What cannot be planned or priced fails alone.
            return Predicted(**about, problem=why(error))
        print(f"{rtt_ms:g} ms, {name}: {found.step_s:.3f} s predicted", flush=True)
        return Predicted(
            **about,
            plan=msgspec.to_builtins(plan),
            step_s=found.step_s,
            interval=found.interval,
            compute_s=found.compute_s,
            communication_s=found.communication_s,
            bubble_s=found.bubble_s,
        )

    # -- cells
    #   --------------------------------------------------------------------------------------------

    def run(self, asked: Mapping[float, Sequence[str]]) -> None:
        """Every cell that is not there yet, in the order that spreads a contestant's cells over the
        whole time."""
        for repeat in range(self.given.repeat):
            for rtt_ms, names in asked.items():
                cluster = of_lab(cells.status(self.labs[rtt_ms]))
                for name in names:
                    if not self._done(name, rtt_ms, repeat):
                        self.write(cell := self._cell(name, rtt_ms, repeat, cluster))
                        said = (
                            f"{cell.typical_s:.3f} s" if cell.step_s else f"failed: {cell.failed}"
                        )
                        print(f"{repeat + 1}, {rtt_ms:g} ms, {name}: {said}", flush=True)

    def _done(self, name: str, rtt_ms: float, repeat: int) -> bool:
        found = self.known(Cell, rtt_ms=rtt_ms, contestant=name, repeat=repeat)
        enough = any(len(one.step_s) >= self.given.steps for one in found)
        return enough or (any(one.failed for one in found) and not self.given.retry)

    def _cell(self, name: str, rtt_ms: float, repeat: int, cluster: Cluster) -> Cell:
        about: dict[str, Any] = {
            "session": self.session,
            "work": self.work,
            "rtt_ms": rtt_ms,
            "contestant": name,
            "repeat": repeat,
            "at": time.time(),
            "load_before": os.getloadavg()[0],
        }
        said = next(reversed(self.known(Predicted, rtt_ms=rtt_ms, contestant=name)), None)
        if said is not None:
            about["predicted_s"] = said.step_s
            if said.plan is None:
                return Cell(**about, failed=said.problem)
            about["every"] = (said.plan["sync"] or {}).get("every")
        try:
            with cells.Relay(self.labs[rtt_ms]) as relay:
                found = self._measure(name, said, cluster)
            cpu_s, size, dropped = relay.between(found.began, found.ended)
        except Exception as error:  # Whatever a contestant dies of, the table goes on.
            return Cell(**about, failed=why(error))
        steps = len(found.step_s)
        return Cell(
            **about,
            step_s=found.step_s,
            raw=found.raw,
            relay_share=cpu_s / (found.ended - found.began),
            wan_bytes=size / steps,
            dropped=dropped / steps,
        )

    def _measure(self, name: str, said: Predicted | None, cluster: Cluster) -> cells.Measured:
        given = self.given
        if said is None:
            options = plans.stock(self.work)[name]
            return cells.stock(
                options, self.work, cluster, given.warmup, given.steps, given.deadline
            )
        plan = msgspec.convert(said.plan, Plan)
        plan = msgspec.structs.replace(plan, train=self.work.train(given.warmup + given.steps))
        return cells.ours(plan, self.work, cluster, given.warmup, given.deadline)


def why(error: Exception) -> str:
    if isinstance(error, Refusal):
        return f"{error.problem.code}: {error.problem.what}: {error.problem.fact}"
    return str(error) if isinstance(error, cells.Failed) else f"{type(error).__name__}: {error}"


def bare(cluster: Cluster, workers: int | None = None) -> Cluster:
    """Return a lab's cluster without what is of this machine and this lab alone (commands that
    enter it, interpreters, folders); with the first so many workers of every site."""
    sites = []
    for site in cluster.sites:
        (host,) = site.hosts
        devices = tuple(one.but(enter=None) for one in host.devices[:workers])
        plain = msgspec.structs.replace(
            host, devices=devices, enter=None, python="python3", folder=None
        )
        sites.append(msgspec.structs.replace(site, hosts=(plain,)))
    return msgspec.structs.replace(cluster, sites=tuple(sites))


@contextlib.contextmanager
def labs(rtts_ms: Sequence[float], slow: float = 1.0) -> Iterator[dict[float, str]]:
    """Return a lab for each round trip, all up together and one in use at a time: two sites of two
    devices, on two cores of this machine, one a site; those of site b get such a share of theirs.
    TCP's window is what `farspan lab` gives."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("this benchmark needs two cores, one for each site")
    names = {rtt_ms: f"wan-{os.getpid()}-{number}" for number, rtt_ms in enumerate(rtts_ms)}
    with contextlib.ExitStack() as stack:
        os.sched_setaffinity(0, cores[:2])  # A lab gives its sites what this process may use.
        for rtt_ms, name in names.items():
            link = f"{{between: [a, b], rtt: {rtt_ms}ms, bandwidth: {BANDWIDTH}}}"
            b = f"[{{speed: {slow}}}, {{speed: {slow}}}]"
            text = (
                f"name: {name}\nsites: {{a: {{devices: 2}}, b: {{devices: {b}}}}}\nlinks: "
                f"[{link}]\n"
            )
            state.up(
                spec.read(
                    convert(parse_yaml(text, "lab.yaml"), spec.LabFile, "lab.yaml", text),
                    "lab.yaml",
                )
            )
            stack.callback(state.down, name)
        os.sched_setaffinity(0, cores)
        yield names


@contextlib.contextmanager
def results(given: argparse.Namespace, usual: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Where results are appended to, by one start at a time: `--out`, with `--quick` a temporary
    file, or the usual."""
    with contextlib.ExitStack() as stack:
        temporary = (
            stack.enter_context(tempfile.TemporaryDirectory())
            if given.quick and given.out is None
            else None
        )
        out = Path(temporary, usual.name) if temporary else given.out or usual
        out.parent.mkdir(exist_ok=True)
        file = stack.enter_context(open(out, "ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another start of this benchmark writes to {out}")
        yield out, file


def said_of_here() -> dict[str, Any]:
    """Return what a result must say of this machine and this commit."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    packages = {name: metadata.version(name) for name in ("farspan", "torch", "numpy")}
    return {
        "commit": _git("rev-parse", "--short", "HEAD"),
        "versions": {"python": platform.python_version(), **packages},
        "cpu": next(
            (line.split(": ")[1] for line in cpus if line.startswith("model name")),
            platform.machine(),
        ),
    }


def _git(*words: str) -> str:
    return subprocess.check_output(
        ["git", "-C", str(Path(__file__).parent), *words], text=True
    ).strip()


def started(session: str, labs: dict[float, str]) -> Session:
    windows = {f"{rtt_ms:g} ms": cells.status(name).lab.window for rtt_ms, name in labs.items()}
    status = cells.status(next(iter(labs.values())))
    return Session(
        session=session,
        command=tuple(sys.argv),
        realtime=status.realtime,
        bandwidth=BANDWIDTH,
        changed=bool(_git("status", "--porcelain", "-uno", ":/", ":!results")),
        cores=os.cpu_count() or 1,
        kernel=platform.release(),
        congestion=status.lab.congestion,
        windows=windows,
        **said_of_here(),
    )


def chosen(work: Work, only: Sequence[str]) -> list[str]:
    """Return the contestants that any of the patterns means, with or without the part before the
    slash; all without one."""
    names = [*plans.stock(work), *plans.ours(work)]
    for pattern in only:
        if not any(
            fnmatch.fnmatch(part, pattern) for name in names for part in (name, name.split("/")[1])
        ):
            sys.exit(
                f"no contestant {pattern!r} with {work.sequences} sequences; there are: "
                f"{' '.join(names)}"
            )
    return [
        name
        for name in names
        if not only
        or any(
            fnmatch.fnmatch(part, pattern)
            for pattern in only
            for part in (name, name.split("/")[1])
        )
    ]


def drawn(seed: int, columns: int, names: Sequence[str]) -> dict[float, list[str]]:
    """So many round trips between 0.1 and 150 ms, their logarithms uniform, and DRAWN of the
    contestants over each."""
    rng = random.Random(seed)
    rtts_ms = [
        float(f"{math.exp(rng.uniform(math.log(0.1), math.log(150))):.3g}") for _ in range(columns)
    ]
    return {rtt_ms: rng.sample(names, min(DRAWN, len(names))) for rtt_ms in rtts_ms}


def milliseconds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rtt", type=milliseconds, metavar="MS[,...]", help=f"round trips (default: {RTTS_MS})"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        metavar="CONTESTANT[,...]",
        help="these; * stands for anything",
    )
    parser.add_argument("--repeat", type=int, help="fresh runs of every cell (default: 3)")
    parser.add_argument("--steps", type=int, help="timed steps of a run (default: 10)")
    parser.add_argument("--warmup", type=int, help="steps before them, at least 1 (default: 2)")
    parser.add_argument("--model", choices=tuple(plans.SIZES), default="small")
    parser.add_argument(
        "--sequences",
        type=int,
        default=8,
        metavar="N",
        help="that a step's tokens are divided into; 32 allows 8 and 16 microbatches (default: 8)",
    )
    parser.add_argument(
        "--untied", action="store_true", help="the head is a matrix of its own, for all"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="for all (default: fp32)"
    )
    parser.add_argument(
        "--slow",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of a core that each of site b gets at most (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--drawn",
        type=int,
        metavar="N",
        help=f"N round trips drawn by the seed, and {DRAWN} contestants over each",
    )
    parser.add_argument("--deadline", type=float, metavar="S", help="of a run (default: 600)")
    parser.add_argument("--retry", action="store_true", help="run cells that failed again")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="3 steps once over 0.1 and 20 ms, into a temporary file",
    )
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.name} in results")
    given = parser.parse_args()
    usual = (
        {"rtt": (0.1, 20.0), "repeat": 1, "steps": 3, "warmup": 1, "deadline": 120}
        if given.quick
        else {}
    )
    for key, value in {
        "rtt": RTTS_MS,
        "repeat": 3,
        "steps": 10,
        "warmup": 2,
        "deadline": 600,
        **usual,
    }.items():
        setattr(given, key, value if getattr(given, key) is None else getattr(given, key))
    return given


def main() -> None:
    given = arguments()
    work = Work(
        model=given.model,
        sequences=given.sequences,
        tied=not given.untied,
        seed=given.seed,
        precision=given.precision,
        slow=given.slow,
    )
    if given.warmup < 1 or work.sequences % 4 or work.size.tokens % work.sequences:
        sys.exit("--warmup is 1 at least, --sequences a multiple of 4 that divides a step's tokens")
    names = chosen(work, given.only)
    asked = (
        dict.fromkeys(given.rtt, names)
        if given.drawn is None
        else drawn(given.seed, given.drawn, names)
    )
    # A lab must be taken down also when the benchmark is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        out, file = stack.enter_context(results(given, RESULTS))
        bench = Bench(
            given, work, stack.enter_context(labs(tuple(asked), work.slow)), file, read(out)
        )
        bench.write(started(bench.session, bench.labs))
        priced = plans.ours(work)
        bench.predict(
            {rtt_ms: [name for name in names if name in priced] for rtt_ms, names in asked.items()}
        )
        bench.run(asked)
        works = dict.fromkeys(one.work for one in bench.records if isinstance(one, Cell))
        made = {
            one: table(bench.records, one, [*plans.stock(one), *plans.ours(one)]) for one in works
        }
        print(f"\n{made.get(work, 'nothing measured')}")
        out.with_suffix(".md").write_text(
            "\n".join(["# Seconds a step over wide-area links\n", *made.values()])
        )


if __name__ == "__main__":
    main()
