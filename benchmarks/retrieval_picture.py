"""The picture of docs/search.md: nDCG@10 by corpus, kind of query and system, from
results/retrieval.json.

python -m benchmarks.retrieval_picture  # writes docs/pictures/retrieval.svg
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from farspan.report.page import chart_style

RESULTS = Path(__file__).parent / "results" / "retrieval.json"
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "retrieval.svg"
#: Texts by what their runs read.
TEXTS = {"pydocs": "built-in corpus", "perldoc": "Perl's documentation"}
#: System, its name, its colour.
SYSTEMS = (
    ("untrained", "vectors, untrained model", "#a8325a"),
    ("untuned", "vectors before tuning", "#946200"),
    ("model", "vectors", "#1f5fa8"),
    ("bm25", "words (BM25, tuned)", "#5d6670"),
    ("fused", "words and vectors, 95 % interval", "#0f7a63"),
)
#: Pixels: of the whole, left of the scale, of a row, above all.
WIDTH = 720
LEFT = 250
ROW = 30
TOP = 92
TITLE = "How well queries find their documents: nDCG@10"


def main() -> None:
    runs = json.loads(RESULTS.read_text())["runs"]
    rows = [
        (run, kind, found) for run in runs for kind, found in run["evaluation"]["kinds"].items()
    ]
    most = (
        max(quality["ndcg_at_10"] for _, _, found in rows for quality in found["systems"].values())
        * 1.1
    )
    height = TOP + ROW * len(rows) + 40
    texts = {run["text"]: TEXTS.get(run["text"], run["text"]) for run in runs}
    parts = [*_legend(), *_scale(most, height)]
    for number, (run, kind, found) in enumerate(rows):
        parts += _row(
            TOP + ROW * number + ROW / 2,
            f"{texts[run['text']]}: {found['reported']} {kind}s",
            found,
            most,
        )
    said = "; ".join(f"{texts[run['text']]}, {kind}s: {_said(found)}" for run, kind, found in rows)
    PICTURE.write_text(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-labelledby="retrieval-t retrieval-d" '
        f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}">\n'
        f'<title id="retrieval-t">{TITLE}</title>\n<desc id="retrieval-d">{escape(said)}</desc>\n'
        f"<style>{escape(chart_style(), quote=False)}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _x(value: float, most: float) -> float:
    return round(LEFT + (WIDTH - LEFT - 20) * value / most, 1)


def _legend() -> list[str]:
    parts = [f'<text class="title" x="14" y="24">{TITLE}</text>']
    x = 14
    y = 48
    for _, name, colour in SYSTEMS:
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


def _row(y: float, label: str, found: dict[str, Any], most: float) -> list[str]:
    parts = [f'<text x="{LEFT - 14}" y="{y + 4}" text-anchor="end">{escape(label)}</text>']
    words = found["systems"]["bm25"]["ndcg_at_10"]
    for one in found["differences"]:
        if (one["a"], one["b"]) == ("fused", "bm25"):
            low, high = (_x(words + end, most) for end in one["interval"])
            parts.append(
                f'<line x1="{low}" x2="{high}" y1="{y}" y2="{y}" stroke="#0f7a63" '
                'stroke-width="2"/>'
            )
    for system, _, colour in SYSTEMS:
        if system in found["systems"]:
            x = _x(found["systems"][system]["ndcg_at_10"], most)
            parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>')
    return parts


def _said(found: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {quality['ndcg_at_10']:.3f}" for name, quality in found["systems"].items()
    )


if __name__ == "__main__":
    main()
