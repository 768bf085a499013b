"""The page of a bench: its figures are the rows' own numbers, and a real browser finds nothing to
complain of."""

from __future__ import annotations

import csv
import html
import itertools
import json
import re
import shutil
import subprocess
from urllib.parse import unquote
from xml.etree import ElementTree

import msgspec
import pytest

from farspan import models
from farspan.domain.engine import load_engine
from farspan.domain.train import TrainSpec
from farspan.estimate.scaling_law import scaling_law_loss
from farspan.planning.select_by_trials import SelectionTask
from farspan.planning.size import fitted_shape
from farspan.planning.why import costs_of
from farspan.report.charts import CHART_WIDTH, LEFT_MARGIN, RIGHT_MARGIN
from farspan.report.plan_picture import picture
from farspan_studies.bench.matrix import Cell, Row
from farspan_studies.pages import results
from farspan_studies.pages.bars import Bar, Bars, bar_scale, bars_csv, places, short
from farspan_studies.pages.bars import lines as bar_lines
from farspan_studies.pages.drawn import Drawn, clusters
from farspan_studies.pages.results_page import results_page, write_results
from tests.planning.worlds import FAST, SLOW, cluster
from tests.report.test_page import Reader, browse, browser_command
from tests.waiting import wait_for

RTTS = {"near": 1e-4, "mid": 0.02, "far": 0.1}
#: Seconds a step by technique, near, mid and far.
STEPS = {"data": (0.2, 0.8, 3.0), "shard": (0.3, 4.0, 20.0), "pipeshard": (0.25, 0.3, 0.4)}


def row(
    cluster="near", technique="data", *, step_s=1.0, used=4, batch=8, repeat=0, status="ok", **more
) -> Row:
    cell = Cell(
        cluster=cluster,
        model="gpt2m",
        technique=technique,
        devices=str(used),
        batch=batch,
        seq_len=64,
        precision="fp32",
        attention="sdpa",
        repeat=repeat,
    )
    done = (
        {}
        if status != "ok"
        else {
            "step_s": step_s,
            "steps_s": (step_s,) * 3,
            "tokens_per_s": 2048 / step_s,
            "tflops_per_device": 0.1 / step_s,
            "minutes": 100 * step_s,
            "tokens_per_usd": 2048 / step_s / used * 3600,
            "machine": "a CPU",
            "torch": "2.13",
        }
    )
    made = Row(
        matrix="m",
        cell=cell,
        key=f"{cell}",
        cluster_hash=cluster,
        model_hash="m",
        plan_hash="p",
        status=status,
        used=used,
        rows=32,
        parameters=10**6,
        step_tokens=2048,
        step_flops=1e11 * used,
        run_tokens=2048 * 6000,
        predicted_s=1.2 * step_s,
        usd_per_hour=float(used),
        rtt_s=RTTS[cluster] if used == 4 else None,
        at="2026-11-21T10:00:00",
        farspan="0.1.0",
        **done,
    )
    return msgspec.structs.replace(made, **more)


def study() -> list[Row]:
    rows = [
        row(cluster, technique, step_s=steps[place])
        for place, cluster in enumerate(RTTS)
        for technique, steps in STEPS.items()
    ]
    rows += [row(cluster, "data", step_s=0.35, used=2) for cluster in RTTS]
    rows.append(row("mid", "zero2", status="oom", cause='rank 3: "killed", <by> & the kernel'))
    rows += [row("near", "data", step_s=0.15, batch=16), row("near", "data", step_s=0.22, repeat=1)]
    return rows


def test_a_value_is_the_median_of_its_repeats():
    rows = [row(step_s=s, repeat=i) for i, s in enumerate((1.0, 3.0, 1.1))]
    (found,) = results.points(rows)
    assert (found.step_s, found.minutes, found.span) == (1.1, pytest.approx(110), (100, 300))


def test_repeats_of_a_matrix_that_changed_are_another_answer():
    old = [row(step_s=s, repeat=i, plan_hash="old") for i, s in enumerate((1.0, 3.0, 1.1))]
    (found,) = results.points([row(step_s=2.0, at="2026-11-22T10:00:00"), *old[1:]])
    assert (found.step_s, found.span) == (2.0, None)
    (found,) = results.points(
        [row(step_s=2.0, status="failed", at="2026-11-22T10:00:00"), *old[1:]]
    )
    assert found.step_s is None and found.row.status == "failed"


