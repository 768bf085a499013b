"""The page: well-formed, without any reference to a network, and opened in a real browser."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.domain.run_events import Step, Warned
from farspan.report.charts import (
    CHART_WIDTH,
    HEIGHT,
    MAX_GROUPS,
    Axis,
    Chart,
    Scale,
    Series,
    label,
    thin,
    ticks,
    to_csv,
)
from farspan.report.figures import moving_mean, run_charts
from farspan.report.history import open_run
from farspan.report.page import render_page, template_environment, write_page
from farspan.runtime.training.events import EventLog
from tests.report.fake_run import (
    CORPUS,
    START,
    make_plan,
    one_step,
    resumed_run,
    started,
    train_events,
    write_run,
)

VOID = {"meta", "link", "br", "hr", "img", "input", "line", "circle", "polyline"}


class Reader(HTMLParser):
    """Checks that tags nest, and gathers attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open = []
        self.attributes = []
        self.texts = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.texts.append(data)

    def links(self, prefix: str) -> list[str]:
        return [
            value
            for _, name, value in self.attributes
            if name == "href" and value.startswith(prefix)
        ]


def tiny_run(folder: Path) -> Path:
    return write_run(folder, [started(0.0), one_step(0.5, 1)], make_plan(1400))


def stepless_run(folder: Path) -> Path:
    events = train_events(make_plan(10), first=0, last=0, at=START, reason="failed")
    return write_run(folder, events, make_plan(10))


def failed_run(folder: Path) -> Path:
    return write_run(
        folder,
        train_events(make_plan(90), first=0, last=41, at=START, reason="failed"),
        make_plan(90),
    )


@pytest.mark.parametrize("make", [tiny_run, stepless_run, failed_run, resumed_run])
def test_the_page_is_well_formed_and_needs_no_network(tmp_path, make):
    html = render_page(open_run(make(tmp_path / "run")))
    reader = Reader(html)
    # The files that the page holds as links name the SVG namespace.
    written = re.sub(r'"data:[^"]+"', "", html) + "".join(map(unquote, reader.links("data:")))
    for harmless in ("// Values", 'xmlns="http://www.w3.org/2000/svg"'):
        written = written.replace(harmless, "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", written)
    outside = [
        (tag, name, value)
        for tag, name, value in reader.attributes
        if name in ("src", "href", "srcset", "action", "data", "poster")
        and not value.startswith("data:")
    ]
    assert outside == []
    names = [value for _, name, value in reader.attributes if name == "id"]
    assert len(names) == len(set(names))


def test_everything_of_the_run_is_there(tmp_path):
    run = open_run(resumed_run(tmp_path / "my run"))
    reader = Reader(render_page(run))
    text = " ".join(" ".join(reader.texts).split())
    for part in (
        "my run",
        "Completed all 1,400 steps",
        "unigram entropy",
        "bigram entropy",
        CORPUS.hash,
        run.plan.hash,
        "CPU with AMX",
        "budget: {time: 2m}",
        "data: pydocs # the <built-in> corpus & nothing else",
        "1 .pdf: no text in it (broken.pdf)",
        "2 .txt: read as cp1252 (cafe.txt, thé.txt)",
        "validation uses 12 of 1,640 documents <only>",
        "resumed",
        "checkpoints/00001400",
        'Return a <string> & "more" at step 1400.',
        "</script>",
    ):
        assert part in text, part
    titles = [
        "Loss against tokens",
        "Loss against time",
        "Tokens a second",
        "Learning rate",
        "Gradient norm",
    ]
    assert all(title in text for title in titles)


def test_the_links_hold_each_figure_and_its_points(tmp_path):
    run = open_run(resumed_run(tmp_path / "run", steps=120))
    reader = Reader(render_page(run))
    drawings = reader.links("data:image/svg+xml")
    tables = reader.links("data:text/csv")
    assert len(drawings) == len(tables) == 6
    for link in drawings:
        root = ElementTree.fromstring(unquote(link.split(",", 1)[1]))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in ElementTree.tostring(root, encoding="unicode")
        assert [child.tag.split("}")[1] for child in root[:2]] == ["title", "desc"]
    rows = list(csv.DictReader(io.StringIO(unquote(tables[0].split(",", 1)[1]))))
    assert [float(row["tokens"]) for row in rows] == [2048 * n for n in range(1, 121)]
    for row, timed in zip(rows, run.history.steps, strict=True):
        assert float(row["train loss"]) == pytest.approx(timed.step.loss, rel=1e-5)
    drawn = {
        float(row["tokens"]): float(row["validation loss"])
        for row in rows
        if row["validation loss"]
    }
    assert drawn == pytest.approx(
        {2048.0 * v.step: v.loss for v in run.history.validations}, rel=1e-5
    )


