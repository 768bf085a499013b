"""What the terminal is told, read back from the lines."""

from __future__ import annotations

import msgspec

from farspan.domain.forecast import Counted
from farspan.domain.run_events import Finished, Rescheduled, Saved, Validated, Warned
from farspan.domain.units import short_time
from farspan.estimate.loss_forecast import forecast
from farspan.report.figures import run_charts
from farspan.report.history import open_run
from farspan.report.measurement import measure_run
from farspan.report.page import render_page
from farspan.report.text import align_table, entropy_rows, plan_line, run_report, run_summary
from tests.report.fake_run import (
    CORPUS,
    ESTIMATE,
    MODEL,
    START,
    make_plan,
    one_step,
    resumed_run,
    started,
    train_events,
    write_run,
)


def test_plan_line():
    work = msgspec.structs.replace(ESTIMATE.workload, usd_per_hour=None, steps=1250)
    free = msgspec.structs.replace(ESTIMATE, workload=work)
    assert plan_line(make_plan(1400), free, CORPUS) == (
        "gpt2-like, 6 layers x 384, 13.9 M parameters · 2.21 M tokens x 1.3 epochs = 1,400 steps "
        "of 2,048 tokens"
        " · predicted 2 min 05 s, 1.1 GB"
    )
    assert plan_line(make_plan(216_000, world=2), ESTIMATE, CORPUS).endswith(
        "1.1 GB, $0.0260 on 2 devices"
    )
    assert " x 200 epochs" in plan_line(make_plan(216_000), ESTIMATE, CORPUS)


def test_report_shows_predicted_and_reached_validation_loss_with_the_difference(tmp_path):
    run = open_run(resumed_run(tmp_path / "run", steps=200))
    counted = tuple(
        Counted(tokens=tokens, few=few, few_again=few, many_again=few)
        for tokens, few in ((5e4, 6.0), (2e5, 5.4))
    )
    expected = forecast(
        counted, parameters=3e6, unique_tokens=1e6, tokens=2e5, steps=50, bigram_nats=5.2
    )
    assert expected is not None
    assert f"validation loss {expected.loss:.2f} ({expected.interval[0]:.2f} to " in plan_line(
        run.plan, ESTIMATE, CORPUS, expected
    )
    foretold = msgspec.structs.replace(run, forecast=expected)
    reached = run.history.validations[-1].loss
    (row,) = [
        line for line in run_report(foretold).splitlines() if line.startswith("validation loss  ")
    ]
    assert (
        f"{expected.loss:.3f}" in row
        and f"{reached:.3f}" in row
        and f"{reached - expected.loss:+.3f}" in row
    )
    assert not [
        line for line in run_report(run).splitlines() if line.startswith("validation loss  ")
    ]


def test_report_uses_singular_nouns_for_one(tmp_path):
    plan = msgspec.structs.replace(make_plan(1), model=msgspec.structs.replace(MODEL, layers=1))
    corpus = msgspec.structs.replace(
        CORPUS, train=msgspec.structs.replace(CORPUS.train, tokens=2048)
    )
    assert "1 layer x 384" in plan_line(plan, ESTIMATE, corpus)
    assert "2.05 k tokens x 1 epoch = 1 step of 2,048 tokens" in plan_line(plan, ESTIMATE, corpus)
    events = [
        started(0.0),
        one_step(1.0, 1),
        started(9.0),
        one_step(10.0, 1),
        started(19.0, 1),
        one_step(20.0, 2),
    ]
    text = run_report(open_run(write_run(tmp_path / "run", events[:4], make_plan(2))))
    assert "resumed 1 time, 1 step done twice or lost" in text and "run time of 1 step " in text
    text = run_report(open_run(write_run(tmp_path / "run", events, make_plan(2))))
    assert "resumed 2 times, 1 step done twice or lost" in text


