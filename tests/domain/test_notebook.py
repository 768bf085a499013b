"""Tables for notebooks: every cell in its place, and no text of a document is markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

import farspan
from farspan.domain.notebook import html_table

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=12)


class Cells(HTMLParser):
    """The texts of a table's cells, row by row; markup in them would be a tag of its own."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self._open = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.rows[-1][-1] += data


@pytest.mark.property
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_table_holds_every_text_as_it_is(rows):
    found = Cells(html_table(("a", "<b>"), rows, caption="<i>", right=(1,), strong=(0,)))
    assert found.rows == [["a", "<b>"], *map(list, rows)]
    assert found.tags == {"table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_cluster_is_short_as_text_and_has_its_devices_and_links_in_html():
    cluster = farspan.find_cluster("fabric/gat-amst")
    assert repr(cluster) == "<Cluster: 4 a30 in 2 hosts at 2 sites>"
    rows = Cells(cluster._repr_html_()).rows
    assert [row[:3] for row in rows[1:5]] == [["gat", "vm1", "a30"]] * 2 + [
        ["amst", "vm2", "a30"]
    ] * 2
    assert rows[-1][:3] == ["vm1", "vm2", "103 ms"]


def test_ranking_is_short_as_text_and_has_every_plan_in_html():
    ranking = farspan.plan("gpt2m", "fabric/gat-amst", tokens="16M")
    best = ranking.candidates[ranking.chosen]
    assert f"best {best.technique} on {best.where}" in repr(ranking) and len(repr(ranking)) < 120
    found = Cells(ranking._repr_html_())
    assert len(found.rows) == 1 + len(ranking.candidates) + len(ranking.refused)
    assert {len(row) for row in found.rows} == {len(found.rows[0])}
    assert found.rows[1 + ranking.chosen][-1] == "chosen"


def test_diagnosis_is_short_as_text_and_has_its_findings_in_html():
    diagnosis = farspan.doctor("cpu")
    assert repr(diagnosis).startswith("<Diagnosis: 1 device, ") and len(repr(diagnosis)) < 60
    names = [row[0] for row in Cells(diagnosis._repr_html_()).rows]
    assert {"python", "torch", "device", "disk"} <= {*names}
    assert names.count("finding") == len(diagnosis.findings)