def test_blank_lines_of_a_sample_are_one(tmp_path):
    run = open_run(resumed_run(tmp_path / "run"))
    sample = msgspec.structs.replace(run.history.samples[-1], text="one\n \n\n\n  two\nthree")
    history = msgspec.structs.replace(run.history, samples=(sample,))
    assert "one\n\n  two\nthree</pre>" in render_page(msgspec.structs.replace(run, history=history))


def test_names_of_levels_are_drawn_over_every_line(tmp_path):
    chart = run_charts(open_run(resumed_run(tmp_path / "run")))[0]
    drawn = str(template_environment().get_template("chart.svg").module.drawing(chart, chart.text))
    assert drawn.index('class="note"') > max(
        drawn.rindex(f'class="{line}"') for line in ("level", "mark", "grid")
    )
    assert drawn.index('class="note"') > drawn.rindex("<polyline")


@pytest.mark.parametrize("skipped", [3, 40])
def test_steps_that_overflowed_have_no_gradient_norm(tmp_path, skipped):
    """What the trainer says of an update that fp16 skipped, through the real log."""
    plan = make_plan(40)
    folder = write_run(tmp_path / "run", [], plan)
    with EventLog(folder / "events.jsonl") as log:
        for event in train_events(plan, first=0, last=40, at=START, reason="done"):
            if isinstance(event, Step) and event.step <= skipped:
                event = msgspec.structs.replace(
                    event, grad_norm=math.inf if event.step % 2 else math.nan
                )
            log.write(event)
    run = open_run(folder)
    unknown = [timed.step.grad_norm is None for timed in run.history.steps]
    assert unknown == [step <= skipped for step in range(1, 41)]
    drawn = {chart.name: chart for chart in run_charts(run)}
    assert len(drawn) == (6 if skipped < 40 else 5)
    assert (
        ("Gradient norm" in Reader(render_page(run)).texts)
        == ("grad-norm" in drawn)
        == (skipped < 40)
    )
    for series in drawn["grad-norm"].series if skipped < 40 else ():
        assert [value is None for value in series.values] == unknown


def test_a_hundred_thousand_steps_make_a_small_page(tmp_path):
    plan = make_plan(100_000)
    folder = write_run(
        tmp_path / "run", train_events(plan, first=0, last=100_000, at=START, reason="done"), plan
    )
    assert len(render_page(open_run(folder)).encode()) < 1_000_000


def test_the_same_events_give_the_same_bytes(tmp_path):
    run = open_run(resumed_run(tmp_path / "run", steps=80))
    first = write_page(run).read_bytes()
    assert write_page(run).read_bytes() == first


def test_hostile_text_stays_text(tmp_path):
    plan = make_plan(5)
    nasty = (
        '</style></script><script>document.title="owned"</script><img src=x onerror=alert(1)>{{ '
        "7*7 }}{% raw %}"
    )
    events = train_events(plan, first=0, last=5, at=START, reason="done")
    events.insert(1, Warned(at=START, message=nasty))
    events = [
        msgspec.structs.replace(e, prompt=nasty, text=nasty) if hasattr(e, "prompt") else e
        for e in events
    ]
    folder = write_run(tmp_path / nasty.replace("/", "_"), events, plan)
    (folder / "run.yaml").write_text(nasty)
    reader = Reader(render_page(open_run(folder)))
    assert [tag for tag, name, _ in reader.attributes if tag == "img" or name == "onerror"] == []
    assert any(nasty in text for text in reader.texts)


def chart(values: list[float | None], **more) -> Chart:
    series = (
        Series("a", values, "line", "train"),
        Series("b", [None] * len(values), "points", "val"),
    )
    return Chart("n", "t", Axis("x", [float(i) for i in range(len(values))]), series, **more)


DRAWING = template_environment().get_template("chart.svg").module


FINITE = st.floats(-1e9, 1e9, allow_subnormal=False)