def test_report_of_a_whole_run(tmp_path):
    text = run_report(open_run(resumed_run(tmp_path / "demo", steps=200)))
    assert "searched, not trained on: 410 exact and 1,233 near duplicates" in text.splitlines()
    assert text.startswith("demo: gpt2-like")
    assert "completed all 200 steps · resumed 2 times, 6 steps done twice or lost" in text
    assert "warning: validation uses 12 of 1,640 documents <only>" in text
    assert "farspan resume" not in text
    assert text.endswith("25% of the last sample stands in the text word for word")
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["unigram"][1] == "6.930" and rows["bigram"][1] == "5.210"
    loss = float(rows["unigram"][2])
    assert abs(float(rows["unigram"][3]) - (loss - 6.93)) < 1e-9
    assert abs(float(rows["bigram"][3]) - (loss - 5.21)) < 1e-9
    assert rows["step time"][2:4] == ["90", "ms"]


def test_report_of_a_failed_run_shows_the_error_and_resume_command(tmp_path):
    plan = make_plan(100)
    folder = write_run(
        tmp_path / "my run", train_events(plan, first=0, last=30, at=START, reason="failed"), plan
    )
    text = run_summary(open_run(folder))
    assert "failed · step 30 of 100" in text
    assert "error[non-finite]" in text
    assert text.endswith(f"farspan resume '{folder}'")


def test_a_partial_run_is_compared_with_its_share_of_the_prediction(tmp_path):
    plan = make_plan(100)
    work = msgspec.structs.replace(
        ESTIMATE.workload, steps=90, tokens_per_step=2048, usd_per_hour=None
    )
    estimate = msgspec.structs.replace(ESTIMATE, step_s=0.1, workload=work, interval=(0.5, 2.0))
    start = msgspec.structs.replace(started(0.0, plan=plan), estimate=estimate)
    events = [start, *(one_step(0.2 * n, n, step_s=0.2) for n in range(1, 51))]
    text = run_report(open_run(write_run(tmp_path / "run", events, plan)))
    line = next(line for line in text.splitlines() if "run time" in line)
    assert line.split("  ")[0] == "run time of 50 steps"
    assert line.split()[-1] == "2.00" and "5.0 s" in line and "10 s" in line
    # Its deadline let 40 of the 100 steps be foretold, in 0.9 of 4.44 s: 50 take as much longer.
    plan = msgspec.structs.replace(
        plan, train=msgspec.structs.replace(plan.train, deadline_s=4.0 / 0.9)
    )
    work = msgspec.structs.replace(work, deadline_s=4 / 0.9)
    start = msgspec.structs.replace(
        started(0.0, plan=plan), estimate=msgspec.structs.replace(estimate, workload=work)
    )
    text = run_report(open_run(write_run(tmp_path / "short", [start, *events[1:]], plan)))
    assert "5.6 s" in next(line for line in text.splitlines() if "run time of 50 steps" in line)


def test_before_the_first_step_there_is_still_a_summary(tmp_path):
    text = run_report(open_run(write_run(tmp_path / "run", [started(0.0)], make_plan(5))))
    assert "still running, or killed · step 0 of 5" in text


def test_table_columns_line_up():
    assert align_table([("a", "bb"), ("long", "1")]) == ["a     bb", "--------", "long   1"]


def test_short_times_keep_three_digits():
    assert [short_time(s) for s in (0.0881, 0.117, 1.357, 12.34, 150.0)] == [
        "88.1 ms",
        "117 ms",
        "1.36 s",
        "12.3 s",
        "2 min 30 s",
    ]


def validated(step: int, loss: float, **fields) -> Validated:
    told = {
        "bits_per_byte": loss / 2,
        "tokens": 16_000,
        "seconds": 0.1,
        "best": False,
        "of": 82_000,
        "read": "these",
        "unigram_nats": 5.0,
        "bigram_nats": 4.0,
    } | fields
    return Validated(at=10.0 * step, step=step, loss=loss, **told)


def told(folder, *validations, train_loss: float = 6.0) -> tuple[str, str]:
    """The report as text, and as a page."""
    steps = [one_step(10.0 * n, n, loss=train_loss) for n in (1, 2, 3)]
    run = open_run(
        write_run(
            folder, sorted([started(0.0), *steps, *validations], key=lambda e: e.at), make_plan(3)
        )
    )
    return run_report(run), render_page(run)


