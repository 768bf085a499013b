"""The picture of docs/search.md: nDCG@10 by corpus, kind of query and system, from
results/retrieval.json.

python -m benchmarks.retrieval_picture  # writes docs/pictures/retrieval.svg
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from farspan.report.page import chart_style

RESULTS = Path(__file__).parent / "results" / "retrieval.json"
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "retrieval.svg"
#: Corpora by what they are.
CORPORA = {
    "built-in": "built-in corpus",
    "perl": "Perl's manual",
    "python": "Python's manual",
    "r": "R's manuals",
    "debian": "Debian's manuals",
}
#: Queries by their kind.
KINDS = {
    "questions": "questions of people",
    "title": "titles",
    "asked": "titles in a question",
    "question": "headings that ask",
    "opening": "first lines",
}
#: Systems of the judged questions, by what an evaluation calls them.
EVALUATED = {
    "bm25": "words",
    "encoder": "encoder",
    "fused": "default",
    "fused by table": "table",
    "model": "own",
}
#: System, its name, its colour.
SYSTEMS = (
    ("plain words", "words, as BM25 comes", "#a9b1b8"),
    ("words", "words", "#5d6670"),
    ("own", "own vectors", "#a8325a"),
    ("table", "words and table", "#946200"),
    ("encoder", "ready encoder", "#1f5fa8"),
    ("default", "words and encoder, 95 % interval beyond words", "#0f7a63"),
)
#: Rows of fewer queries are left out: their means say little.
MIN_QUERIES = 30


class Row(NamedTuple):
    """One line of the picture: nDCG@10 by system, and the interval of what the default finds more
    than words."""

    label: str
    values: dict[str, float]
    interval: tuple[float, float] | None


#: Pixels: of the whole, left of the scale, of a row, above all.
WIDTH = 760
LEFT = 290
ROW = 28
TOP = 92
TITLE = "How well queries find their documents: nDCG@10"


def main() -> None:
    rows = read_rows(json.loads(RESULTS.read_text())["corpora"])
    most = 1.1 * max(max(row.values.values()) for row in rows)
    height = TOP + ROW * len(rows) + 40
    drawn = {system for row in rows for system in row.values}
    parts = [*_legend(drawn), *_scale(most, height)]
    for number, row in enumerate(rows):
        parts += _draw_row(TOP + ROW * number + ROW / 2, row, most)
    described = "; ".join(f"{row.label}: {_describe(row.values)}" for row in rows)
    PICTURE.write_text(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-labelledby="retrieval-t retrieval-d" '
        f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}">\n'
        f'<title id="retrieval-t">{TITLE}</title>\n<desc id="retrieval-d">{escape(described)}'
        f"</desc>\n<style>{escape(chart_style(), quote=False)}</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def read_rows(corpora: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of judged questions first, then those of queries mined from the corpora."""
    judged = []
    mined = []
    for corpus in corpora:
        name = CORPORA[corpus["name"]]
        if "questions" in corpus:
            found = corpus["questions"]
            label = f"{name}: {found['number']} {KINDS['questions']}"
            judged.append(_row_of(label, found, {system: system for system, _, _ in SYSTEMS}))
        own = corpus.get("own", {}).get("own", {}).get("kinds", {})
        for kind, found in corpus["evaluation"]["kinds"].items():
            if found["reported"] >= MIN_QUERIES:
                label = f"{name}: {found['reported']} {KINDS[kind]}"
                row = _row_of(label, found, EVALUATED)
                row.values.update(_values_of(own.get(kind, {}), {"model": "own"}))
                mined.append(row)
    return judged + mined


def _row_of(label: str, found: Mapping[str, Any], names: Mapping[str, str]) -> Row:
    interval = None
    for difference in found["differences"]:
        pair = (names.get(difference["a"]), names.get(difference["b"]))
        if pair == ("default", "words"):
            interval = tuple(difference["interval"])
    return Row(label, _values_of(found, names), interval)


def _values_of(found: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    values = {}
    for system, quality in found.get("systems", {}).items():
        if system in names:
            values[names[system]] = quality["ndcg_at_10"]
    return values


def _x(value: float, most: float) -> float:
    return round(LEFT + (WIDTH - LEFT - 20) * value / most, 1)


def _legend(drawn: Collection[str]) -> list[str]:
    parts = [f'<text class="title" x="14" y="24">{TITLE}</text>']
    x = 14
    y = 48
    for system, name, colour in SYSTEMS:
        if system not in drawn:
            continue
        if x + 22 + 6.6 * len(name) > WIDTH:
            x = 14
            y = y + 20
        parts.append(
            f'<circle cx="{x + 5}" cy="{y - 4}" r="5" fill="{colour}"/><text x="{x + 15}" '
            f'y="{y}">{name}</text>'
        )
        x += round(36 + 6.6 * len(name))
    return parts


def _scale(most: float, height: int) -> list[str]:
    parts = []
    for tenth in range(int(most * 10) + 1):
        x = _x(tenth / 10, most)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{height - 32}"/>')
        parts.append(f'<text x="{x}" y="{height - 14}" text-anchor="middle">{tenth / 10:g}</text>')
    return parts


def _draw_row(y: float, row: Row, most: float) -> list[str]:
    parts = [f'<text x="{LEFT - 14}" y="{y + 4}" text-anchor="end">{escape(row.label)}</text>']
    if row.interval is not None:
        low, high = (_x(row.values["words"] + end, most) for end in row.interval)
        parts.append(
            f'<line x1="{low}" x2="{high}" y1="{y}" y2="{y}" stroke="#0f7a63" stroke-width="2"/>'
        )
    for system, _, colour in SYSTEMS:
        if system in row.values:
            x = _x(row.values[system], most)
            parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>')
    return parts


def _describe(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


if __name__ == "__main__":
    main()
