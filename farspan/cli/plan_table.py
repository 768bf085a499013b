"""A ranking as people read it: a line on the question, the table, the choice, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.cli.paint import paint, painter, width
from farspan.domain.units import format_bytes, format_seconds, short_time
from farspan.domain.words import joined
from farspan.planning.candidate import Candidate
from farspan.planning.diff import PlanDifference
from farspan.planning.ranking import (
    HEADS,
    LEFT,
    Ranking,
    bounds,
    called,
    candidate_cells,
    devices_line,
    equal_loss_note,
    question,
    refused_by_reason,
    short_number,
    spent,
    step_shares,
    verdict,
)
from farspan.planning.why import HEADS as REASON_HEADS
from farspan.planning.why import Why, choice, why
from farspan.report.tables import table_lines

if TYPE_CHECKING:
    from farspan.report.plan_page import Told
    from farspan.report.plan_picture import Picture
    from farspan.report.plan_terminal import Line

#: So many candidates are shown, and each technique's best, unless all are asked for.
SHOWN = 8
#: Assumptions below the table; `--why` has them all.
ASSUMED = 3
#: HEADS where the terminal is narrow.
NARROW = (
    "#",
    "technique",
    "where",
    "GB",
    "step %",
    "tok/s",
    "TFLOP/s",
    "minutes",
    "cost",
    "verdict",
)
LEGEND = (
    "step %: compute / exposed communication / waiting for other stages; minutes: "
    "predicted (interval)"
)
WHERE = HEADS.index("where")
#: rich's names for the tints of rows.
STYLES = {"good": "bold green", "soft": "dim", "": ""}


def say_ranking(
    ranking: Ranking,
    console: Console,
    *,
    everything: bool = False,
    more: str = "farspan plan --all",
) -> None:
    """Print the question, the table, what is chosen and what that assumes."""
    console.say(paragraph(question(ranking)))
    console.say()
    if everything or len(ranking.cluster.devices) > 1 or ranking.chosen is None:
        for line in table(
            ranking, everything=everything, colours=painter(json=console.json), more=more
        ):
            console.say(line, painted=True)
        console.say()
    console.say(paragraph(choice(ranking)))
    if ranking.chosen is None:
        return
    if len(ranking.cluster.devices) == 1:
        console.say(
            "The other techniques divide work between devices; --all lists why each has no plan "
            "for one."
        )
    known = ranking.candidates[ranking.chosen].estimate.assumptions
    rest = f"; {len(known) - ASSUMED} more with --why" if len(known) > ASSUMED else ""
    console.say(paragraph(f"Assumes: {'; '.join(known[:ASSUMED])}{rest}."))


def table(ranking: Ranking, *, everything: bool, colours: bool, more: str) -> list[str]:
    """Return the candidates, a line each (two for a long part's name), and the number not shown."""
    candidates = ranking.candidates
    best = dict[str, int]()
    for i, candidate in enumerate(candidates):
        best.setdefault(candidate.technique, i)
    # What one device takes by itself says what all the others are worth.
    alone = [
        i
        for i, candidate in enumerate(candidates)
        if candidate.eligible and len(candidate.places) == 1
    ][:1]
    always = range(len(candidates)) if everything else {*range(SHOWN), *best.values(), *alone}
    shown = [i for i in range(len(candidates)) if i in always]
    rows = [candidate_cells(ranking, i) for i in shown]
    output = _aligned(rows, [_tint(ranking, i) for i in shown], colours) if rows else []
    for i in shown:
        if candidates[i].unchosen:
            text = f"{i + 1} {candidates[i].technique} is not chosen: {candidates[i].unchosen}"
            output.append(paint(paragraph(text, indent=4), "soft", colours))
    if hidden := len(candidates) - len(shown):
        output.append(
            paint(f"    {hidden} more, each behind its technique's best: {more}", "soft", colours)
        )
    if rows:
        text = legend([candidates[i] for i in shown])
        output.append(paint(paragraph(text, indent=4), "soft", colours))
    return output + _refused(ranking, colours)


def legend(shown: Sequence[Candidate]) -> str:
    """Explain the table's figures; of plans whose tokens count for less, and of trials, only
    where there are any."""
    text = LEGEND
    worth = {
        candidate.technique: 1 / candidate.estimate.token_efficiency
        for candidate in reversed(shown)
        if candidate.estimate.token_efficiency != 1.0
    }
    if worth:
        factors = joined([f"{name} {worth[name]:.3g} x" for name in sorted(worth)])
        text += (
            f"; minutes and cost: to the loss of synchronous training, which takes {factors} the "
            "tokens"
        )
    if any(candidate.trial is not None for candidate in shown):
        text += "; *: measured in a trial"
    return text


def _tint(ranking: Ranking, index: int) -> str:
    return (
        "good" if index == ranking.chosen else "" if ranking.candidates[index].eligible else "soft"
    )


def _aligned(rows: Sequence[Sequence[str]], tints: Sequence[str], colours: bool) -> list[str]:
    """Return the table's lines; long cells shrink before the part's name does, which is wrapped."""
    heads = HEADS
    right = [place for place, head in enumerate(HEADS) if head not in LEFT]
    if sum(max(map(len, column)) + 1 for column in zip(HEADS, *rows, strict=True)) > width() + 1:
        heads = NARROW
        rows = [[_terse(cell) for cell in row] for row in rows]
    return table_lines(
        heads,
        rows,
        right=right,
        width=width(),
        gap=1,
        wrap=(WHERE,),
        colours=colours,
        tints=[STYLES[t] for t in tints],
    )


def _terse(cell: str) -> str:
    """`24 % slower` as `+24 %`, `2.4 x slower` as `2.4 x`, `7.7 of 24` as `7.7/24`."""
    number, _, word = cell.rpartition(" ")
    if word not in ("slower", "costlier", "faster", "cheaper"):
        return cell.replace(" of ", "/") if cell[:1].isdigit() else cell
    sign = "" if number.endswith("x") else "+" if word in ("slower", "costlier") else "-"
    return sign + number


def _refused(ranking: Ranking, colours: bool) -> list[str]:
    """Return a paragraph for each reason why techniques have no plan."""
    paragraphs = []
    for reason, alike in refused_by_reason(ranking).items():
        text = (
            f"{', '.join(refused.technique for refused in alike)}: {verdict(ranking, alike[0])}: "
            f"{reason}"
        )
        paragraphs.append(paint(paragraph(text, indent=4), "soft", colours))
    return paragraphs


def told(ranking: Ranking, index: int | None) -> Told:
    """Return the text around the pictures of the candidate at `index` on the page."""
    from farspan.report.plan_page import Told

    reasons = why(ranking)
    parts = (
        ("Why", tuple(map(str, reasons.against))),
        ("What is left out", tuple(map(str, reasons.left_out))),
        ("What is not known", tuple(map(str, reasons.unknown))),
    )
    candidate = None if index is None else ranking.candidates[index]
    instead = "" if index == ranking.chosen else "Another is chosen: "
    return Told(
        title="Nothing fits" if candidate is None else called(candidate),
        question=question(ranking),
        choice=instead + reasons.choice,
        tiles=() if candidate is None else _tiles(ranking, candidate),
        heads=HEADS,
        rows=tuple(tuple(candidate_cells(ranking, i)) for i in range(len(ranking.candidates))),
        marked=index,
        refused=tuple(_refused(ranking, colours=False)),
        why=parts,
    )


def _tiles(ranking: Ranking, candidate: Candidate) -> tuple[tuple[str, str, str], ...]:
    priced = candidate.estimate
    low, high = bounds(candidate)
    peak = "" if priced.mfu is None else f" · MFU {priced.mfu:.1%}"
    energy = (
        "energy unknown" if candidate.kwh is None else f"{short_number(candidate.kwh)} kWh at most"
    )
    return (
        (
            "Time",
            format_seconds(candidate.time_s),
            f"{format_seconds(low)} to {format_seconds(high)}{equal_loss_note(candidate)}",
        ),
        (
            "Step",
            short_time(priced.step_s),
            f"compute / communication / waiting {step_shares(candidate)} %",
        ),
        (
            "Tokens a second",
            f"{priced.tokens_per_s:,.0f}",
            f"{priced.tflops_per_device:.3g} TFLOP/s a device{peak}",
        ),
        ("Memory", format_bytes(priced.memory_bytes), "of the fullest device"),
        ("Money", spent(candidate), energy),
        ("Verdict", verdict(ranking, candidate), devices_line(ranking.cluster, candidate.places)),
    )


def say_picture(shown: Picture, candidate: Candidate, console: Console) -> None:
    """Print a candidate's plan on the cluster, a step in time, and memory."""
    from farspan.report.plan_terminal import show

    console.say(f"\n{called(candidate)}:")
    say_drawing(show(shown, width()), console)


def say_drawing(lines: Iterable[Line], console: Console) -> None:
    """Print lines of a picture in their tints."""
    colours = painter(json=console.json)
    for line in lines:
        text = "".join(paint(piece, tint, colours) for piece, tint in line)
        console.say(text.rstrip(), painted=True)


def say_why(reasons: Why, console: Console) -> None:
    """Print the reasons as a table under each heading, a name that is repeated once."""
    parts = (
        ("Against the others: compute, exposed communication, waiting a step", reasons.against),
        ("What is left out", reasons.left_out),
        ("What is not known", reasons.unknown),
    )
    colours = painter(json=console.json)
    for heading, rows in parts:
        if not rows:
            continue
        console.say(f"\n{paint(heading, 'strong', colours)}", painted=True)
        figures = any(row.time for row in rows)
        heads = REASON_HEADS if figures else ("", "")
        cells = [row if figures else (row.plan, row.facts) for row in rows]
        for line in table_lines(heads, cells, width=width(), gap=1, colours=colours):
            console.say(line, painted=True)


def say_difference(difference: PlanDifference, console: Console) -> None:
    """Two plans side by side: what is configured differently, then what that gives."""
    colours = painter(json=console.json)
    heads = ("", f"A: {difference.names[0]}", f"B: {difference.names[1]}", "B / A")
    if difference.configuration:
        rows = [(row.what, row.a, row.b, "") for row in difference.configuration]
        _say_columns([heads, *rows], console, colours)
        console.say()
    else:
        console.say("the two plans are configured alike")
    figures = [
        (row.what, row.a, row.b, "" if row.ratio is None else f"{row.ratio:.3g}")
        for row in difference.figures
    ]
    _say_columns([heads, *figures], console, colours)
    if difference.same:
        console.say()
        console.say(paragraph(f"The same in both: {', '.join(difference.same)}."))


def _say_columns(rows: Sequence[Sequence[str]], console: Console, colours: bool) -> None:
    for line in table_lines(rows[0], rows[1:], right=(3,), width=width(), colours=colours):
        console.say(line, painted=True)


def paragraph(text: str, *, indent: int = 0, hang: int = 0) -> str:
    """Text in lines of the terminal's width."""
    return textwrap.fill(
        text,
        width(),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_on_hyphens=False,
        break_long_words=False,
    )