def test_the_table_is_the_papers_with_the_fastest_marked():
    four, two, *_ = results.tables(results.points(one for one in study() if one.cell.batch == 8))
    assert (
        four.title == "gpt2m on 4 devices, minutes" and two.title == "gpt2m on 2 devices, minutes"
    )
    assert four.heads == ("", "RTT ms", "data", "shard", "pipeshard", "zero2")
    assert [line[:2] for line in four.rows] == [("near", "0.1"), ("mid", "20"), ("far", "100")]
    assert four.rows[1][2:] == ("80", "400", "30", "x")
    # Near, data is the fastest; far away the pipeline is.
    assert four.best == (2, 4, 4)
    assert results.markdown(four).splitlines()[-1] == "| far | 100 | 300 | 2,000 | **40** |  |"


def test_results_table_has_one_line_per_varying_setting():
    four, *_ = results.tables(results.points(study()))
    assert four.heads == ("", "RTT ms", "a device", "data", "shard", "pipeshard", "zero2")
    lines = {
        (line[0], line[2]): (line[3:], best)
        for line, best in zip(four.rows, four.best, strict=True)
    }
    assert lines["near", "16"] == (("15", "", "", ""), 3) and lines["mid", "8"] == (
        ("80", "400", "30", "x"),
        5,
    )
    slow = row(step_s=2.0)
    fast = row(step_s=1.0)
    fast = msgspec.structs.replace(
        fast, cell=msgspec.structs.replace(fast.cell, precision="bf16", seq_len=0)
    )
    (both,) = results.lasting(results.points([slow, fast]))
    assert both.heads == ("", "RTT ms", "tokens", "precision", "data")
    assert [line[2:] for line in both.rows] == [("64", "fp32", "200"), ("context", "bf16", "100")]
    (bar,) = results.studies(results.points([slow, fast]))[0].series[0][1]
    assert (bar.value, bar.note) == (100, "data, 8 a device, context, bf16, sdpa")


def test_clusters_with_too_many_groups_are_named():
    many = [row("near", used=used) for used in range(1, results.MOST_GROUPS + 2)]
    few = row("mid")
    found = results.points([*many, few])
    assert results.crowded(found) == ["near"]
    assert {one.title for one in results.studies(found)} == {
        "mid: minutes",
        "mid: TFLOP/s a device",
    }
    assert "Too many models and devices to draw: near." in results_page([*many, few], "much")


def test_results_table_gives_tokens_per_dollar_of_every_setting():
    _, _, four, two = results.tables(results.points(study()))
    assert four.title == "gpt2m on 4 devices, tokens for a dollar"
    assert four.heads == ("", "a device", "data", "shard", "pipeshard", "zero2")
    lines = {line[:2]: line[2:] for line in four.rows}
    assert lines["near", "16"] == (
        "12.3 M",
        "",
        "",
        "",
    )  # 2,048 tokens in 0.15 s of four devices at a dollar an hour.
    assert (
        lines["mid", "8"] == ("2.3 M", "461 k", "6.14 M", "x")
        and four.best[list(lines).index(("mid", "8"))] == 4
    )
    assert len(two.rows) == 3
    unpriced = [msgspec.structs.replace(one, tokens_per_usd=None) for one in study()]
    assert len(results.tables(results.points(unpriced))) == 2


def test_the_data_of_bars_has_where_repeats_lie():
    minutes = results.studies(
        [one for one in results.points(study()) if one.row.cell.cluster == "near"]
    )[0]
    lines = list(csv.reader(bars_csv(minutes).splitlines()))
    assert lines[0] == ["group", "series", "minutes", "low", "high", "note"]
    assert ["4 devices", "pipeshard", "25", "", "", ""] in lines
    spans = [line[2:5] for line in lines if line[1] == "data" and line[3]]
    assert all(float(low) <= float(value) <= float(high) for value, low, high in spans)


def test_bars_show_the_best_over_what_they_leave_out_and_a_cross_where_nothing_ran():
    (minutes, tflops, *_) = results.studies(
        [one for one in results.points(study()) if one.row.cell.cluster == "mid"]
    )
    assert minutes.groups == ("4 devices", "2 devices")
    series = dict(minutes.series)
    assert [bar.value for bar in series["data"]] == pytest.approx([80, 35])
    assert series["zero2"][0].value is None and "out of memory" in series["zero2"][0].note
    assert [bar.value for bar in dict(tflops.series)["shard"]] == [pytest.approx(0.025), None]
    assert "mid" not in bars_csv(
        minutes
    ) and '4 devices,zero2,,,,"out of memory. rank 3: ""killed"", <by> & the kernel"' in bars_csv(
        minutes
    )


