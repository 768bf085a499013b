"""Two papers as rows of a bench: their own numbers come out of the rows, and the order of their
plans is foretold."""

from __future__ import annotations

import functools

import pytest

from farspan_studies.bench.matrix import Row, figures
from farspan_studies.pages import results
from farspan_studies.pages.paper_rows import as_plotted, rows
from farspan_studies.pages.results_page import results_page
from farspan_studies.papers.published import cost_study, fabric


@functools.cache
def fabric_rows() -> list[Row]:
    return rows("fabric")


@functools.cache
def cost_rows() -> list[Row]:
    return rows("slm-cost")


def test_fabric_rows_equal_the_figures_printed_in_the_paper():
    for row, printed in zip(fabric_rows(), fabric().rows, strict=True):
        assert (row.cell.cluster, row.cell.technique, row.used) == (
            printed.slice,
            printed.technique,
            printed.devices,
        )
        assert row.minutes == printed.minutes
        if printed.tflops is not None:
            assert row.tflops_per_device == printed.tflops
        assert (row.step_s is None) == (printed.minutes is None and printed.tflops is None)
        assert (row.status == "oom") == (printed.status == "oom")


@pytest.mark.parametrize("slice_", list(fabric().clusters))
def test_published_plans_are_predicted_in_their_measured_order_on_every_slice(slice_):
    """Table II of arXiv 2602.02632: gpt2m on all four GPUs."""
    here = [
        row
        for row in fabric_rows()
        if row.cell.cluster == slice_
        and row.cell.model == "gpt2m"
        and row.used == 4
        and row.minutes is not None
    ]
    assert len(here) == 4
    printed = sorted(here, key=lambda row: row.minutes)
    foretold = sorted(here, key=lambda row: row.predicted_s)
    assert [row.cell.technique for row in foretold] == [row.cell.technique for row in printed]


def test_the_first_table_of_the_page_is_the_papers():
    four = next(
        one for one in results.tables(results.points(fabric_rows())) if "gpt2m on 4" in one.title
    )
    lines = {line[0]: line[2:] for line in four.rows}
    heads = four.heads[2:]
    assert dict(zip(heads, lines["TACC-TACC"], strict=True)) == {
        "Data": "41",
        "ZeRO2": "52",
        "Shard": "82",
        "Pipeshard": "29",
    }
    assert lines["GAT-AMST"][heads.index("Shard")] == "5,400"
    assert [heads[best - 2] for best in four.best] == ["Pipeshard"] * 5


def test_a_dollar_buys_what_the_cost_study_plotted():
    paper = cost_study()
    printed = [row for row in cost_rows() if row.step_s is not None]
    assert len(printed) == len(paper.points)
    plotted = {(one.model, one.scheme, one.devices): one.plotted for one in paper.points}
    for row in printed:
        told = plotted[row.cell.model, row.cell.technique, row.used]
        assert row.tokens_per_usd == pytest.approx(told * 3600 / paper.a100_40_usd_per_hour)


def test_cost_study_plots_omit_settings_that_the_paper_does_not_give():
    found = results.points(as_plotted(cost_rows()))
    assert len(found) == len(cost_study().points)
    assert all({"a device", "attention"}.isdisjoint(one.heads) for one in results.tables(found))
    assert {one.name for one in results.prices(found)} == {"usd-devices", "usd-technique"}


def test_cost_study_rows_out_of_memory_have_no_prediction():
    short = [row for row in cost_rows() if row.status == "oom"]
    assert short and all(row.predicted_s is None for row in short)
    assert all(
        figures(row, row.predicted_s).tokens_per_s > 0 for row in cost_rows() if row.status == "ok"
    )


@pytest.mark.parametrize("found", [fabric_rows, cost_rows])
@pytest.mark.parametrize("predicted", [False, True])
def test_the_pages_stay_small(found, predicted):
    html = results_page(found(), "paper", predicted=predicted)
    assert len(html) < 5_000_000 and "</html>" in html
