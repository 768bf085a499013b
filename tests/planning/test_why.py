"""Why a plan was chosen: every figure of a row is recomputed here from the estimates."""

from __future__ import annotations

import msgspec
import pytest

from farspan.cli.plan_table import table_legend
from farspan.domain.units import format_bytes, format_seconds, short_time
from farspan.estimate.traffic import between_sites, traffic
from farspan.planning.ranking import (
    Ranking,
    describe_verdict,
    devices_line,
    equal_loss_note,
    format_difference,
    format_spending,
    time_bounds_s,
)
from farspan.planning.why import costs_of, describe_choice, exchange_row, explain_choice
from tests.planning.worlds import ranking

PAIR = "FF", "SS"


def found(one: Ranking, technique: str, where: str):
    return next(c for c in one.candidates if c.technique == technique and c.where == where)


def test_the_choice_names_plan_devices_time_interval_and_split():
    one = ranking(*PAIR)
    chosen = one.candidates[one.chosen]
    text = describe_choice(one)
    low, high = time_bounds_s(chosen)
    share = chosen.estimate.compute_s / chosen.estimate.step_s
    devices = devices_line(one.cluster, chosen.places)
    assert text.startswith(
        f"{chosen.technique} on {chosen.where} ({devices}) is fastest: "
        f"{format_seconds(chosen.time_s)}"
    )
    assert f"({format_seconds(low)} to {format_seconds(high)})" in text
    assert f"{share:.0%} compute" in text


def row_of(rows, technique: str):
    (row,) = [row for row in rows if technique in row.plan.split(" on ")[0].split(", ")]
    return row


def test_every_technique_is_compared_with_the_choice_once():
    one = ranking(*PAIR)
    chosen = one.candidates[one.chosen]
    rows = explain_choice(one).against
    for technique in {c.technique for c in one.candidates}:
        best = next(c for c in one.candidates if c.technique == technique)
        row = row_of(rows, technique)
        assert (
            describe_verdict(one, best) in row.facts
            and devices_line(one.cluster, best.places) in row.facts
        )
        assert row.time == format_seconds(best.time_s)
        assert row.compute == short_time(best.estimate.compute_s)
    assert rows[0].plan == f"{chosen.technique} on {chosen.where}"
    assert rows[0].facts.startswith("chosen, ")


def test_a_slow_link_is_named_with_its_bytes_and_its_round_trips():
    one = ranking(*PAIR, allow=("data", "zero2"))
    far = found(one, "data", "all devices")
    costs = costs_of(far.plan, one.cluster)
    sizes = between_sites(traffic(far.plan, costs), costs.network)[("s0", "s1")]
    (row,) = explain_choice(one).left_out
    assert f"gradients s0 - s1 {format_bytes(sizes['gradients'])} " in row.facts
    assert row.communication == short_time(far.estimate.communication_s)
    exchange = next(e for e in traffic(far.plan, costs) if e.purpose == "gradients")
    trips = round(exchange.latency_s / 0.05)
    assert exchange_row(exchange, costs)[4] == f"{trips} x 50 ms rtt"


def test_slower_devices_have_their_peak_by_their_data_sheets():
    one = ranking("F", "S", allow=("data",))
    fast, slow = explain_choice(one).against[:2]
    assert "1 fast, 100 TFLOP/s peak" in fast.facts and "1 slow, 40 TFLOP/s peak" in slow.facts


def test_a_site_that_is_left_out_has_its_reason():
    one = ranking(*PAIR, allow=("data", "zero2"))
    chosen = one.candidates[one.chosen]
    assert chosen.places == (0, 1)
    (row,) = explain_choice(one).left_out
    joint = [c for c in one.candidates if set(c.places) > {0, 1}]
    best = min(joint, key=lambda one: one.time_s)
    assert row.plan == f"with s1: {best.technique} on all devices"
    assert format_difference(best.time_s / chosen.time_s) in row.facts


def test_a_device_that_is_left_out_of_its_host_is_named_with_the_host():
    one = ranking(*PAIR, objective="cost")
    names = [row.plan.split(":")[0] for row in explain_choice(one).left_out]
    assert one.candidates[one.chosen].places == (2,)
    assert names == ["with s0", "with 1 slow of h1"]