def test_predicted_results_are_tabulated_like_measured_ones():
    foretold = results.points(study(), predicted=True)
    four, *_ = results.tables(foretold)
    assert four.rows[1][3:] == (
        "96",
        "480",
        "36",
        "120",
    )  # 1.2 times what was measured, and what ran out of memory.
    assert not any(one.measured for one in foretold)


def test_money_is_drawn_by_what_varies():
    found = {one.name: one for one in results.prices(results.points(study()))}
    assert set(found) == {"usd-batch", "usd-devices", "usd-technique"}
    near = found["usd-batch"].groups.index("near, gpt2m")
    best = dict(found["usd-batch"].series)
    assert best["16"][near].value == pytest.approx(2048 / 0.15 / 4 * 3600)
    # On 8 a device two devices at 0.35 s give a dollar more than four at 0.2 s.
    assert best["8"][near].value == pytest.approx(max(2048 / 0.21 / 4, 2048 / 0.35 / 2) * 3600)


def test_latency_is_a_line_a_technique():
    (chart,) = results.latency(results.points(study()))
    assert list(chart.x.values) == pytest.approx([0.1, 20, 100])
    assert {one.name: list(one.values) for one in chart.series}["pipeshard"] == [0.25, 0.3, 0.4]
    assert chart.scale == "log"


def test_latency_of_steps_with_different_token_counts_is_drawn_in_separate_figures():
    small = [row(cluster, "pipeshard", step_s=0.1, batch=2, step_tokens=512) for cluster in RTTS]
    whole, part = results.latency(results.points([*study(), *small]))
    assert {one.name: list(one.values) for one in whole.series}["pipeshard"] == [0.25, 0.3, 0.4]
    assert part.title == "gpt2m, steps of 512 tokens: seconds a step by round trip"
    assert [list(one.values) for one in part.series] == [[0.1] * 3]


def test_results_are_grouped_by_site_without_clusters_that_lack_it():
    def at(devices, **more):
        made = row(used=2, **more)
        return msgspec.structs.replace(
            made, cell=msgspec.structs.replace(made.cell, devices=devices)
        )

    lacking = msgspec.structs.replace(at("gpn", status="no-plan"), used=0)
    found = results.points([at("utah", step_s=1.0), at("mass", step_s=2.0), lacking])
    assert [one.title for one in results.lasting(found)] == [
        "gpt2m on utah, minutes",
        "gpt2m on mass, minutes",
    ]
    assert results.studies(found)[0].groups == ("utah", "mass")


def test_a_name_wider_than_its_group_is_broken_into_words():
    chart = Bars(
        "n",
        "t",
        "minutes",
        tuple(f"{n} devices, gpt2" for n in range(12)),
        (("x", (Bar(1.0),) * 12),),
    )
    assert bar_lines(chart.groups[3], chart) == ["3", "devices", "gpt2"]
    few = msgspec.structs.replace(chart, groups=chart.groups[:3])
    assert bar_lines(few.groups[2], few) == ["2 devices", "gpt2"]


def test_a_budget_buys_the_loss_of_the_tokens_that_it_buys():
    chart = results.budgets(results.points(study()))
    (line,) = chart.series
    rate = max(one.tokens_per_usd for one in study() if one.tokens_per_usd is not None)
    for usd, nats in zip(chart.x.values, line.values, strict=True):
        assert nats == pytest.approx(scaling_law_loss(10**6, usd * rate))
    assert chart.x.log and list(line.values) == sorted(line.values, reverse=True)
    assert results.budgets(results.points([row(status="failed")])) is None


def test_sizes_are_points_by_family_beside_the_fit():
    found = [("A", 1e9, 1951.0, 19.0), ("A", 8e9, 4096.0, 32.0), ("B", 8e9, 4000.0, 40.0)]
    width, layers = results.sizes(found, fitted_shape)
    fit, a, b = layers.series
    places = {size: place for place, size in enumerate(layers.x.values)}
    assert (a.values[places[1e9]], a.values[places[8e9]], b.values[places[8e9]]) == (19, 32, 40)
    assert (
        fit.values[places[1e9]] == pytest.approx(18.93)
        and width.series[0].values[places[1e9]] == 1951.37
    )
    assert sum(value is not None for value in b.values) == 1