@given(st.lists(FINITE, min_size=1, max_size=60), st.sampled_from(["free", "zero", "log"]))
def test_every_point_lies_inside_the_box(values, scale):
    values = values if scale == "free" else [abs(value) for value in values]
    root = ElementTree.fromstring(
        DRAWING.drawing(chart(values, scale=scale, levels=(("l", values[0]),)), "d").strip()
    )
    for line in root.iter("polyline"):
        for point in line.get("points").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= CHART_WIDTH and 0 <= y <= HEIGHT


@given(FINITE, st.floats(1e-9, 1e9))
def test_ticks_are_few_inside_and_ascending(low, span):
    if low + span == low or span < abs(low) * 1e-9:
        return
    found = ticks(Scale(low, low + span, 0.0, 1.0), 6)
    slack = span * 1e-6
    assert 2 <= len(found) <= 8
    assert found == sorted(found) and found[0] >= low - slack and found[-1] <= low + span + slack


@given(st.integers(0, 10**6), st.integers(2 * MAX_GROUPS + 1, 5000))
def test_thinning_keeps_extremes_ends_and_validations(seed, count):
    import random

    rng = random.Random(seed)
    whole = chart([rng.gauss(0, 1) for _ in range(count)])
    lone = rng.randrange(count)
    marked = msgspec.structs.replace(
        whole,
        series=(
            whole.series[0],
            Series("b", [1.0 if i == lone else None for i in range(count)], "points", "val"),
        ),
    )
    thinned = thin(marked)
    values = whole.series[0].values
    x = thinned.x.values
    assert len(x) <= 2 * MAX_GROUPS + 3
    assert min(thinned.series[0].values) == min(values) and max(thinned.series[0].values) == max(
        values
    )
    assert x[0] == 0 and x[-1] == count - 1 and float(lone) in x
    assert all(
        value == values[int(at)] for at, value in zip(x, thinned.series[0].values, strict=True)
    )


def test_short_charts_are_drawn_whole():
    whole = chart([1.0, None, 3.0])
    assert thin(whole) == whole
    assert to_csv(whole) == "x,a,b\n0,1,\n1,,\n2,3,\n"
    named = msgspec.structs.replace(whole.series[0], name='7B, "wide"')
    assert to_csv(msgspec.structs.replace(whole, series=(named,))).startswith(
        'x,"7B, ""wide"""\n0,1\n'
    )


def test_smoothing_by_hand():
    assert moving_mean([3.0, 6.0, 0.0, 9.0]) == [3.0, 3.0, 5.0, 9.0]
    assert moving_mean([]) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1e-15, "0"),
        (3e-4, "3e-4"),
        (2.5e-4, "2.5e-4"),
        (0.05, "0.05"),
        (4.5, "4.5"),
        (-2, "-2"),
        (999, "999"),
        (5000, "5,000"),
        (20_000, "20k"),
        (1.5e6, "1.5M"),
        (2e9, "2B"),
    ],
)
def test_tick_labels(value, text):
    assert label(value) == text


def browser_command(path: Path, profile: Path, *more: str) -> list[str]:
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--enable-logging=stderr",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}",
    ]
    return [shutil.which("chromium") or "chromium", *flags, *more, path.as_uri()]


def browse(path: Path, profile: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        browser_command(path, profile, *more), capture_output=True, text=True, timeout=180
    )


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs chromium: apt-get install chromium"
)
def test_a_browser_opens_the_page_without_a_complaint_and_shows_values(tmp_path):
    """A script added to the page moves the pointer over each figure and tells what a reader is
    shown."""
    path = write_page(open_run(resumed_run(tmp_path / "run")))
    html = path.read_text()
    probe = """<script>
      const read = [...document.querySelectorAll("figure")].map((figure) => {
        const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 1, clientY: box.top + 9 }));
        const last = figure.querySelector(".tip").textContent;
        svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
        return [last, figure.querySelector(".tip").textContent, document.documentElement.scrollWidth <= innerWidth];
      });
      document.body.innerHTML = "<pre id=read></pre>";
      document.getElementById("read").textContent = JSON.stringify(read);
    </script></body>"""  # noqa: E501
    probed = tmp_path / "probed.html"
    probed.write_text(html.replace("</body>", probe))
    done = browse(probed, tmp_path / "profile", "--window-size=400,900", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'<pre id="read">(.*?)</pre>', done.stdout, re.DOTALL)
    read = json.loads(found[1])
    assert len(read) == 6
    assert (
        read[0][0].startswith("tokens  2,867,200\ntrain loss  4.")
        and "validation loss  4.53" in read[0][0]
    )
    assert all(last != before and fits for last, before, fits in read)
