"""A ranking as people read it: a line on the question, the table, the choice, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.cli.paint import paint, text_width, wants_colours
from farspan.domain.plan_words import join_words
from farspan.domain.units import format_bytes, format_seconds, short_time
from farspan.planning.candidate import Candidate
from farspan.planning.diff import PlanDifference
from farspan.planning.ranking import (
    LEFT_ALIGNED,
    RANKING_HEADS,
    Ranking,
    candidate_cells,
    candidate_name,
    describe_question,
    describe_verdict,
    devices_line,
    equal_loss_note,
    format_spending,
    refused_by_reason,
    short_number,
    step_shares,
    time_bounds_s,
)
from farspan.planning.why import REASON_HEADS as REASON_HEADS
from farspan.planning.why import Why, describe_choice, explain_choice
from farspan.report.tables import table_lines

if TYPE_CHECKING:
    from farspan.report.plan_page import PageText
    from farspan.report.plan_picture import Picture
    from farspan.report.plan_terminal import Line

#: So many candidates are shown, and each technique's best, unless all are asked for.
CANDIDATES_SHOWN = 8
#: Assumptions below the table; `--why` has them all.
ASSUMPTIONS_SHOWN = 3
#: HEADS where the terminal is narrow.
NARROW_HEADS = (
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
WHERE_COLUMN = RANKING_HEADS.index("where")


def print_ranking(
    ranking: Ranking,
    console: Console,
    *,
    everything: bool = False,
    more: str = "farspan plan --all",
) -> None:
    """Print the question, the table, what is chosen and what that assumes."""
    console.write_line(wrap_paragraph(describe_question(ranking)))
    console.write_line()
    one_device = len(ranking.cluster.devices) == 1
    if everything or not one_device or ranking.chosen is None:
        colours = wants_colours(json=console.json)
        for line in ranking_table(ranking, everything=everything, colours=colours, more=more):
            console.write_line(line, painted=True)
        console.write_line()
    console.write_line(wrap_paragraph(describe_choice(ranking)))
    if ranking.chosen is None:
        return
    if one_device:
        console.write_line(
            "The other techniques divide work between devices; --all lists why each has no plan "
            "for one."
        )
    known = ranking.candidates[ranking.chosen].estimate.assumptions
    assumed = "; ".join(known[:ASSUMPTIONS_SHOWN])
    if len(known) > ASSUMPTIONS_SHOWN:
        assumed += f"; {len(known) - ASSUMPTIONS_SHOWN} more with --why"
    console.write_line(wrap_paragraph(f"Assumes: {assumed}."))


def ranking_table(ranking: Ranking, *, everything: bool, colours: bool, more: str) -> list[str]:
    """Return the candidates, a line each (two for a long part's name), and the number not shown."""
    candidates = ranking.candidates
    shown: list[int] = []
    techniques = set[str]()
    single_device_shown = False
    for i, candidate in enumerate(candidates):
        is_best = candidate.technique not in techniques
        techniques.add(candidate.technique)
        # One device's time is what all the others are compared with.
        is_baseline = candidate.eligible and len(candidate.places) == 1 and not single_device_shown
        single_device_shown |= is_baseline
        if everything or i < CANDIDATES_SHOWN or is_best or is_baseline:
            shown.append(i)

    output = _align_rows(ranking, shown, colours) if shown else []
    notes = []
    for i in shown:
        candidate = candidates[i]
        if candidate.unchosen:
            notes.append(f"{i + 1} {candidate.technique} is not chosen: {candidate.unchosen}")
    hidden = len(candidates) - len(shown)
    output += [paint(wrap_paragraph(note, indent=4), "soft", colours) for note in notes]
    if hidden:
        note = f"    {hidden} more, each behind its technique's best: {more}"
        output.append(paint(note, "soft", colours))
    if shown:
        text = table_legend([candidates[i] for i in shown])
        output.append(paint(wrap_paragraph(text, indent=4), "soft", colours))
    return output + _refusal_paragraphs(ranking, colours)


def table_legend(shown: Sequence[Candidate]) -> str:
    """Explain the table's figures; of plans whose tokens count for less, and of trials, only
    where there are any."""
    text = LEGEND
    token_factors: dict[str, float] = {}
    for candidate in reversed(shown):
        efficiency = candidate.estimate.token_efficiency
        if efficiency != 1.0:
            token_factors[candidate.technique] = 1 / efficiency
    if token_factors:
        factors = [f"{name} {factor:.3g} x" for name, factor in sorted(token_factors.items())]
        text += (
            "; minutes and cost: to the loss of synchronous training, which takes "
            f"{join_words(factors)} the tokens"
        )
    if any(candidate.trial is not None for candidate in shown):
        text += "; *: measured in a trial"
    return text


def _align_rows(ranking: Ranking, shown: Sequence[int], colours: bool) -> list[str]:
    """Return the table's lines; long cells shrink before the part's name does, which is wrapped."""
    heads = RANKING_HEADS
    right = [place for place, head in enumerate(RANKING_HEADS) if head not in LEFT_ALIGNED]
    rows: list[Sequence[str]] = []
    styles = []
    for i in shown:
        rows.append(candidate_cells(ranking, i))
        style = "" if ranking.candidates[i].eligible else "dim"
        styles.append("bold green" if i == ranking.chosen else style)
    columns = zip(RANKING_HEADS, *rows, strict=True)
    if sum(max(map(len, column)) + 1 for column in columns) > text_width() + 1:
        heads = NARROW_HEADS
        rows = [list(map(_shorten_cell, row)) for row in rows]
    return table_lines(
        heads,
        rows,
        right=right,
        width=text_width(),
        gap=1,
        wrap=(WHERE_COLUMN,),
        colours=colours,
        tints=styles,
    )


def _shorten_cell(cell: str) -> str:
    """Shorten `24 % slower` to `+24 %`, `2.4 x slower` to `2.4 x`, `7.7 of 24` to `7.7/24`."""
    number, _, word = cell.rpartition(" ")
    if word not in ("slower", "costlier", "faster", "cheaper"):
        return cell.replace(" of ", "/") if cell[:1].isdigit() else cell
    sign = "" if number.endswith("x") else "+" if word in ("slower", "costlier") else "-"
    return sign + number


def _refusal_paragraphs(ranking: Ranking, colours: bool) -> list[str]:
    """Return a paragraph for each reason why techniques have no plan."""
    paragraphs = []
    for reason, alike in refused_by_reason(ranking).items():
        techniques = ", ".join(refused.technique for refused in alike)
        text = f"{techniques}: {describe_verdict(ranking, alike[0])}: {reason}"
        paragraphs.append(paint(wrap_paragraph(text, indent=4), "soft", colours))
    return paragraphs


def page_text(ranking: Ranking, index: int | None) -> PageText:
    """Return the text around the pictures of the candidate at `index` on the page."""
    from farspan.report.plan_page import PageText

    reasons = explain_choice(ranking)
    parts = (
        ("Why", tuple(map(str, reasons.against))),
        ("What is left out", tuple(map(str, reasons.left_out))),
        ("What is not known", tuple(map(str, reasons.unknown))),
    )
    title = "Nothing fits"
    tiles: tuple[tuple[str, str, str], ...] = ()
    if index is not None:
        candidate = ranking.candidates[index]
        title = candidate_name(candidate)
        tiles = _figure_tiles(ranking, candidate)
    instead = "" if index == ranking.chosen else "Another is chosen: "
    rows = [tuple(candidate_cells(ranking, i)) for i in range(len(ranking.candidates))]
    refused = _refusal_paragraphs(ranking, colours=False)
    return PageText(
        title=title,
        question=describe_question(ranking),
        choice=instead + reasons.choice,
        tiles=tiles,
        heads=RANKING_HEADS,
        rows=tuple(rows),
        marked=index,
        refused=tuple(refused),
        why=parts,
    )


def _figure_tiles(ranking: Ranking, candidate: Candidate) -> tuple[tuple[str, str, str], ...]:
    priced = candidate.estimate
    time = format_seconds(candidate.time_s)
    low, high = map(format_seconds, time_bounds_s(candidate))
    interval = f"{low} to {high}{equal_loss_note(candidate)}"
    shares = f"compute / communication / waiting {step_shares(candidate)} %"
    speed = f"{priced.tflops_per_device:.3g} TFLOP/s a device"
    if priced.mfu is not None:
        speed += f" · MFU {priced.mfu:.1%}"
    energy = "energy unknown"
    if candidate.kwh is not None:
        energy = f"{short_number(candidate.kwh)} kWh at most"
    devices = devices_line(ranking.cluster, candidate.places)
    tiles = (
        ("Time", time, interval),
        ("Step", short_time(priced.step_s), shares),
        ("Tokens a second", f"{priced.tokens_per_s:,.0f}", speed),
        ("Memory", format_bytes(priced.memory_bytes), "of the fullest device"),
        ("Money", format_spending(candidate), energy),
        ("Verdict", describe_verdict(ranking, candidate), devices),
    )
    return tiles


def print_picture(shown: Picture, candidate: Candidate, console: Console) -> None:
    """Print a candidate's plan on the cluster, a step in time, and memory."""
    from farspan.report.plan_terminal import show

    console.write_line(f"\n{candidate_name(candidate)}:")
    print_drawing(show(shown, text_width()), console)


def print_drawing(lines: Iterable[Line], console: Console) -> None:
    """Print lines of a picture in their tints."""
    colours = wants_colours(json=console.json)
    for line in lines:
        painted = [paint(piece, tint, colours) for piece, tint in line]
        console.write_line("".join(painted).rstrip(), painted=True)


def print_reasons(reasons: Why, console: Console) -> None:
    """Print the reasons as a table under each heading, a name that is repeated once."""
    parts = (
        ("Against the others: compute, exposed communication, waiting a step", reasons.against),
        ("What is left out", reasons.left_out),
        ("What is not known", reasons.unknown),
    )
    colours = wants_colours(json=console.json)
    for heading, rows in parts:
        if not rows:
            continue
        console.write_line(f"\n{paint(heading, 'strong', colours)}", painted=True)
        heads: tuple[str, ...] = REASON_HEADS
        cells: Sequence[Sequence[str]] = rows
        if not any(row.time for row in rows):
            heads = ("", "")
            cells = [(row.plan, row.facts) for row in rows]
        for line in table_lines(heads, cells, width=text_width(), gap=1, colours=colours):
            console.write_line(line, painted=True)


def print_difference(difference: PlanDifference, console: Console) -> None:
    """Print two plans side by side: what is configured differently, then what that gives."""
    a, b = difference.names
    heads = ("", f"A: {a}", f"B: {b}", "B / A")
    if difference.configuration:
        rows = [(row.what, row.a, row.b, "") for row in difference.configuration]
        _print_columns(heads, rows, console)
        console.write_line()
    else:
        console.write_line("the two plans are configured alike")
    figures = []
    for row in difference.figures:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        figures.append((row.what, row.a, row.b, ratio))
    _print_columns(heads, figures, console)
    if difference.same:
        console.write_line()
        console.write_line(wrap_paragraph(f"The same in both: {', '.join(difference.same)}."))


def _print_columns(heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    colours = wants_colours(json=console.json)
    for line in table_lines(heads, rows, right=(3,), width=text_width(), colours=colours):
        console.write_line(line, painted=True)


def wrap_paragraph(text: str, *, indent: int = 0, hang: int = 0) -> str:
    """Wrap text into lines of the terminal's width."""
    hanging = " " * (indent + hang)
    return textwrap.fill(
        text,
        text_width(),
        initial_indent=" " * indent,
        subsequent_indent=hanging,
        break_on_hyphens=False,
        break_long_words=False,
    )