def test_report_shows_token_count_and_standard_error_of_validation_losses(tmp_path):
    first = validated(2, 4.5, best=True, standard_error=0.08)
    last = validated(
        3,
        4.2,
        tokens=82_000,
        standard_error=0.0,
        sample_loss=4.4,
        sample_tokens=16_000,
        best=True,
        unigram_nats=6.0,
        bigram_nats=4.5,
    )
    text, html = told(tmp_path / "whole", first, last)
    assert (
        "validation loss 4.200 on 82,000 of 82,000 tokens" in text
        and "1.80 nats below the unigram" in text
    )
    assert "loss and entropies on 82,000 of 82,000 tokens" in text and "6.000" in text
    assert (
        "on 82,000 of 82,000 tokens" in html
        and "validation loss on 16,000 of 82,000 tokens" in html
    )
    assert "best weights" not in text
    text, html = told(tmp_path / "part", first)
    assert "validation loss 4.500 ± 0.080 (standard error) on 16,000 of 82,000 tokens" in text
    assert "4.500 ± 0.080 (standard error)" in html and "on 16,000 of 82,000 tokens" in html


def test_report_shows_both_best_and_last_weights_if_they_differ(tmp_path):
    first = validated(2, 4.3, best=True)
    last = validated(3, 4.2, tokens=82_000, sample_loss=4.6, sample_tokens=16_000)
    for text in told(tmp_path / "run", first, last):
        assert (
            "best weights, of step 2: 4.300 on 16,000 of 82,000 tokens, where the last have 4.600"
            in text
        )


def learned(folder, train_losses, *validations, epochs: float = 3.0) -> str:
    """The report of a run whose steps had these losses, over so many epochs of its text."""
    steps = [one_step(10.0 * n, n, loss=loss) for n, loss in enumerate(train_losses, start=1)]
    each = round(epochs * CORPUS.train.tokens / len(steps))
    steps = [msgspec.structs.replace(step, tokens=each) for step in steps]
    last = len(steps)
    told = [msgspec.structs.replace(event, step=last, at=10.0 * last) for event in validations]
    return run_report(open_run(write_run(folder, [started(0.0), *steps, *told], make_plan(last))))


def test_report_warns_of_a_loss_above_the_unigram_entropy_with_a_fix(tmp_path):
    for name, losses, before, helps in (
        ("little", [9.0, 8.0, 6.0], 6.5, "more time or steps, or a smaller size"),
        ("overfitted", [9.0, 5.0, 2.0, 0.5, 0.5], 6.5, "has overfitted its training text"),
        ("spoilt", [9.0, 7.0, 5.5], 4.0, "a lower train.optimizer.lr: it was better before"),
        ("too-fast", [9.0, 7.0, 9.9, 12.0], 6.5, "a lower train.optimizer.lr: the training loss"),
    ):
        validations = validated(2, before, best=True), validated(3, 6.2)
        text = learned(tmp_path / name, losses, *validations)
        assert "has learned less than word frequencies" in text
        assert "1.20 nats above" in text and helps in text
        assert "higher train.optimizer.lr" not in text
    for text in told(tmp_path / "well", validated(3, 4.9)):
        assert "word frequencies" not in text


def test_nothing_is_called_overfitted_that_was_hardly_trained(tmp_path):
    """Words that are new to the validation split put its unigram entropy above any training
    loss."""
    hard = validated(3, 9.6, unigram_nats=9.3)
    assert "overfitted" not in learned(tmp_path / "three", [9.0, 8.9, 8.8], hard)
    low = validated(3, 6.2)
    assert "overfitted" not in learned(tmp_path / "once", [9.0, 5.0, 2.0, 0.5], low, epochs=1.0)
    assert "overfitted" in learned(tmp_path / "often", [9.0, 5.0, 2.0, 0.5], low, epochs=2.0)


def test_a_training_loss_that_rises_late_is_a_rate_that_was_too_high(tmp_path):
    steady = [9.0 - 2.5 * n / 400 + 0.2 * (-1) ** n for n in range(400)]
    spoilt = steady[:300] + [loss + 1.0 for loss in steady[300:]]
    bad = validated(400, 6.9)
    assert "more time or steps" in learned(tmp_path / "steady", steady, bad)
    assert "a lower train.optimizer.lr" in learned(tmp_path / "spoilt", spoilt, bad)


