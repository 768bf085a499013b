"""Why a plan was chosen: every number in a sentence is recomputed here from the estimates."""

from __future__ import annotations

import re

import msgspec
import pytest

from farspan.cli.plan_table import legend
from farspan.domain.units import format_bytes, format_seconds, short_time
from farspan.estimate.traffic import between_sites, traffic
from farspan.planning.ranking import (
    Ranking,
    bounds,
    devices_line,
    difference,
    equal_loss_note,
    factor,
    verdict,
)
from farspan.planning.why import choice, costs_of, exchange_line, slower_because, why
from tests.planning.worlds import ranking

PAIR = "FF", "SS"


def found(one: Ranking, technique: str, where: str):
    return next(c for c in one.candidates if c.technique == technique and c.where == where)


def test_the_choice_names_plan_devices_time_interval_and_split():
    one = ranking(*PAIR)
    chosen = one.candidates[one.chosen]
    text = choice(one)
    low, high = bounds(chosen)
    share = chosen.estimate.compute_s / chosen.estimate.step_s
    devices = devices_line(one.cluster, chosen.places)
    assert text.startswith(
        f"{chosen.technique} on {chosen.where} ({devices}) is fastest: "
        f"{format_seconds(chosen.time_s)}"
    )
    assert f"({format_seconds(low)} to {format_seconds(high)})" in text
    assert f"{share:.0%} compute" in text


def test_every_technique_is_compared_with_the_choice_once():
    one = ranking(*PAIR)
    chosen, told = one.candidates[one.chosen], why(one).against
    for technique in {c.technique for c in one.candidates} - {chosen.technique}:
        best = next(c for c in one.candidates if c.technique == technique)
        (sentence,) = [
            text for text in told if re.search(rf"\b{technique}\b", text.split(" on ")[0])
        ]
        assert difference(factor(one, best, chosen)) in sentence
        assert format_seconds(best.time_s) in sentence


def test_a_slow_link_is_named_with_its_bytes_and_its_round_trips():
    one = ranking(*PAIR)
    chosen, far = one.candidates[one.chosen], found(one, "data", "all devices")
    costs = costs_of(far.plan, one.cluster)
    sizes = between_sites(traffic(far.plan, costs), costs.network)[("s0", "s1")]
    (reason, *_) = slower_because(one.cluster, far, chosen)
    assert f"{format_bytes(sizes['gradients'])} of gradients a step between s0 and s1" in reason
    assert short_time(far.estimate.communication_s) in reason
    exchange = next(e for e in traffic(far.plan, costs) if e.purpose == "gradients")
    trips = round(exchange.latency_s / 0.05)
    assert (f"{trips} round trips of 50 ms" in exchange_line(exchange, costs)) == (
        exchange.latency_s >= 0.1 * exchange.seconds
    )


def test_fewer_devices_are_named_where_arithmetic_takes_longer():
    one = ranking("FF", allow=("data", "zero2"), batch=64)
    single = found(one, "data", "one fast of h0")
    chosen = one.candidates[one.chosen]
    assert len(chosen.places) == 2
    assert slower_because(one.cluster, single, chosen)[0].endswith("1 device does what 2 share")


def test_slower_devices_are_named_with_their_data_sheets():
    one = ranking("F", "S", allow=("data",))
    slow = next(c for c in one.candidates if c.places == (1,))
    assert (
        "1 slow have 40 TFLOP/s by their data sheets, 1 fast 100 TFLOP/s"
        in slower_because(one.cluster, slow, one.candidates[one.chosen])[0]
    )


def test_a_site_that_is_left_out_has_its_reason():
    one = ranking(*PAIR, allow=("data", "zero2"))
    chosen = one.candidates[one.chosen]
    assert chosen.places == (0, 1)
    (sentence,) = why(one).left_out
    joint = [c for c in one.candidates if set(c.places) > {0, 1}]
    best = min(joint, key=lambda one: one.time_s)
    assert sentence.startswith(
        f"Do not use s1, because: the best with it, {best.technique} on all devices, is "
    )
    assert difference(best.time_s / chosen.time_s) in sentence


def test_nothing_is_left_out_where_all_is_used():
    one = ranking("FF", allow=("zero2",), batch=64)
    assert one.candidates[one.chosen].places == (0, 1)
    assert why(one).left_out == ()


