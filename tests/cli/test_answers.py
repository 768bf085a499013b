"""What a search found, as a person reads it."""

from __future__ import annotations

import pytest

from farspan.cli.answers import format_copies
from farspan.domain.corpus import Place
from farspan.retrieval.search import Result


def result(**fields) -> Result:
    return Result(
        id="0" * 16,
        title="t",
        score=1.0,
        word_score=1.0,
        vector_score=None,
        text="text",
        passage="text",
        **fields,
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"origin": "notes/a.md", "line": 12, "headings": ("A", "B")}, "notes/a.md:12, A > B"),
        ({"origin": "a.pdf", "line": 3, "page": 7}, "a.pdf, page 7"),
        ({"origin": "rows.jsonl:8"}, "rows.jsonl:8"),
    ],
)
def test_place_of_a_result_is_as_one_would_cite_it(fields, said):
    assert result(**fields).place == said


def test_first_places_of_copies_are_named_and_the_others_counted():
    places = tuple(Place(title="x", origin=f"{n}.txt", line=n) for n in range(1, 101))
    few = result(origin="a", also=places[:2], copies=2)
    assert format_copies(few) == "1.txt:1, 2.txt:2"
    assert format_copies(result(origin="a", also=places, copies=2500)) == (
        "1.txt:1, 2.txt:2, 3.txt:3 and 2,497 more"
    )