def test_summary_has_the_speed_of_steps_and_that_of_the_whole_run(tmp_path):
    plan = make_plan(4)
    steps = [one_step(40.0 * n, n, step_s=0.5, tokens=1000) for n in (1, 2, 3, 4)]
    text = run_summary(open_run(write_run(tmp_path / "run", [started(0.0), *steps], plan)))
    assert "4 k tokens in 2 min 40 s, 25 tokens/s with all else" in text
    assert "2,000 tokens/s within steps" in text


def test_summary_explains_nats_below_the_unigram_entropy(tmp_path):
    text, html = told(tmp_path / "run", validated(3, 4.0))
    for words in (text, html):
        assert "1.00 nats below the unigram entropy (the loss of token frequencies alone;" in words
        assert "1 nat is 1.44 bits" in words


def test_warnings_that_later_events_made_past_are_not_repeated_at_the_end(tmp_path):
    plan = make_plan(4)
    steps = [one_step(10.0 * n, n) for n in (1, 2, 3, 4)]
    unsaved = Warned(at=11.0, message="step 1: no checkpoint could be written", until="saved")
    saved = Saved(at=31.0, step=3, path="checkpoints/3", size_bytes=10, seconds=0.1)
    spike = Warned(at=12.0, message="the loss of rank 1 is far above the others'")
    fits = Rescheduled(at=13.0, step=1, steps=2, planned=4)
    late = Warned(at=41.0, message="step 4: no checkpoint could be written", until="saved")
    for name, more, repeated in (
        ("past", [saved], False),
        ("still", [], True),
        ("again", [saved, late], False),
    ):
        events = sorted(
            [started(0.0), *steps, unsaved, spike, fits, *more], key=lambda event: event.at
        )
        run = open_run(write_run(tmp_path / name, events, plan))
        text = run_summary(run)
        html = render_page(run)
        banner = html.split("<dl")[0]
        for shown in (text, banner):
            assert ("step 1: no checkpoint could be written" in shown) == repeated
            assert ("step 4: no checkpoint could be written" in shown) == (name == "again")
            assert "far above the others" in shown
            assert "fit the time budget" not in shown
        # The page's course of events has all of them.
        assert "only 2 of 4 steps fit the time budget" in html
        assert "step 1: no checkpoint could be written" in html


def test_endings_do_not_count_to_a_total_that_only_the_time_decides(tmp_path):
    plan = make_plan(132)
    train = msgspec.structs.replace(plan.train, deadline_s=60.0, most_steps=10_000)
    plan = msgspec.structs.replace(plan, train=train)
    steps = [one_step(n / 10, n) for n in range(1, 301)]
    for reason, first in (
        ("deadline", "used up its time budget · 300 steps"),
        ("interrupted", "interrupted · 300 steps"),
        ("done", "completed all 300 steps"),
    ):
        end = Finished(at=31.0, step=300, reason=reason, seconds=31.0)
        run = open_run(write_run(tmp_path / reason, [started(0.0), *steps, end], plan))
        assert run_summary(run).splitlines()[0] == first


def test_chart_and_table_have_the_same_entropies_and_the_same_last_loss(tmp_path):
    first = validated(2, 4.5, best=True)
    last = validated(
        3,
        4.2,
        tokens=82_000,
        sample_loss=4.4,
        sample_tokens=16_000,
        unigram_nats=6.0,
        bigram_nats=4.5,
    )
    steps = [one_step(10.0 * n, n) for n in (1, 2, 3)]
    events = sorted([started(0.0), *steps, first, last], key=lambda event: event.at)
    run = open_run(write_run(tmp_path / "run", events, make_plan(3)))
    (chart,) = [one for one in run_charts(run) if one.name == "loss-tokens"]
    rows = entropy_rows(run, measure_run(run))
    assert [(name, f"{nats:.3f}") for name, nats in chart.levels] == [
        (f"{name} entropy", entropy) for name, entropy, _, _ in rows
    ]
    by_name = {series.name: series.values for series in chart.series}
    assert by_name["validation loss on 16,000 of 82,000 tokens"] == [None, 4.5, 4.4]
    assert by_name["last validation on 82,000 of 82,000 tokens"] == [None, None, 4.2]
    assert {row[2] for row in rows} == {"4.200"}
