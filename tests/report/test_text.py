"""What the terminal is told, read back from the lines."""

from __future__ import annotations

import msgspec

from farspan.domain.forecast import Counted
from farspan.domain.results import Validated
from farspan.estimate.forecast import forecast
from farspan.report.history import open_run
from farspan.report.page import page
from farspan.report.text import plan_line, report, short_time, summary, table
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
        line for line in report(foretold).splitlines() if line.startswith("validation loss  ")
    ]
    assert (
        f"{expected.loss:.3f}" in row
        and f"{reached:.3f}" in row
        and f"{reached - expected.loss:+.3f}" in row
    )
    assert not [line for line in report(run).splitlines() if line.startswith("validation loss  ")]


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
    text = report(open_run(write_run(tmp_path / "run", events[:4], make_plan(2))))
    assert "resumed 1 time, 1 step done twice or lost" in text and "run time of 1 step " in text
    text = report(open_run(write_run(tmp_path / "run", events, make_plan(2))))
    assert "resumed 2 times, 1 step done twice or lost" in text


def test_report_of_a_whole_run(tmp_path):
    text = report(open_run(resumed_run(tmp_path / "demo", steps=200)))
    assert "searched, not trained on: 410 exact and 1,233 near duplicates" in text.splitlines()
    assert text.startswith("demo: gpt2-like")
    assert (
        "finished every step · step 200 of 200 · resumed 2 times, 6 steps done twice or lost"
        in text
    )
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
    text = summary(open_run(folder))
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
    text = report(open_run(write_run(tmp_path / "run", events, plan)))
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
    text = report(open_run(write_run(tmp_path / "short", [start, *events[1:]], plan)))
    assert "5.6 s" in next(line for line in text.splitlines() if "run time of 50 steps" in line)


def test_before_the_first_step_there_is_still_a_summary(tmp_path):
    text = report(open_run(write_run(tmp_path / "run", [started(0.0)], make_plan(5))))
    assert "still running, or killed · step 0 of 5" in text


def test_table_columns_line_up():
    assert table([("a", "bb"), ("long", "1")]) == ["a     bb", "--------", "long   1"]


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
    return report(run), page(run)


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


def test_report_warns_of_a_loss_above_the_unigram_entropy_with_a_fix(tmp_path):
    for name, train_loss, before, helps in (
        ("little", 6.0, 6.5, "more time"),
        ("heart", 2.0, 6.5, "by heart"),
        ("spoilt", 6.0, 4.0, "lower train.optimizer.lr"),
    ):
        validations = validated(2, before, best=True), validated(3, 6.2)
        for text in told(tmp_path / name, *validations, train_loss=train_loss):
            assert (
                "has learned less than word frequencies" in text
                and "1.20 nats above" in text
                and helps in text
            )
    for text in told(tmp_path / "well", validated(3, 4.9)):
        assert "word frequencies" not in text