def test_why_reports_the_missing_memory_of_techniques_without_a_plan():
    one = ranking("SS", model="gpt2-xl", allow=("data",))
    (refused,) = one.refused
    problem = refused.problem
    assert one.candidates == () and problem.code == "out-of-memory"
    told = why(one)
    assert told.choice.startswith("Nothing is chosen: slow is short of ")
    assert told.against == (f"data has no plan: {problem.what} ({problem.fact}).",)
    assert verdict(one, refused) == "does not fit"


def test_why_reports_plans_within_the_prediction_interval_as_undecided():
    one = ranking(*PAIR)
    chosen = one.candidates[one.chosen]
    high = chosen.estimate.interval[1]
    close = [
        c
        for c in one.candidates
        if c is not chosen and c.eligible and c.time_s < high * chosen.time_s
    ]
    told = why(one).unknown
    assert f"to {high:.2f} times" in told[0]
    assert any("a trial of each would decide" in text for text in told) == bool(close)
    for text in chosen.estimate.assumptions:
        assert any(text.split(": ")[-1] in sentence for sentence in told)


def test_a_queue_is_a_reason():
    one = ranking(*PAIR)
    chosen = one.candidates[one.chosen]
    waiting = msgspec.structs.replace(chosen, time_s=chosen.time_s + 3600, queue_s=3600.0)
    assert slower_because(one.cluster, waiting, chosen) == ["it waits 1 h 00 min in a queue first"]


def test_a_run_that_a_deadline_cuts_waits_in_no_queue():
    one = ranking(*PAIR)
    chosen = one.candidates[one.chosen]
    other = next(c for c in one.candidates if c.time_s > 1.1 * chosen.time_s)
    work = msgspec.structs.replace(other.estimate.workload, deadline_s=0.5 * other.estimate.run_s)
    cut = msgspec.structs.replace(other.estimate, workload=work)
    said = slower_because(one.cluster, msgspec.structs.replace(other, estimate=cut), chosen)
    assert said == slower_because(one.cluster, other, chosen) and not any(
        "queue" in each for each in said
    )


def test_sentences_on_diloco_have_the_time_to_equal_loss_and_that_of_its_steps():
    one = ranking(*PAIR)
    diloco = one.candidates[one.chosen]
    assert diloco.technique == "diloco"
    note = (
        f" to equal loss, at {1 / diloco.estimate.token_efficiency:.3g} x the tokens; its "
        f"1,000 steps take {format_seconds(diloco.estimate.whole_s)}"
    )
    assert equal_loss_note(diloco) == note
    assert f"is fastest: {format_seconds(diloco.time_s)} (" in choice(one)
    assert note in choice(one) and any(note in text for text in why(one).against)
    cheapest = ranking(*PAIR, objective="cost")
    (sentence,) = [text for text in why(cheapest).against if text.startswith("diloco ")]
    assert format_seconds(diloco.time_s) in sentence and note in sentence
    assert "equal loss" not in choice(cheapest)


def test_money_is_compared_over_the_time_that_costs_it():
    one = ranking(*PAIR, objective="cost")
    diloco = next(c for c in one.candidates if c.technique == "diloco")
    (sentence,) = [text for text in why(one).against if text.startswith("diloco ")]
    assert f"4 devices for {format_seconds(diloco.time_s)}, not " in sentence


def test_legend_of_a_table_with_diloco_says_that_its_minutes_are_to_equal_loss():
    one = ranking(*PAIR)
    worth = 1 / one.candidates[one.chosen].estimate.token_efficiency
    assert f"diloco {worth:.3g} x the tokens" in legend(one.candidates)
    assert "equal loss" not in legend([c for c in one.candidates if c.technique != "diloco"])
    assert "tokens" not in legend([c for c in one.candidates if c.technique != "diloco"])


def test_an_objective_in_money_is_compared_in_money():
    one = ranking(*PAIR, objective="cost")
    chosen = one.candidates[one.chosen]
    other = next(c for c in one.candidates if c.estimate.usd > 1.05 * chosen.estimate.usd)
    assert "cheapest" in choice(one)
    assert verdict(one, other).endswith("costlier")


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
    assert difference(value) == words
