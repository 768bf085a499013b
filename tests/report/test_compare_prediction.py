"""Measured beside predicted: what is read from the logs of all ranks, the timeline, the words and
the page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan import models
from farspan.app.reporting import write_report
from farspan.domain.cluster_json import save_cluster_json
from farspan.domain.engine import load_engine
from farspan.domain.plan import Edge, GradSync, Mesh, Replica, Stage
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Step, Traced
from farspan.domain.struct_files import save
from farspan.domain.train import TrainSpec
from farspan.estimate.estimate_plan import estimate
from farspan.report.compare import ALIGNMENT_NOTE, Comparison, compare_to_prediction
from farspan.report.compare_text import comparison_tables, draw_timeline, step_lines, step_rows
from farspan.report.history import open_run
from farspan.report.page import render_page
from farspan.report.text import run_report, run_summary
from farspan.report.traces import Traces
from tests import tiny
from tests.examples import few
from tests.report.fake_fleet import fleet_run, side_by_side
from tests.report.fake_run import make_plan, resumed_run, train_events, write_run
from tests.report.test_page import Reader, browse


def found_in(folder: Path) -> Comparison:
    found = compare_to_prediction(open_run(folder))
    assert found is not None
    return found


def shown(found: Comparison, width: int = 96) -> str:
    return "\n".join("".join(text for text, _ in line) for line in draw_timeline(found, width))


def test_report_of_a_run_as_predicted_places_its_step_inside_the_interval(tmp_path: Path):
    folder = fleet_run(tmp_path / "run")
    found = found_in(folder)
    assert found.steps.inside and found.drifts == () and found.traced == 600
    assert found.steps.measured_s == pytest.approx(found.steps.predicted_s, rel=0.03)
    assert found.steps.half[0] <= found.steps.measured_s <= found.steps.half[1]
    step, spread = step_rows(found)
    assert step[0] == "step, inside the interval" and step[3] in ("1.00", "1.01", "1.02")
    assert re.fullmatch(r"[\d.]+ s-[\d.]+ s", spread[1])
    assert set(step_lines(found)) < set(run_summary(open_run(folder), found).splitlines())


def test_every_device_has_both_rows_with_every_pass(tmp_path: Path):
    found = found_in(fleet_run(tmp_path / "run"))
    assert [row.rank for row in found.drawn] == [0, 1, 2] and [row.stage for row in found.rows] == [
        0,
        1,
        2,
    ]
    for row in found.rows:
        for marks in (row.measured, row.predicted):
            for kind in ("forward", "backward"):
                assert sorted(mark.number for mark in marks if mark.kind == kind) == list(
                    range(1, 9)
                )
        for one, other in zip(
            *(
                [mark for mark in marks if mark.kind in ("forward", "backward")]
                for marks in (row.measured, row.predicted)
            ),
            strict=True,
        ):
            assert (one.kind, one.number) == (other.kind, other.number)
            assert one.end - one.start == pytest.approx(other.end - other.start, rel=1e-3)
            assert one.start == pytest.approx(other.start, abs=0.02 * found.ends)


@few(8)
@given(clocks=st.tuples(*[st.floats(-3600, 3600)] * 3))
def test_clocks_of_hosts_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, clocks: tuple[float, ...]
):
    folder = tmp_path_factory.mktemp("runs")
    kept = {"steps": 30, "traced": (2, 3), "links": (1, 4), "paces": (1, 1.9, 1)}
    one, other = (
        found_in(fleet_run(folder / name, clocks=when, **kept))
        for name, when in (("one", (0, 0, 0)), ("other", clocks))
    )
    assert [d.who for d in one.drifts] == [d.who for d in other.drifts] and len(one.drifts) == 2
    for a, b in zip(one.rows, other.rows, strict=True):
        ends = [[mark.end for mark in row.measured] for row in (a, b)]
        assert ends[0] == pytest.approx(ends[1], abs=1e-4)


def test_the_split_is_of_the_device_that_computes_longest(tmp_path: Path):
    found = found_in(fleet_run(tmp_path / "run"))
    split = open_run(tmp_path / "run").history.estimate
    parts = {part.name: part for part in found.parts}
    assert found.slowest is not None and found.slowest.rank == 2 and split is not None
    assert parts["compute"].predicted_s == split.compute_s
    assert parts["compute"].measured_s == pytest.approx(split.compute_s, rel=1e-3)
    assert parts["waiting for others"].measured_s == pytest.approx(split.bubble_s, rel=0.1)
    assert sum(part.measured_s for part in found.parts) == pytest.approx(found.traced_s, rel=1e-3)
    run = open_run(tmp_path / "run")
    (rows,) = [
        rows[1:] for rows in comparison_tables(run, None, found) if "step 600 of" in rows[0][0]
    ]
    assert rows[0][3] == "1.00" and rows[1][3] == "" and rows[3][1] == ""


def test_heterogeneous_devices_of_one_stage_are_drawn_with_their_own_passes(tmp_path: Path):
    found = found_in(fleet_run(tmp_path / "run", make=side_by_side))
    assert [row.words.split("; ")[1] for row in found.rows] == ["16 rows", "8 rows", "8 rows"]
    for row in found.rows:
        (busy, planned) = (
            [mark for mark in marks if mark.kind in ("forward", "backward")]
            for marks in (row.measured, row.predicted)
        )
        assert [mark.end for mark in busy] == pytest.approx(
            [mark.end for mark in planned], rel=1e-3
        )
    ends = [
        max(mark.end for mark in row.predicted if mark.kind == "backward") for row in found.rows
    ]
    assert ends[1] == ends[2] < ends[0]
    assert {part.name: part for part in found.parts}[
        "communication"
    ].measured_s > 0.1 * found.steps.predicted_s


def test_peak_memory_of_every_device_and_of_the_fullest(tmp_path: Path):
    run = open_run(fleet_run(tmp_path / "run", missing=(2,)))
    found = found_in(tmp_path / "run")
    told = run.history.estimate
    assert told is not None
    assert [(row.memory, row.memory_predicted) for row in found.rows] == [
        (7 * 10**8, told.memory[0].total),
        (8 * 10**8, told.memory[1].total),
        (None, told.memory[2].total),
    ]
    assert comparison_tables(run, None, found)[-1][3][2:] == ("", "")
    assert "800 MB" in next(
        line for line in run_report(run, found).splitlines() if line.startswith("peak memory")
    )


def test_report_notes_missing_logs_of_other_hosts_and_compares_no_parts(tmp_path: Path):
    found = found_in(fleet_run(tmp_path / "run", missing=(1, 2)))
    assert [row.rank for row in found.drawn] == [0]
    assert found.slowest is None and found.parts == ()
    assert (
        "Logs that were kept on their hosts: rank 1, epyc in amst, rank 2, epyc in star."
        in found.notes
    )


def test_the_step_shown_is_the_last_that_all_have(tmp_path: Path):
    folder = fleet_run(tmp_path / "run")
    log = folder / "logs" / "rank-1.events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:500]) + lines[500][:40])
    found = found_in(folder)
    assert found.traced == 400 and len(found.drawn) == 3


def test_steps_that_a_resumption_undid_are_not_shown(tmp_path: Path):
    folder = fleet_run(tmp_path / "run", steps=30, traced=(2, 3, 20, 25))
    for log in (folder / "events.jsonl", *(folder / "logs").iterdir()):
        lines = log.read_bytes().splitlines(keepends=True)
        start = msgspec.json.decode(lines[0])
        again = msgspec.json.encode({**start, "step": 22, "at": start["at"] + 1000}) + b"\n"
        log.write_bytes(b"".join([*lines[:-1], again]))
    assert found_in(folder).traced == 20


def test_runs_without_spans_and_without_a_cluster_open(tmp_path: Path):
    folder = fleet_run(tmp_path / "run", traced=())
    html = render_page(open_run(folder), found_in(folder))
    assert "Device by device" in html and '<figure class="chartless' not in html
    assert shown(found_in(folder)) == ""
    (folder / "cluster.json").unlink()
    assert [row.predicted for row in found_in(folder).rows] == [()] * 3
    (folder / "cluster.json").write_text('{"sites": [], "moons": 3}')
    assert any("No predicted rows" in note for note in found_in(folder).notes)
    plan = make_plan(60, world=2)
    old = write_run(
        tmp_path / "old", train_events(plan, first=0, last=60, at=0.0, reason="done"), plan
    )
    assert (
        compare_to_prediction(open_run(write_run(tmp_path / "none", [], make_plan(5, world=2))))
        is None
    )
    assert compare_to_prediction(open_run(old)) is None  # Its estimate is of one device.


def test_a_run_of_one_device_looks_as_before(tmp_path: Path):
    made = write_report(resumed_run(tmp_path / "run", steps=80))
    run = made.run
    found = made.compared
    written = made.page
    assert found is None and written.read_text() == render_page(run)
    assert "Device by device" not in render_page(run) and ".rows {" not in render_page(run)
    assert run_report(run, found) == run_report(run)


@pytest.mark.parametrize(
    "changes", [{}, {"make": side_by_side}, {"missing": (1,)}, {"traced": ()}, {"backend": "cuda"}]
)
def test_the_page_is_whole_and_stays_inside_its_rows(tmp_path: Path, changes: dict):
    made = write_report(fleet_run(tmp_path / "run", steps=40, **{"traced": (2, 3), **changes}))
    run = made.run
    found = made.compared
    written = made.page
    html = written.read_text()
    reader = Reader(html)
    assert found is not None and write_report(run.folder).page.read_text() == html
    for value in re.findall(r'(?:x|width)="(-?[\d.]+)%"', html):
        assert 0 <= float(value) <= 100.01
    text = " ".join(" ".join(reader.texts).split())
    for row in found.drawn:
        assert f"{row.name} {row.words}" in text
    if found.drawn:
        assert "backward of microbatch 3, " in html and ALIGNMENT_NOTE in text


def test_a_gpu_that_takes_orders_ahead_is_not_split(tmp_path: Path):
    found = found_in(fleet_run(tmp_path / "run", backend="mps", paces=(1, 1, 3)))
    assert found.slowest is None and found.drifts == () and len(found.drawn) == 3
    assert any("GPU" in note for note in found.notes)


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs chromium: apt-get install chromium"
)
def test_a_browser_draws_every_mark_without_a_complaint(tmp_path: Path):
    made = write_report(fleet_run(tmp_path / "run", steps=40, traced=(3,)))
    found = made.compared
    written = made.page
    probe = """<script>
      const rows = document.querySelectorAll(".rows svg.plan"), page = document.documentElement;
      const seen = [...rows].map((row) => row.querySelectorAll("rect.mark").length).join(" ");
      const inside = [...document.querySelectorAll(".rows rect.mark")].every(
        (mark) => mark.getBoundingClientRect().right <= page.clientWidth);
      document.body.innerHTML = `<pre id=read>${seen} ${page.scrollWidth <= innerWidth} ${inside}</pre>`;
    </script></body>"""  # noqa: E501
    probed = tmp_path / "probed.html"
    probed.write_text(written.read_text().replace("</body>", probe))
    done = browse(probed, tmp_path / "profile", "--window-size=400,900", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    assert found is not None
    marks = [len(part) for row in found.drawn for part in (row.measured, row.predicted)]
    assert f'<pre id="read">{" ".join(map(str, marks))} 0 true true</pre>' in done.stdout


@pytest.mark.parametrize("width", [76, 110])
def test_the_terminal_keeps_to_its_width(tmp_path: Path, width: int):
    found = found_in(fleet_run(tmp_path / "run", steps=40, traced=(3,)))
    lines = shown(found, width).splitlines()
    assert max(map(len, lines)) <= width
    labels = [line.split("  ")[0].strip() or "predicted" for line in lines[1:7]]
    assert labels == [
        "rank 0, stage 1",
        "predicted",
        "rank 1, stage 2",
        "predicted",
        "rank 2, stage 3",
        "predicted",
    ]
    assert all(glyph in lines[1] for glyph in "▒█-u")


def test_two_real_workers_show_what_they_did_and_what_was_planned(tmp_path: Path):
    train = TrainSpec(steps=150, batch=8, seq_len=16, precision="fp32", validate_every=1000)
    base = tiny.plan(train)
    stages = tuple(
        Stage(
            units=units,
            mesh=Mesh(ranks=(rank,), shape=(1,), axes=("data",)),
            rows=(8,),
            grad_sync=GradSync(bucket_bytes=None),
        )
        for rank, units in enumerate(((0, 2), (2, 4)))
    )
    replica = Replica(stages=stages, edges=(Edge(bits=32),), microbatches=4, in_flight=(2, 1))
    plan = msgspec.structs.replace(base, replicas=(replica,), devices=base.devices * 2)
    run = tiny.run_folder(tmp_path / "run", plan)
    cluster = tiny.this_machine(plan)
    save_cluster_json(cluster, run.cluster)
    save(estimate(plan, models.graph(plan.model), cluster, load_engine(plan.engine)), run.estimate)
    run.config.write_text("data: tests\n")
    with tiny.workers(run) as workers:
        for event in workers:
            if isinstance(event, Step) and event.step == 12:
                workers.interrupt()
    made = write_report(run.path)
    told = made.run
    found = made.compared
    written = made.page
    traces = Traces(told)
    assert found is not None and found.traced == 3 and [row.rank for row in found.drawn] == [0, 1]
    for row in found.drawn:
        for marks in (row.measured, row.predicted):
            assert sorted(mark.number for mark in marks if mark.kind == "backward") == [1, 2, 3, 4]
        assert row.memory is not None and all(0 <= mark.start <= mark.end for mark in row.measured)
        assert row.measured[-1].end <= traces.of(row.rank, 3)[1].step_s + 1e-5
    kinds = [{mark.kind for mark in row.measured} for row in found.drawn]
    assert kinds[0] == kinds[1] == {"forward", "backward", "receive", "sums", "update"}
    assert written.read_text().count('aria-label="rank 1, cpu-avx2 in here, predicted"') == 1
    assert {part.name for part in found.parts} > {"compute", "waiting for others"}


def test_logs_hold_what_the_reader_expects(tmp_path: Path):
    run = open_run(fleet_run(tmp_path / "run", steps=12, traced=(3,)))
    assert RunFolder(run.folder).logs.is_dir() and sorted(run.histories) == [0, 1, 2]
    (traced,) = run.others[2].traced
    assert isinstance(traced, Traced) and traced.rank == 2 and len(run.others[2].steps) == 12