def two_sites() -> Drawn:
    here = cluster((FAST, FAST), (SLOW, SLOW), rtt_s=0.02)
    train = TrainSpec(steps=10, batch=8, seq_len=1024, precision="fp16")
    asked = SelectionTask(
        model=models.presets()["gpt2"].spec,
        train=train,
        engine=load_engine("farspan"),
        allow=("pipeshard",),
    )
    one = next(one for one in asked.rank(here).candidates if len(one.places) == 4)
    return Drawn(
        "A & B",
        here,
        "pipeshard of gpt2",
        picture(one.plan, one.estimate, costs_of(one.plan, here)),
    )


def test_cluster_is_drawn_with_its_plan_and_listed_as_csv():
    one = two_sites()
    lines = list(csv.reader(one.csv.splitlines()))
    assert {len(line) for line in lines} == {6}
    link = next(line for line in lines if line[0] == "link")
    assert link[1] == "s0 - s1" and float(link[4]) == 0.02
    assert {line[1] for line in lines[1:] if line[0] != "link"} == {"h0", "h1"}
    table = clusters([one, Drawn("lone", cluster((FAST,)))])
    assert table.rows[0] == (
        "A & B",
        "s0: 2 fast of 24 GB; s1: 2 slow of 16 GB",
        "20 ms",
        "1 Gbit/s",
    )
    assert table.rows[1][2:] == ("", "")
    html = results_page(study(), "drawn", drawn=[one])
    assert html.count("A &amp; B") >= 2 and "stage 2" in html
    svg = next(
        unquote(link) for link in Reader(html).links("data:image") if "plan-a" in unquote(link)
    )
    ElementTree.fromstring(svg[svg.index("<svg") :])


def test_every_prediction_is_beside_its_measurement():
    chart = results.truth(study())
    assert len(chart.dots) == sum(one.step_s is not None for one in study())
    assert all(dot.y == pytest.approx(1.2 * dot.x) for dot in chart.dots)
    assert results.truth([row(status="failed")]) is None


@pytest.mark.parametrize("rows", [[row()], [row(status="failed", cause="a fault")], study()])
def test_pages_of_little_and_of_much_nest_and_need_no_network(rows):
    html = results_page(rows, "a <bench>")
    reader = Reader(html)
    written = re.sub(r'"data:[^"]+"', "", html) + "".join(map(unquote, reader.links("data:")))
    written = written.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.findall(r"https?://|url\(|@import", written)
    assert "a &lt;bench&gt;" in html and len(html) < 5_000_000


