"""What `benchmarks/wan.py` writes down, one event a line so that it goes on where it was stopped;
and the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
from _wan_plans import Work

#: Steps behind a figure; of fewer it is marked.
ENOUGH = 10


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    #: The session that wrote it.
    session: str


class Session(_Record, frozen=True, kw_only=True, tag="session"):
    """One start of the benchmark: everything that is the same for its cells."""

    command: tuple[str, ...]
    commit: str
    #: Whether tracked files, results left out, differ from the commit.
    changed: bool
    versions: dict[str, str]
    cpu: str
    cores: int
    kernel: str
    #: As the kernels of the sites say it is; windows in bytes, by round trip.
    congestion: str
    windows: dict[str, int]
    bandwidth: str
    realtime: bool


class Probed(_Record, frozen=True, kw_only=True, tag="probed"):
    """The lab as `farspan probe` measures it."""

    work: Work
    rtt_ms: float
    cluster: dict[str, Any]


class Predicted(_Record, frozen=True, kw_only=True, tag="predicted"):
    """What a plan was said to take, before any plan ran; `problem` where it has no price."""

    work: Work
    rtt_ms: float
    contestant: str
    plan: dict[str, Any] | None = None
    step_s: float | None = None
    interval: tuple[float, float] | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    bubble_s: float | None = None
    problem: str | None = None


class Cell(_Record, frozen=True, kw_only=True, tag="cell"):
    """One contestant over one link, once. Without `step_s` it failed."""

    work: Work
    rtt_ms: float
    contestant: str
    repeat: int
    at: float
    load_before: float
    failed: str | None = None
    #: Seconds from the start of each timed step to that of the next, on rank 0.
    step_s: tuple[float, ...] = ()
    #: Steps between meetings, where the replicas meet only then: the figure is a mean over whole
    #: periods.
    every: int | None = None
    #: A core's share that the lab's relay took; bytes that went through it a step, both ways, and
    #: packets that it dropped because a queue was full.
    relay_share: float | None = None
    wan_bytes: float | None = None
    dropped: float | None = None
    predicted_s: float | None = None
    #: Stock PyTorch: what each rank said. farspan: its step events.
    raw: tuple[dict[str, Any], ...] = ()

    @property
    def typical_s(self) -> float:
        if self.every is None:
            return statistics.median(self.step_s)
        # Whole periods, without the first: its meeting touches its memory for the first time.
        whole = max(1, len(self.step_s) // self.every - 1) * self.every
        return statistics.mean(self.step_s[-whole:])


Record = Session | Probed | Predicted | Cell


def read(path: Path) -> list[Record]:
    decoder = msgspec.json.Decoder(Record)
    return (
        [decoder.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    )


def append(file: IO[bytes], record: msgspec.Struct) -> None:
    file.write(msgspec.json.encode(record) + b"\n")
    file.flush()


def table(records: Sequence[Record], work: Work, names: Sequence[str]) -> str:
    """Markdown of one work: steps, predictions beside them, what the link carried, what failed."""
    cells = [one for one in records if isinstance(one, Cell) and one.work == work]
    rtts = sorted({one.rtt_ms for one in cells})
    by = {
        (n, r): [c for c in cells if (c.contestant, c.rtt_ms) == (n, r)]
        for n in names
        for r in rtts
    }
    there = [name for name in names if any(by[name, rtt] for rtt in rtts)]

    def grid(cell: Callable[[Sequence[Cell]], str], of: Sequence[str]) -> str:
        return _grid(
            [f"{rtt:g} ms" for rtt in rtts],
            {name: [cell(by[name, rtt]) for rtt in rtts] for name in of},
        )

    picks = [
        _pick(one)
        for one in records
        if isinstance(one, Predicted) and one.work == work and _is_pick(one)
    ]
    failed = [
        f"- {one.contestant}, {one.rtt_ms:g} ms: {one.failed}"
        for one in _latest(cells)
        if one.failed
    ]
    parts = [
        _title(work),
        *_sessions(records, cells),
        f"Seconds a step, median (spread of the repeats' medians); * fewer than {ENOUGH} steps; "
        "DiLoCo: mean.",
        grid(_step, there),
        "Predicted before / measured, seconds a step.",
        grid(_prediction, [name for name in there if name.startswith("farspan/")]),
        _errors(by.values()),
        "A core's share that the relay took; MB a step through it; packets a step dropped from "
        "full queues.",
        grid(_relay, there),
        "\n".join([*picks, *dict.fromkeys(failed)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(work: Work) -> str:
    kind = "tied" if work.tied else "untied"
    slow = "" if work.slow == 1.0 else f", {work.slow:g} of a core for each worker of site b"
    return (
        f"## {work.model}: {work.sequences} sequences of {work.seq_len} tokens a step, {kind} "
        "table, "
        f"{work.precision}, seed {work.seed}{slow}"
    )


def _sessions(records: Sequence[Record], cells: Sequence[Cell]) -> list[str]:
    """Return a line for each session that cells are of."""
    used = {one.session for one in cells}
    return [
        f"{one.session}: commit {one.commit}{' with changes' if one.changed else ''}, torch "
        f"{one.versions['torch']}, "
        f"{one.cpu}, Linux {one.kernel}, {one.bandwidth}, TCP {one.congestion}, windows of "
        f"{', '.join(f'{window / 1e6:.1f} MB ({rtt})' for rtt, window in one.windows.items())}."
        for one in records
        if isinstance(one, Session) and one.session in used
    ]


def _grid(columns: Sequence[str], rows: dict[str, list[str]]) -> str:
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    return "\n".join(
        [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]
    )


def _latest(cells: Sequence[Cell]) -> list[Cell]:
    """Return the last try of every cell."""
    return list({(one.contestant, one.rtt_ms, one.repeat): one for one in cells}.values())


def _measured(cells: Sequence[Cell]) -> list[Cell]:
    return [one for one in _latest(cells) if one.step_s]


def _step(cells: Sequence[Cell]) -> str:
    found = _measured(cells)
    if not found:
        return "failed" if cells else ""
    typical = [one.typical_s for one in found]
    steps = [seconds for one in found for seconds in one.step_s]
    middle = statistics.median(steps) if found[0].every is None else statistics.mean(typical)
    mark = "" if len(steps) >= ENOUGH else "*"
    spread = f" ({(max(typical) - min(typical)) / middle:.0%})" if len(found) > 1 else ""
    return f"{middle:.3f}{mark}{spread}"


def _prediction(cells: Sequence[Cell]) -> str:
    found = _measured(cells)
    said = next((one.predicted_s for one in cells if one.predicted_s is not None), None)
    if said is None:
        return ""
    if not found:
        return f"{said:.3f} / -"
    middle = statistics.median(one.typical_s for one in found)
    return f"{said:.3f} / {middle:.3f} = {said / middle:.2f}"


def _errors(by: Iterable[Sequence[Cell]]) -> str:
    """How far predictions were off, over all cells that have one."""
    said = [(cells[0].predicted_s, _measured(cells)) for cells in by if cells]
    off = [
        abs(p / statistics.median(one.typical_s for one in found) - 1)
        for p, found in said
        if p and found
    ]
    return (
        f"Of {len(off)} predictions: median error {statistics.median(off):.1%}, worst "
        f"{max(off):.1%}."
        if off
        else ""
    )


def _relay(cells: Sequence[Cell]) -> str:
    found = _measured(cells)
    if not found:
        return ""
    share, size, dropped = (
        statistics.median(getattr(one, key) or 0.0 for one in found)
        for key in ("relay_share", "wan_bytes", "dropped")
    )
    return f"{share:.0%}, {size / 1e6:.1f}, {dropped:.0f}"


def _is_pick(one: Predicted) -> bool:
    return one.contestant == "farspan/planner" and one.plan is not None


def _pick(one: Predicted) -> str:
    assert one.plan is not None
    replica = one.plan["replicas"][0]
    stages = ", ".join(
        f"units {s['units']} on ranks {s['mesh']['ranks']}" for s in replica["stages"]
    )
    picked = f"{one.plan['technique']}, {replica['microbatches']} microbatches, {stages}"
    return f"- The planner at {one.rtt_ms:g} ms: {picked}"