def test_nothing_is_left_out_where_all_is_used():
    one = ranking("FF", allow=("zero2",), batch=64)
    assert one.candidates[one.chosen].places == (0, 1)
    assert explain_choice(one).left_out == ()


def test_why_reports_the_missing_memory_of_techniques_without_a_plan():
    one = ranking("SS", model="gpt2-xl", allow=("data",))
    (refused,) = one.refused
    problem = refused.problem
    assert one.candidates == () and problem.code == "out-of-memory"
    told = explain_choice(one)
    assert told.choice.startswith("Nothing is chosen: slow is short of ")
    (row,) = told.against
    assert str(row) == f"data: no plan: {problem.what} ({problem.fact})"
    assert describe_verdict(one, refused) == "does not fit"


def test_why_reports_plans_within_the_prediction_interval_as_undecided():
    one = ranking(*PAIR)
    chosen = one.candidates[one.chosen]
    high = chosen.estimate.interval[1]
    close = [
        c
        for c in one.candidates
        if c is not chosen and c.eligible and c.time_s < high * chosen.time_s
    ]
    told = explain_choice(one).unknown
    assert f"to {high:.2f} x" in told[0].facts
    assert any("a trial of each would decide" in row.facts for row in told) == bool(close)
    assumed = [row.facts for row in told if row.plan == "assumed"]
    assert assumed == list(chosen.estimate.assumptions)


def test_a_queue_is_a_reason():
    one = ranking(*PAIR)
    first = one.candidates[0]
    waiting = msgspec.structs.replace(first, time_s=first.time_s + 3600, queue_s=3600.0)
    queued = msgspec.structs.replace(one, candidates=(waiting, *one.candidates[1:]))
    assert "1 h 00 min in a queue" in explain_choice(queued).against[0].facts
    assert not any("queue" in row.facts for row in explain_choice(one).against)


def test_reasons_on_diloco_have_the_time_to_equal_loss_and_that_of_its_steps():
    one = ranking(*PAIR)
    diloco = one.candidates[one.chosen]
    assert diloco.technique == "diloco"
    note = (
        f" to equal loss, at {1 / diloco.estimate.token_efficiency:.3g} x the tokens; its "
        f"1,000 steps take {format_seconds(diloco.estimate.whole_s)}"
    )
    assert equal_loss_note(diloco) == note
    assert f"is fastest: {format_seconds(diloco.time_s)} (" in describe_choice(one)
    assert note in describe_choice(one)
    cheapest = ranking(*PAIR, objective="cost")
    row = row_of(explain_choice(cheapest).against, "diloco")
    worth = f"{1 / diloco.estimate.token_efficiency:.3g} x the tokens to equal loss"
    assert row.time == format_seconds(diloco.time_s) and worth in row.facts
    assert "equal loss" not in describe_choice(cheapest)


def test_rows_have_the_money_where_money_is_compared():
    one = ranking(*PAIR, objective="cost")
    diloco = next(c for c in one.candidates if c.technique == "diloco")
    row = row_of(explain_choice(one).against, "diloco")
    assert row.time == format_seconds(diloco.time_s)
    assert row.facts.startswith(f"{describe_verdict(one, diloco)}, {format_spending(diloco)}, ")


def test_legend_of_a_table_with_diloco_says_that_its_minutes_are_to_equal_loss():
    one = ranking(*PAIR)
    worth = 1 / one.candidates[one.chosen].estimate.token_efficiency
    assert f"diloco {worth:.3g} x the tokens" in table_legend(one.candidates)
    assert "equal loss" not in table_legend([c for c in one.candidates if c.technique != "diloco"])
    assert "tokens" not in table_legend([c for c in one.candidates if c.technique != "diloco"])


def test_an_objective_in_money_is_compared_in_money():
    one = ranking(*PAIR, objective="cost")
    chosen = one.candidates[one.chosen]
    other = next(c for c in one.candidates if c.estimate.usd > 1.05 * chosen.estimate.usd)
    assert "cheapest" in describe_choice(one)
    assert describe_verdict(one, other).endswith("costlier")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.0, "as fast"),
        (1.0004, "as fast"),
        (1.043, "4.3 % slower"),
        (1.24, "24 % slower"),
        (2.41, "2.4 x slower"),
        (457.3, "457 x slower"),
        (0.9, "10 % faster"),
    ],
)
def test_differences_in_words(value: float, words: str):
    assert format_difference(value) == words
