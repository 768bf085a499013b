"""The pictures of docs/learning.md, drawn from the curves in results/many_epochs.jsonl and
many_epochs_peers.jsonl.

python -m benchmarks.learning_pictures  # writes docs/pictures/learning-*.svg
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from farspan.report.charts import COLOURS, Axis, Chart, Series
from farspan.report.page import chart_style, template_environment

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
#: (x, y) of a line.
Points = list[tuple[float, float]]


def main() -> None:
    style = chart_style()
    draw = template_environment().get_template("chart.svg").module.drawing  # type: ignore[attr-defined]
    for chart in (peers(), one_epoch(), decays()):
        (PICTURES / f"{chart.name}.svg").write_text(str(draw(chart, chart.text, style)))


def rows(results: str, /, **wanted: Any) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (RESULTS / f"{results}.jsonl").read_text().splitlines()]
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def peers() -> Chart:
    """Medians of three seeds over the seconds that they have trained."""
    named = {
        "farspan": "decay 0.5",
        "nanochat": "nanochat",
        "farspan before": "before",
        "nanoGPT": "nanogpt",
        "Hugging Face's course": "course",
    }
    lines: dict[str, Points] = {}
    for name, recipe in named.items():
        seeds = rows("many_epochs_peers", name=recipe)
        curves = [
            [(step / row["steps"] * row["time"], loss) for step, loss, _ in row["curve"]]
            for row in seeds
        ]
        lines[name] = [
            (at[0][0], statistics.median(loss for _, loss in at))
            for at in zip(*curves, strict=False)
        ]
    return chart("learning-peers", "Validation loss, 1.7 M tokens, one H200", "seconds", lines)


def one_epoch() -> Chart:
    """AdamW at its best rate, and the recipe where it reads half, 1/1.4 and all of the same
    text."""
    adamw = rows("many_epochs", corpus="pydocs", muon=False, lr=3e-3)
    recipe = [
        row for row in rows("many_epochs", corpus="pydocs", muon=True, lr=0.0) if row["epochs"] <= 1
    ]
    recipe.sort(key=lambda row: row["epochs"], reverse=True)
    lines = {
        name: [(step * row["step_tokens"] / 1e6, loss) for step, loss, _ in row["curve"]]
        for name, row in zip(
            ("AdamW at its best", "recipe, one epoch", "recipe, 1/1.4", "recipe, half"),
            (*adamw, *recipe),
            strict=True,
        )
    }
    return chart(
        "learning-one-epoch",
        "Validation loss of 2.9 M parameters, one epoch",
        "million tokens read",
        lines,
    )


def decays() -> Chart:
    """300 k tokens, 40 times: weights as they are, and their moving average."""
    lines: dict[str, Points] = {}
    for decay in (0.1, 0.5, 1.5):
        (row,) = rows("many_epochs", epochs=40, decay=decay)
        for name, place in ((f"decay {decay}", 1), (f"{decay}, averaged", 2)):
            lines[name] = [
                (at[0] * row["step_tokens"] / row["unique_tokens"], at[place])
                for at in row["curve"]
            ]
    return chart(
        "learning-forty-epochs", "Validation loss, 300 k tokens read 40 times", "epochs", lines
    )


def chart(name: str, title: str, x: str, lines: dict[str, Points]) -> Chart:
    places = sorted({at for points in lines.values() for at, _ in points})
    series = tuple(
        Series(name=label, values=values(points, places), kind="line", tint=tint)
        for (label, points), tint in zip(lines.items(), COLOURS, strict=False)
    )
    return Chart(name=name, title=title, x=Axis(name=x, values=places), series=series)


def values(points: Iterable[tuple[float, float]], places: list[float]) -> list[float | None]:
    known = dict(points)
    return [known.get(place) for place in places]


if __name__ == "__main__":
    main()
