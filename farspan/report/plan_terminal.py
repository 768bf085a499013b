"""A plan's pictures in a terminal: lines of (text, tint) in one width, for a terminal to colour."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from farspan.domain.units import counted, format_bytes, short_time
from farspan.report.plan_picture import (
    MEMORY_PARTS,
    Mark,
    Picture,
    bars,
    format_slowdowns,
    lane_name,
    rows_line,
    stage_line,
)

Line = list[tuple[str, str]]
#: Stages take these tints in turn.
NUM_TINTS = 6
GLYPHS = {
    "forward": "▒",
    "backward": "█",
    "send": "~",
    "sums": "≈",
    "receive": "-",
    "update": "u",
    "": "·",
}
#: Names of marks that need others than their kind.
WORDS = {"send": "sending", "sums": "communication", "receive": "waiting for a message"}
#: Of every other microbatch, so that neighbours can be told apart.
OTHERS = {"forward": "░", "backward": "▓"}
BAR = dict(zip(MEMORY_PARTS, "WGOALBFUS", strict=True))
#: Lanes and bars beyond so many are left to the page.
MAX_LANES = 24


def show(shown: Picture, width: int) -> Iterator[Line]:
    """Yield the three pictures, one below the other."""
    yield [("What runs where, and what crosses links in a step (both ways together)", "strong")]
    yield from cluster(shown, width)
    yield []
    yield [("One step, as simulated", "strong")]
    yield from timeline(shown, width)
    yield []
    yield [("Memory at its peak", "strong")]
    yield from memory(shown, width)


def cluster(shown: Picture, width: int) -> Iterator[Line]:
    """Sites in the plan's order with their devices, and the flows between neighbours in the gaps;
    then the others."""
    site_names = [site.name for site in shown.sites]
    drawn = set()
    size = max(len(box.name) for box in shown.boxes)
    for place, site in enumerate(shown.sites):
        for host in site.hosts:
            label = (
                site.name
                if len(site.hosts) == 1 and host.name == site.name
                else f"{site.name} / {host.name}"
            )
            yield [(label, "strong")]
            for box in host.boxes:
                memory = f"{format_bytes(box.memory.total)} of {format_bytes(box.capacity)}"
                line: Line = [("  ■ ", str(box.stage % NUM_TINTS)), (f"{box.name:{size}}  ", "")]
                line.append((f"{stage_line(shown, box)} · {rows_line(box)}", ""))
                if sum(len(text) for text, _ in line) + len(memory) + 3 > width:
                    yield line
                    line = [(" " * (size + 6), "")]
                else:
                    line.append((" · ", ""))
                yield [*line, (memory, "" if box.fits else "bad")]
        for flow in shown.flows:
            inside = not flow.between_sites and flow.a in {host.name for host in site.hosts}
            if inside or {flow.a, flow.b} == set(site_names[place : place + 2]):
                drawn.add(id(flow))
                yield from _flow(
                    f"{flow.a} - {flow.b}: " if inside else "", flow.what, flow.link, inside, width
                )
    for flow in shown.flows:
        if id(flow) not in drawn:
            yield from _flow(f"{flow.a} - {flow.b}: ", flow.what, flow.link, False, width)
    if not shown.flows:
        yield [("  nothing leaves the host", "soft")]


def _flow(ends: str, what: str, link: str, inside: bool, width: int) -> Iterator[Line]:
    for number, text in enumerate(textwrap.wrap(f"{ends}{what} ({link})", width - 4)):
        yield [(("  ├ " if inside else "  ↕ ") if number == 0 else "    ", "soft"), (text, "")]


def wrapped(text: str, width: int) -> Iterator[Line]:
    """Yield the lines of a paragraph under the pictures."""
    yield from ([(line, "soft")] for line in textwrap.wrap(text, width))


def timeline(shown: Picture, width: int) -> Iterator[Line]:
    """Yield a lane a stage: each cell shows what fills most of it."""
    name = max(len(lane_name(shown, lane)) for lane in shown.lanes)
    cells = width - name - 2
    for lane in shown.lanes[:MAX_LANES]:
        yield [
            (f"{lane_name(shown, lane):{name}}  ", ""),
            *filled(lane.marks, lane.stage, shown.ends, cells),
        ]
    if len(shown.lanes) > MAX_LANES:
        yield [
            (
                f"{counted(len(shown.lanes) - MAX_LANES, 'more lane')} on the page: --html FILE",
                "soft",
            )
        ]
    end = short_time(shown.ends)
    yield [(" " * (name + 2) + "0" + end.rjust(cells - 1), "soft")]
    yield from wrapped(
        legend((mark for lane in shown.lanes for mark in lane.marks), "waiting"), width
    )
    yield from wrapped(format_slowdowns(shown), width)


def legend(marks: Iterable[Mark], nothing: str) -> str:
    """Return the meaning of the glyphs of these marks, and of no mark."""
    used = {mark.kind for mark in marks}
    meanings = [
        f"{OTHERS.get(kind, '')}{GLYPHS[kind]} {WORDS.get(kind, kind)}"
        for kind in GLYPHS
        if kind in used
    ]
    return "  ".join([*meanings, f"· {nothing}"])


def filled(marks: Sequence[Mark], stage: int, ends: float, count: int) -> Line:
    """Return `count` cells of a stage's marks up to `ends`; neighbours of one tint are one
    piece."""
    size = ends / count
    shares: list[dict[tuple[str, int], float]] = [{} for _ in range(count)]
    for mark in marks:
        key = (mark.kind, mark.number % 2)
        for at in range(int(mark.start / size), min(count, int(mark.end / size) + 1)):
            part = min(mark.end, (at + 1) * size) - max(mark.start, at * size)
            shares[at][key] = shares[at].get(key, 0.0) + max(0.0, part)
    pieces: Line = []
    for cell in shares:
        (kind, odd), most = max(cell.items(), key=lambda item: item[1], default=(("", 0), 0.0))
        if most < size - sum(cell.values()):
            kind = ""
        glyph = OTHERS[kind] if kind in OTHERS and not odd else GLYPHS[kind]
        tint = str(stage % NUM_TINTS) if kind in OTHERS else "soft"
        if pieces and pieces[-1][1] == tint:
            pieces[-1] = (pieces[-1][0] + glyph, tint)
        else:
            pieces.append((glyph, tint))
    return pieces


def memory(shown: Picture, width: int) -> Iterator[Line]:
    """Yield a bar for every distinct device, on one scale; what is short stands beyond its
    capacity."""
    scale = max(max(box.capacity, box.memory.total) for box in shown.boxes)
    labelled = bars(shown)
    name = max(len(label) for label, _ in labelled)
    cells = width - name - 22
    for label, box in labelled[:MAX_LANES]:
        bar, at = "", 0.0
        for part, size in box.memory.shown.items():
            at += size
            bar += BAR[part] * (round(cells * at / scale) - len(bar))
        edge = round(cells * box.capacity / scale)
        used = f"{format_bytes(box.memory.total):>8} of {format_bytes(box.capacity)}"
        yield [
            (f"{label:{name}} ", ""),
            (bar[:edge], str(box.stage % NUM_TINTS)),
            (bar[edge:], "bad"),
            ("·" * max(0, edge - len(bar)), "soft"),
            (" " * (cells - max(edge, len(bar)) + 1), ""),
            (used, "" if box.fits else "bad"),
        ]
    if len(labelled) > MAX_LANES:
        yield [
            (f"{counted(len(labelled) - MAX_LANES, 'more bar')} on the page: --html FILE", "soft")
        ]
    yield from wrapped(
        "  ".join(f"{letter} {part}" for part, letter in BAR.items()) + "  · free", width
    )
