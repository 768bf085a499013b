"""Measuring a matrix: labs up for their cells, one cell after another, nothing
twice."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import random
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from farspan._version import __version__
from farspan.app.clusters import exclusive_launcher
from farspan.domain.cluster import Cluster
from farspan.domain.cluster_json import load_cluster_json, save_cluster_json
from farspan.domain.corpus import CorpusManifest
from farspan.domain.decoding import decode_json
from farspan.domain.engine import load_engine
from farspan.domain.escapes import shell_word
from farspan.domain.model import count_parameters
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import cache_folder, source_commit
from farspan.domain.struct_files import (
    content_hash,
    cut_unfinished_line,
    is_content_hash,
    load,
    save,
)
from farspan.domain.units import format_seconds, parse_count, parse_duration, short_time
from farspan.launch.folder_lock import lock_file
from farspan.launch.trial import NUM_WARMUP_STEPS, TrialLimits, predicted_s, run_trial
from farspan.planning.model_speed import hourly_price
from farspan.planning.quantities import parse_positive
from farspan.semantics.identity import lasting
from farspan_studies.bench.cases import MATRIX, Case, case, check_techniques, key_of, spec_of
from farspan_studies.bench.clusters import There, bare, clusters_of, figures_hash
from farspan_studies.bench.made_corpus import make
from farspan_studies.bench.matrix import Cell, Matrix, Row, Status, cells, figures, latest
from farspan_studies.bench.trials import TRIAL_S, TriedPaces
from farspan_studies.papers.published import alpa_tflops

#: A matrix of more cells, or of more seconds, asks first; so many of them, drawn by its seed, say
#: what all would take.
MANY = 200
LONG_S = 3600.0
#: Tokens of the made-up corpus that every cell trains on.
TOKENS = 2_000_000
#: Steps that are predicted to take longer than this together are made fewer times: one that warms
#: up, and one that is timed, at least.
LONGEST_S = 20.0
#: Seconds of a cell beside its steps, for the time that is said before a matrix is begun.
CELL_S = 15.0


class Results:
    """The folder of a matrix's results: `rows.jsonl` as it comes, every plan, and the rows as one
    Parquet table."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "rows.jsonl"
        self.table = folder / "results.parquet"
        self.trials = folder / "trials"

    def read(self) -> list[Row]:
        """Each cell's last row; a last line that a killed process left unfinished is left out.
        Raises Refusal for rows that another version wrote."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        try:
            return latest(decode_json(line, Row) for line in lines)
        except msgspec.DecodeError as error:
            raise Refusal(
                "version-mismatch",
                what="the results were written by another version of farspan",
                where=self.path,
                fact=str(error),
                remedy=f"mv {shell_word(self.folder)} ELSEWHERE   (then measure again)",
            ) from None

    def plan(self, hash_: str) -> Plan:
        """Return a row's plan. Raises Refusal where its file is gone."""
        return load(self._named("plans", hash_), Plan)

    def cluster(self, hash_: str) -> Cluster:
        """Return a row's cluster. Raises Refusal where its file is gone."""
        return load_cluster_json(self._named("clusters", hash_))

    def _named(self, folder: str, hash_: str) -> Path:
        if not is_content_hash(hash_):
            raise Refusal(
                "file-unreadable",
                what="a row names no file of these results",
                where=self.path,
                fact=f"{hash_[:80]!r} is no hash of 16 hexadecimal digits",
                remedy="take that row out, or measure it again",
            )
        return self.folder / folder / f"{hash_}.json"

    def add(self, row: Row, plan: Plan | None, cluster: Cluster) -> None:
        """Append a row; its plan and its cluster go beside it."""
        for name in ("plans", "clusters"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        save_cluster_json(bare(cluster), self.folder / "clusters" / f"{row.cluster_hash}.json")
        if plan is not None:
            save(plan, self.folder / "plans" / f"{row.plan_hash}.json")
        with open(self.path, "ab") as file:
            cut_unfinished_line(self.path)
            file.write(msgspec.json.encode(row) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def held(self) -> IO[bytes]:
        """One measures into the folder at a time, until this is closed. Raises Refusal
        (run-busy)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return lock_file(
            self.folder / ".lock", "this matrix is being measured already", self.folder
        )

    def write_table(self) -> None:
        """All rows as one table, a column a field."""
        import pyarrow
        import pyarrow.parquet

        flat = []
        for row in self.read():
            fields = msgspec.to_builtins(row)
            flat.append(
                {**{f"cell_{name}": value for name, value in fields.pop("cell").items()}, **fields}
            )
        if flat:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), self.table)


class Todo(NamedTuple):
    """A cell and what it means."""

    key: str
    case: Case
    #: As its file or its lab says, before a trial.
    cluster: Cluster
    corpus: Path
    launcher: str

    def seconds(self, matrix: Matrix) -> float:
        """Return what it is predicted to take."""
        if self.case.estimate is None:
            return 0.0
        assert isinstance(self.case.made, Plan)
        step_s = self.case.estimate.step_s
        warmup, steps = steps_of(matrix, step_s)
        return CELL_S + predicted_s(self.case.made, self.case.cluster, step_s, steps, warmup)


def measure(
    matrix: Matrix,
    results: Results,
    say: Callable[[str], None],
    *,
    agreed: bool,
    retry: bool = False,
) -> list[Row]:
    """Measure what is missing and return all rows. Without `agreed`, refuses a long matrix."""
    check_techniques(matrix)
    parse_positive(parse_duration, matrix.deadline, "deadline", "5m", MATRIX)
    with contextlib.ExitStack() as stack:
        stack.enter_context(results.held())  # Before anything that would disturb who measures here.
        rows = results.read()
        wanted = cells(matrix)
        refuse_other_versions(results, rows)
        known = {row.key for row in rows if not (retry and may_pass(row))}
        some = wanted
        many = not agreed and len(wanted) - len(known) > MANY
        if many:
            some = random.Random(matrix.seed).sample(wanted, MANY)
        say(f"{len(wanted):,} cells: pricing {f'{MANY} of them' if many else 'them'}")
        clusters = stack.enter_context(clusters_of(matrix, {cell.cluster: None for cell in some}))
        refuse_changed(clusters, rows)
        paces = TriedPaces(results.trials, matrix, clusters)
        every, todo = meanings(matrix, some, clusters, paces, known)
        if not many:
            refuse_impossible(every)
        untried = paces.missing((item.case for item in todo), retry=retry)
        seconds = len(wanted) / len(some) * sum(
            item.seconds(matrix) for item in todo
        ) + TRIAL_S * len(untried)
        if many or (not agreed and (len(todo) > MANY or seconds > LONG_S)):
            raise too_long(matrix, len(wanted) / len(some) * len(todo), seconds)
        if untried:
            paces.make(untried, say)
            every, todo = meanings(matrix, some, clusters, paces, known)
            seconds = sum(item.seconds(matrix) for item in todo)
            if (
                not agreed and seconds > LONG_S
            ):  # Longer than it seemed before the trials, which are kept.
                raise too_long(matrix, len(todo), seconds)
        say(
            f"{len(wanted)} cells, {len(wanted) - len(todo)} of them measured already, {len(todo)} "
            "to measure: about "
            f"{format_seconds(seconds)}"
        )
        stack.callback(results.write_table)
        reprice(results, every)
        for number, item in enumerate(todo):
            row, plan = measured(matrix, item)
            results.add(row, plan, item.cluster)
            say(f"{number + 1}/{len(todo)} {line(row)}")
    return results.read()


def meanings(
    matrix: Matrix,
    wanted: Sequence[Cell],
    clusters: There,
    paces: TriedPaces,
    known: Collection[str],
) -> tuple[list[Todo], list[Todo]]:
    """Return what cells mean, all and those that are not `known` by their keys."""
    every = [meant(matrix, cell, clusters[cell.cluster], paces) for cell in wanted]
    return every, [item for item in every if item.key not in known]


def may_pass(row: Row) -> bool:
    """Whether a cell may run another time: it failed, or was killed, maybe for another program's
    memory."""
    return row.status == "failed" or (row.status == "oom" and row.signal == "SIGKILL")


def refuse_other_versions(results: Results, rows: Sequence[Row]) -> None:
    if others := sorted({row.farspan for row in rows} - {__version__}):
        raise Refusal(
            "version-mismatch",
            what="the results were measured with another version of farspan",
            where=results.path,
            fact=f"with {', '.join(others)}; this is {__version__}",
            remedy=f"measure into another folder: -o {shell_word(f'{results.folder}-2')}",
        )


def too_long(matrix: Matrix, count: float, seconds: float) -> Refusal:
    return Refusal(
        "usage",
        what=f"the matrix has {count:,.0f} cells to measure",
        where=f"matrix {matrix.name}",
        fact=f"they are predicted to take {format_seconds(seconds)}",
        remedy="add --yes, or make the lists shorter",
    )


def refuse_changed(clusters: There, rows: Sequence[Row]) -> None:
    """Refuse rows that were measured on a cluster when it was another."""
    for row in rows:
        _, cluster_hash = clusters.get(row.cell.cluster, (None, row.cluster_hash))
        if row.cluster_hash != cluster_hash:
            raise Refusal(
                "plan-mismatch",
                what=f"the cluster {row.cell.cluster!r} changed since it was measured",
                where="key clusters",
                fact=f"rows are of cluster {row.cluster_hash}, this is {cluster_hash}",
                remedy=(
                    "give it another name in the matrix, or measure into another folder: -o FOLDER"
                ),
            )


def meant(matrix: Matrix, cell: Cell, described: tuple[Cluster, str], paces: TriedPaces) -> Todo:
    """Return a cell as a plan, priced on its cluster as far as that was tried."""
    (cluster, cluster_hash) = described
    entry = matrix.clusters[cell.cluster]
    launcher = exclusive_launcher(entry) or "local" if isinstance(entry, str) else "local"
    folder, manifest = corpus(spec_of(matrix.models[cell.model]).vocab_size, matrix.seed)
    priced = case(cell, matrix, paces.cluster(cell), load_engine("farspan"), manifest.hash)
    if isinstance(
        priced.made, Plan
    ):  # Known again on another day: without the processes of a lab, and prices.
        priced = priced._replace(made=lasting(priced.made, bare(cluster)))
    return Todo(key_of(matrix, priced, cluster_hash), priced, cluster, folder, launcher)


def refuse_impossible(every: Sequence[Todo]) -> None:
    """Return a number of devices that no cluster has, or a length that no model allows, is a
    mistake; what some lack is a row without a plan."""
    for code, of in (("device-missing", "devices"), ("out-of-range", "seq_len")):
        problems: dict[object, list[Problem | None]] = {}
        for item in every:
            planned = item.case.made
            lacks = planned if isinstance(planned, Problem) and planned.code == code else None
            problems.setdefault(getattr(item.case.cell, of), []).append(lacks)
        for each in problems.values():
            if each[0] is not None and None not in each:
                raise Refusal.of(each[0])


def corpus(vocab: int, seed: int) -> tuple[Path, CorpusManifest]:
    """Made-up tokens of a vocabulary, made or found."""
    folder = cache_folder() / "corpora" / f"made-{vocab}-{seed}"
    if not (folder / "corpus.json").exists():
        make(folder, vocab, TOKENS, seed)
    return folder, load(folder / "corpus.json", CorpusManifest)


def measured(matrix: Matrix, todo: Todo) -> tuple[Row, Plan | None]:
    """One cell, run; or the row of one that has no plan."""
    priced = todo.case
    at = datetime.now(UTC).isoformat(timespec="seconds")
    if not isinstance(priced.made, Plan) or priced.estimate is None:
        assert isinstance(priced.made, Problem)
        short = priced.made.code == "out-of-memory"
        cause = f"{priced.made.what} ({priced.made.fact})"
        return row_of(
            matrix, todo, at, status="oom" if short else "no-plan", cause=f"not run: {cause}"
        ), None
    deadline_s = parse_positive(parse_duration, matrix.deadline, "deadline", "5m", MATRIX)
    warmup, steps = steps_of(matrix, priced.estimate.step_s)
    within = TrialLimits(steps=steps, deadline_s=deadline_s, warmup=warmup)
    try:
        result = run_trial(priced.made, todo.corpus, priced.cluster, todo.launcher, within)
    except OSError as error:  # As of a full disk: other cells may be measured.
        return row_of(matrix, todo, at, status="failed", cause=str(error)), priced.made
    row = row_of(
        matrix,
        todo,
        at,
        status=result.status,
        cause="" if result.problem is None else told(result.problem),
    )
    environment = result.environment
    signal = None if result.problem is None else result.problem.signal
    peak = max(result.memory_bytes.values(), default=None)
    row = msgspec.structs.replace(row, took_s=result.took_s, memory_bytes=peak, signal=signal)
    if environment is not None:
        row = msgspec.structs.replace(
            row,
            commit=environment.commit,
            torch=environment.torch,
            python=environment.python,
            machine=environment.device,
        )
    if result.step_s is not None:
        derived = msgspec.structs.asdict(figures(row, result.step_s))
        row = msgspec.structs.replace(row, step_s=result.step_s, steps_s=result.steps, **derived)
    return row, priced.made


def reprice(results: Results, every: Sequence[Todo]) -> None:
    """Return what was measured at other prices, or at none, is told at those that the matrix has
    now."""
    known = {row.key: row for row in results.read()}
    for item in every:
        row = known.get(item.key)
        usd = hourly_price(item.case.cluster.only(item.case.places))
        if row is not None and row.usd_per_hour != usd:
            row = msgspec.structs.replace(row, usd_per_hour=usd)
            derived = {} if row.step_s is None else msgspec.structs.asdict(figures(row, row.step_s))
            results.add(msgspec.structs.replace(row, **derived), None, item.cluster)


def steps_of(matrix: Matrix, step_s: float) -> tuple[int, int]:
    """How many steps of a cell warm it up, and how many are timed."""
    steps = max(1, round(LONGEST_S / step_s))
    return min(NUM_WARMUP_STEPS, steps), min(matrix.steps, steps)


def row_of(matrix: Matrix, todo: Todo, at: str, *, status: Status, cause: str) -> Row:
    """Return a row before anything was measured: what the cell means, and its prediction."""
    priced = todo.case
    estimate = todo.case.estimate
    plan = priced.made if isinstance(priced.made, Plan) else None
    low, high = estimate.interval if estimate is not None else (1.0, 1.0)
    step_s = None if estimate is None else estimate.step_s
    flops = 1e12 * alpa_tflops(priced.model, priced.train.batch, priced.train.seq_len, 1.0, 1)
    run_tokens = parse_positive(parse_count, matrix.tokens, "tokens", "10M", MATRIX)
    used = dict.fromkeys(device.host for device in plan.devices) if plan else {}
    links = [priced.cluster.link(a, b) for a, b in itertools.combinations(used, 2)]
    return Row(
        matrix=matrix.name,
        cell=priced.cell,
        key=todo.key,
        cluster_hash=figures_hash(todo.cluster),
        model_hash=content_hash(priced.model),
        plan_hash=None if plan is None else plan.hash,
        status=status,
        cause=cause,
        used=len(priced.places)
        or (int(priced.cell.devices) if priced.cell.devices.isdigit() else 0),
        rows=priced.train.batch,
        parameters=count_parameters(priced.model),
        step_tokens=priced.train.tokens_per_step,
        step_flops=flops,
        run_tokens=run_tokens,
        predicted_s=step_s,
        predicted_low_s=None if step_s is None else low * step_s,
        predicted_high_s=None if step_s is None else high * step_s,
        predicted_memory_bytes=None if estimate is None else estimate.memory_bytes,
        usd_per_hour=hourly_price(priced.cluster.only(priced.places)),
        rtt_s=max((link.rtt_s for link in links if link is not None), default=None),
        at=at,
        seed=matrix.seed,
        farspan=__version__,
        commit=source_commit(),
        torch=version("torch"),
        python=platform.python_version(),
    )


def told(problem: Problem) -> str:
    return f"{problem.what}: {problem.fact}"


def line(row: Row) -> str:
    """`pipeshard of gpt2m on all of UTAH-GPN, 8 x 64, fp32: 0.41 s a step, predicted 0.39 s`."""
    if row.step_s is None:
        return f"{row.cell}: {row.status}, {row.cause}"
    said = f", predicted {short_time(row.predicted_s)}" if row.predicted_s is not None else ""
    return f"{row.cell}: {short_time(row.step_s)} a step{said}"
