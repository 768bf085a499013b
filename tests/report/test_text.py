"""What the terminal is told, read back from the lines."""

from __future__ import annotations

import msgspec

from farspan.report.history import open_run
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
    free = msgspec.structs.replace(ESTIMATE, usd=None, run_s=125.0)
    assert plan_line(make_plan(1400), free, CORPUS) == (
        "gpt2-like, 6 layers x 384, 13.9 M parameters · 2.21 M tokens x 1.3 epochs = 1,400 steps of 2,048 tokens"
        " · predicted 2 min 05 s, 1.1 GB"
    )
    assert plan_line(make_plan(216_000, world=2), ESTIMATE, CORPUS).endswith("1.1 GB, $0.0260 on 2 devices")
    assert " x 200 epochs" in plan_line(make_plan(216_000), ESTIMATE, CORPUS)


def test_one_of_a_thing_is_not_many(tmp_path):
    plan = msgspec.structs.replace(make_plan(1), model=msgspec.structs.replace(MODEL, layers=1))
    corpus = msgspec.structs.replace(CORPUS, train=msgspec.structs.replace(CORPUS.train, tokens=2048))
    assert "1 layer x 384" in plan_line(plan, ESTIMATE, corpus)
    assert "2.05 k tokens x 1 epoch = 1 step of 2,048 tokens" in plan_line(plan, ESTIMATE, corpus)
    events = [started(0.0), one_step(1.0, 1), started(9.0), one_step(10.0, 1), started(19.0, 1), one_step(20.0, 2)]
    text = report(open_run(write_run(tmp_path / "run", events[:4], make_plan(2))))
    assert "resumed 1 time, 1 step done twice or lost" in text and "run time of 1 step " in text
    text = report(open_run(write_run(tmp_path / "run", events, make_plan(2))))
    assert "resumed 2 times, 1 step done twice or lost" in text


def test_report_of_a_whole_run(tmp_path):
    text = report(open_run(resumed_run(tmp_path / "demo", steps=200)))
    assert text.startswith("demo: gpt2-like")
    assert "finished every step · step 200 of 200 · resumed 2 times, 6 steps done twice or lost" in text
    assert "warning: validation uses 12 of 1,640 documents <only>" in text
    assert "farspan resume" not in text
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["unigram"][1] == "6.930" and rows["bigram"][1] == "5.210"
    loss = float(rows["unigram"][2])
    assert abs(float(rows["unigram"][3]) - (loss - 6.93)) < 1e-9
    assert abs(float(rows["bigram"][3]) - (loss - 5.21)) < 1e-9
    assert rows["step time"][2:4] == ["90", "ms"]


def test_a_failed_run_says_why_and_how_to_go_on(tmp_path):
    plan = make_plan(100)
    folder = write_run(tmp_path / "my run", train_events(plan, first=0, last=30, at=START, reason="failed"), plan)
    text = summary(open_run(folder))
    assert "failed · step 30 of 100" in text
    assert "error[non-finite]" in text
    assert text.endswith(f"farspan resume '{folder}'")


def test_a_partial_run_is_compared_with_its_share_of_the_prediction(tmp_path):
    plan = make_plan(100)
    estimate = msgspec.structs.replace(
        ESTIMATE, step_s=0.1, run_s=10.0, tokens_per_s=20_480.0, usd=None, interval=(0.5, 2.0)
    )
    start = msgspec.structs.replace(started(0.0, plan=plan), estimate=estimate)
    events = [start, *(one_step(0.2 * n, n, step_s=0.2) for n in range(1, 51))]
    text = report(open_run(write_run(tmp_path / "run", events, plan)))
    line = next(line for line in text.splitlines() if "run time" in line)
    assert line.split("  ")[0] == "run time of 50 steps"
    assert line.split()[-1] == "2.00" and "5.0 s" in line and "10 s" in line
    # Its deadline let 40 of the 100 steps be foretold, in 0.9 of 4.44 s: 50 take as much longer.
    plan = msgspec.structs.replace(plan, train=msgspec.structs.replace(plan.train, deadline_s=4.0 / 0.9))
    start = msgspec.structs.replace(started(0.0, plan=plan), estimate=msgspec.structs.replace(estimate, run_s=4 / 0.9))
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