def test_bars_lie_beside_each_other_inside_the_picture():
    chart = Bars(
        "n",
        "t",
        "minutes",
        ("a", "b"),
        (("x", (Bar(1.0), Bar(2.0))), ("y", (Bar(3.0), Bar(None, "no")))),
    )
    spots = [spot for group in places(chart) for spot in group]
    assert all(x + wide <= after for (x, wide), (after, _) in itertools.pairwise(spots))
    assert spots[0][0] >= LEFT_MARGIN and spots[-1][0] + spots[-1][1] <= CHART_WIDTH - RIGHT_MARGIN
    assert bar_scale(chart)(0.0) == bar_scale(chart).start


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (0.0123456, "0.0123"), (12.34, "12.3"), (1234.5, "1,230"), (3.4e7, "34M")],
)
def test_numbers_on_bars_have_three_digits(value, said):
    assert short(value) == said


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs chromium: apt-get install chromium"
)
@pytest.mark.parametrize(
    ("theme", "dark"), [("preferredColorScheme=0", True), ("preferredColorScheme=1", False)]
)
def test_every_file_of_a_page_is_whole_and_names_with_commas_stay_together(tmp_path, theme, dark):
    """In both themes; the values of a line's point are read from its CSV."""
    named = [row(cluster, 'data, "twice"', step_s=0.5) for cluster in RTTS]
    page, _ = write_results([*study(), *named], tmp_path, "study", drawn=[two_sites()])
    probe = """<script>
      const light = (color) => color.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3;
      const style = getComputedStyle(document.body), files = [], tips = [];
      const shades = [light(style.backgroundColor), light(style.color)];
      for (const link of document.querySelectorAll("a[download]")) {
        const file = decodeURIComponent(link.href.slice(link.href.indexOf(",") + 1));
        const parsed = link.download.endsWith(".svg") && new DOMParser().parseFromString(file, "image/svg+xml");
        files.push([link.download, parsed ? parsed.querySelector("parsererror") === null : file]);
      }
      for (const figure of document.querySelectorAll("figure:not(.chartless)")) {
        const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 1, clientY: box.top + 9 }));
        tips.push(figure.querySelector(".tip").textContent);
      }
      document.body.innerHTML = "<pre id=read></pre>";
      document.getElementById("read").textContent = JSON.stringify([shades, files, tips]);
    </script></body>"""  # noqa: E501
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", probe))
    done = browse(probed, tmp_path / "profile", f"--blink-settings={theme}", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    said = html.unescape(re.search(r'<pre id="read">(.*?)</pre>', done.stdout, re.DOTALL)[1])
    (paper, ink), files, tips = json.loads(said)
    assert (paper < 60 and ink > 180) if dark else (paper > 230 and ink < 80)
    assert len(files) == 2 * len({name.rpartition(".")[0] for name, _ in files}) >= 26
    for name, content in files:
        if name.endswith(".svg"):
            assert content is True, name
        else:
            lines = list(csv.reader(content.splitlines()))
            assert len(lines) > 1 and len({len(line) for line in lines}) == 1, name
    assert any('data, "twice"  0.5' in tip for tip in tips), tips


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs chromium: apt-get install chromium"
)
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_hovers_clicks_and_downloads_without_a_complaint(tmp_path, width):
    page, _ = write_results(study(), tmp_path, "study", drawn=[two_sites()])
    probe = """<script>
      const read = [];
      for (const figure of document.querySelectorAll("figure.marks")) {
        const mark = figure.querySelector("[data-tip]"), tip = figure.querySelector(".tip");
        mark.dispatchEvent(new PointerEvent("pointerenter"));
        const shown = !tip.hidden && tip.textContent, box = tip.getBoundingClientRect();
        const inside = box.left >= 0 && box.right <= innerWidth;
        mark.dispatchEvent(new PointerEvent("pointerleave"));
        const link = figure.querySelector("a[download$='.svg']");
        link.addEventListener("click", (event) => event.preventDefault());
        link.click();
        const file = decodeURIComponent(link.href.slice(link.href.indexOf(",") + 1));
        const parsed = new DOMParser().parseFromString(file, "image/svg+xml");
        const whole = parsed.querySelector("parsererror") === null;
        read.push([shown, tip.hidden, inside, whole, parsed.documentElement.tagName]);
      }
      const fits = document.documentElement.scrollWidth <= innerWidth;
      document.body.innerHTML = "<pre id=read></pre>";
      document.getElementById("read").textContent = JSON.stringify([fits, read]);
    </script></body>"""
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", probe))
    done = browse(probed, tmp_path / "profile", f"--window-size={width},900", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    fits, read = json.loads(re.search(r'<pre id="read">(.*?)</pre>', done.stdout, re.DOTALL)[1])
    assert fits
    # Two figures for each of three clusters, three of tokens for a dollar, a frontier, and
    # predictions.
    assert len(read) == 11
    for shown, hidden, inside, parsed, tag in read:
        assert shown and hidden and inside and parsed and tag == "svg"


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs chromium: apt-get install chromium"
)
def test_a_click_saves_the_file(tmp_path):
    """A file's bytes, where the browser puts what it downloads."""
    page, _ = write_results(study(), tmp_path, "study", drawn=[two_sites()])
    link = "document.querySelectorAll('figure.marks a[download$=\".svg\"]')[0]"
    probed = tmp_path / "probed.html"
    probed.write_text(
        page.read_text().replace("</body>", f"<script>{link}.click()</script></body>")
    )
    saved = tmp_path / "saved"
    profile = tmp_path / "profile"
    (profile / "Default").mkdir(parents=True)
    choice = {"download": {"default_directory": str(saved), "prompt_for_download": False}}
    (profile / "Default/Preferences").write_text(json.dumps(choice))
    browser = subprocess.Popen(
        browser_command(probed, profile), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        found = wait_for(
            lambda: [file for file in saved.glob("*.svg") if file.stat().st_size],
            "a saved file",
            browser,
        )
    finally:
        browser.kill()
        browser.wait()
    (file,) = found
    written = {
        unquote(link.split(",", 1)[1])
        for link in Reader(page.read_text()).links("data:image/svg+xml")
    }
    assert file.read_text() in written
