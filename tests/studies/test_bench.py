"""`farspan bench` on this machine: every cell a row, nothing measured twice, and what a matrix may
not say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from farspan import __version__ as farspan_version
from farspan.domain.clusterfile import load_cluster
from farspan.domain.engine import load_engine
from farspan.domain.model import count_parameters
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.domain.struct_files import convert, load, load_yaml, save
from farspan.estimate.estimate_plan import price
from farspan.planning.why import costs_of
from farspan_lab import state
from farspan_studies.bench.cases import case, check_techniques, spec_of
from farspan_studies.bench.matrix import Matrix, Row, cells
from farspan_studies.bench.measuring import Results, may_pass
from farspan_studies.bench.trials import DeviceTrial, as_tried
from farspan_studies.commands.bench import path_of
from farspan_studies.pages.results import points
from tests.launch.conftest import up
from tests.studies.test_results import row as made_row
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

DEVICE = "{kind: cpu-avx2, memory: 4GB}"
CLUSTER = f"sites: {{here: {{hosts: {{me: {{enter: [], devices: [{DEVICE}, {DEVICE}]}}}}}}}}\n"
MATRIX = """\
name: small
clusters: {here: here.yaml}
models: {tiny: {layers: 2, d_model: 32, vocab: 300, context: 32}}
techniques: [data, 'published:Pipeshard', diloco]
batch: [4]
devices: [all, 1]
steps: 3
prices: {cpu-avx2: 0.5}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here.yaml").write_text(CLUSTER)
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    return tmp_path


def rows_of(folder: Path) -> list[Row]:
    lines = (folder / "bench" / "small" / "rows.jsonl").read_text().splitlines()
    return [msgspec.json.decode(line, type=Row) for line in lines]


def problem(done) -> dict[str, str]:
    return json.loads(done.stdout)["problem"]


def test_every_cell_has_a_row_and_none_is_measured_twice(farspan, folder):
    pq = pytest.importorskip("pyarrow.parquet", reason="waits for farspan[parquet]")
    done = farspan("bench", "matrix.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = {(row.cell.technique, row.cell.devices): row for row in rows_of(folder)}
    assert len(rows) == 6
    for name in (("data", "all"), ("data", "1"), ("published:Pipeshard", "all")):
        row = rows[name]
        assert row.status == "ok", row.cause
        assert len(row.steps_s) == 3 and min(row.steps_s) <= row.step_s <= max(row.steps_s)
        assert row.tokens_per_s == pytest.approx(4 * row.used * 32 / row.step_s)
        assert row.minutes == pytest.approx(10e6 / row.tokens_per_s / 60)
        assert row.tokens_per_usd == pytest.approx(3600 * row.tokens_per_s / (0.5 * row.used))
        assert row.predicted_low_s < row.predicted_s < row.predicted_high_s
        assert row.memory_bytes > 10**8 and row.torch and row.machine and row.plan_hash
        assert (folder / "bench/small/plans" / f"{row.plan_hash}.json").exists()
    lacking = rows["diloco", "all"]
    assert lacking.status == "no-plan" and "several sites" in lacking.cause
    ran = rows["data", "all"]  # A package's version may lack what is built into it.
    assert (
        lacking.torch.split("+")[0] == ran.torch.split("+")[0]
        and lacking.python
        and lacking.commit == ran.commit
    )
    table = pq.read_table(folder / "bench/small/results.parquet")
    assert table.num_rows == 6 and {"cell_technique", "step_s", "predicted_s"} <= set(
        table.column_names
    )

    # The model was tried once, on one device of as many sequences as a cell's: what a cell of that
    # device is foretold.
    (path,) = (folder / "bench/small/trials").iterdir()
    tried = load(path, DeviceTrial).probe
    assert (tried.rows, tried.seq_len) == (4, 32) and done.stdout.count(
        "trying tiny on one cpu-avx2 of here"
    ) == 1
    assert rows["data", "1"].predicted_s == pytest.approx(tried.speeds["fp32"].step_s)

    # What is drawn of a plan is what it was priced at.
    row = rows["data", "1"]
    results = Results(folder / "bench/small")
    plan = results.plan(row.plan_hash)
    plain = results.cluster(row.cluster_hash)
    there = as_tried(results.trials, plain, row.cluster_hash, plan)
    assert price(plan, costs_of(plan, there)).step_s == pytest.approx(row.predicted_s)
    assert price(plan, costs_of(plan, plain)).step_s != pytest.approx(row.predicted_s)

    before = (folder / "bench/small/rows.jsonl").read_bytes()
    again = farspan("bench", "matrix.yaml", cwd=folder)
    assert "trying" not in again.stdout
    assert "6 of them measured already, 0 to measure" in again.stdout
    assert (folder / "bench/small/rows.jsonl").read_bytes() == before


def test_a_device_that_cannot_be_tried_is_predicted(farspan, folder):
    (folder / "here.yaml").write_text(CLUSTER.replace("enter: []", "enter: ['false']"))
    (folder / "matrix.yaml").write_text(
        MATRIX.replace("[data, 'published:Pipeshard', diloco]", "[data, diloco]")
    )
    done = farspan("bench", "matrix.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot be tried there") == 1
    (path,) = (folder / "bench/small/trials").iterdir()
    assert load(path, DeviceTrial).probe is None
    rows = [row for row in rows_of(folder) if row.cell.technique == "data"]
    assert len(rows) == 2 and all(row.status == "failed" and row.predicted_s > 0 for row in rows)
    assert "cannot be tried there" in farspan("bench", "matrix.yaml", "--retry", cwd=folder).stdout


def test_bench_resumes_after_an_interrupt_keeping_measured_rows(farspan, folder, environment):
    process = subprocess.Popen(
        [sys.executable, "-m", "farspan", "bench", "matrix.yaml"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    path = folder / "bench/small/rows.jsonl"
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n"), "a row", process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    first = path.read_bytes()
    assert (folder / "bench/small/results.parquet").exists()
    path.write_bytes(first + b'{"half a li')
    done = farspan("bench", "matrix.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(first) and len(rows_of(folder)) == 6
    assert not subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout


LAB = """\
name: two
sites: {a: {devices: 1}, b: {devices: 1}}
links: [{between: [a, b], rtt: 20ms}]
"""


def test_bench_removes_the_lab_left_by_a_killed_bench(farspan, folder, environment):
    """Killed, a bench can end nothing itself: its trial ends when it misses it, its lab when
    another bench begins."""
    up(LAB.replace("two", name := f"bench-{os.getpid()}-any"))  # Or skips.
    state.down(name)
    (folder / "lab.yaml").write_text(LAB)
    matrix = MATRIX.replace("here.yaml", "{lab: lab.yaml}").replace(
        "[data, 'published:Pipeshard', diloco]", "[data]"
    )
    (folder / "matrix.yaml").write_text(matrix.replace("steps: 3", "steps: 100000\ndeadline: 10m"))
    process = subprocess.Popen(
        [sys.executable, "-m", "farspan", "bench", "matrix.yaml", "--yes"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    mine = f"bench-{process.pid}-0"
    wait_for(lambda: workers_of(mine), "the workers of the bench", process)
    process.kill()
    process.communicate(timeout=300)
    wait_for(lambda: not workers_of(mine), "the workers' end")
    assert mine in state.names()
    (folder / "matrix.yaml").write_text(matrix)
    done = farspan("bench", "matrix.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert mine not in state.names()
    assert [row.status for row in rows_of(folder)] == ["ok", "ok"]


def workers_of(lab: str) -> list[int]:
    """The workers that run in a lab."""
    if lab not in state.names():
        return []
    found = []
    for pid in state._processes(state.home(lab)):
        with contextlib.suppress(OSError):
            if b"farspan.runtime.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_bench_writes_a_row_without_a_plan_for_clusters_lacking_the_devices(farspan, folder):
    (folder / "large.yaml").write_text(CLUSTER.replace(DEVICE, f"{DEVICE}, {DEVICE}"))
    matrix = MATRIX.replace("here: here.yaml", "here: here.yaml, large: large.yaml").replace(
        "[all, 1]", "[4]"
    )
    (folder / "matrix.yaml").write_text(
        matrix.replace("[data, 'published:Pipeshard', diloco]", "[diloco]")
    )
    done = farspan("bench", "matrix.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    causes = {row.cell.cluster: (row.status, row.cause) for row in rows_of(folder)}
    assert causes["here"][0] == "no-plan" and "no devices '4'" in causes["here"][1]
    assert causes["large"][0] == "no-plan" and "several sites" in causes["large"][1]


def test_a_cluster_that_changed_is_refused(farspan, folder):
    (folder / "matrix.yaml").write_text(
        MATRIX.replace("[data, 'published:Pipeshard', diloco]", "[diloco]")
    )
    assert farspan("bench", "matrix.yaml", cwd=folder).returncode == 0
    (folder / "here.yaml").write_text(CLUSTER.replace("4GB", "2GB"))
    done = farspan("bench", "matrix.yaml", "--json", cwd=folder)
    assert problem(done)["code"] == "plan-mismatch" and "changed since" in problem(done)["what"]


def test_bench_applies_later_prices_to_measurements_made_without_them(farspan, folder):
    without = MATRIX.replace("prices: {cpu-avx2: 0.5}\n", "").replace(
        "[data, 'published:Pipeshard', diloco]", "[data]"
    )
    (folder / "matrix.yaml").write_text(without.replace("[all, 1]", "[1]"))
    assert farspan("bench", "matrix.yaml", cwd=folder).returncode == 0
    (before,) = rows_of(folder)
    assert before.tokens_per_usd is None
    with open(folder / "matrix.yaml", "a") as file:
        file.write("prices: {cpu-avx2: 0.5}\n")
    assert (
        "1 of them measured already, 0 to measure"
        in farspan("bench", "matrix.yaml", cwd=folder).stdout
    )
    _, row = rows_of(folder)
    assert row.step_s == before.step_s
    assert row.tokens_per_usd == pytest.approx(3600 * row.tokens_per_s / 0.5)


def test_repeats_of_another_day_and_price_count_together(farspan, folder):
    once = MATRIX.replace("[data, 'published:Pipeshard', diloco]", "[data]").replace(
        "[all, 1]", "[1]"
    )
    (folder / "matrix.yaml").write_text(once)
    assert farspan("bench", "matrix.yaml", cwd=folder).returncode == 0
    (folder / "matrix.yaml").write_text(once.replace("0.5", "0.7") + "repeats: 2\n")
    assert (
        "2 cells, 1 of them measured already" in farspan("bench", "matrix.yaml", cwd=folder).stdout
    )
    first, second = Results(folder / "bench/small").read()
    assert (first.cell.repeat, second.cell.repeat) == (0, 1) and first.plan_hash == second.plan_hash
    (both,) = points([first, second])
    assert both.span == (min(first.minutes, second.minutes), max(first.minutes, second.minutes))


def test_killed_cell_is_measured_again_unless_predicted_not_to_fit():
    """Who was killed may have been so for another program's memory; what was predicted not to fit
    will not fit."""
    assert may_pass(made_row(status="failed", cause="a crash"))
    assert may_pass(made_row(status="oom", cause="rank 1 on me was lost", signal="SIGKILL"))
    assert not may_pass(
        made_row(status="oom", cause="not run: a device lacks 3 GB")
    ) and not may_pass(made_row())


def test_a_folder_takes_the_rows_of_one_bench_at_a_time(farspan, folder):
    with Results(folder / "bench/small").held():
        told = problem(farspan("bench", "matrix.yaml", "--json", cwd=folder))
    assert told["code"] == "run-busy" and told["remedy"].startswith("fuser ")
    assert not (folder / "bench/small/rows.jsonl").exists()


def test_bench_measures_again_for_a_changed_matrix_and_ignores_old_rows(farspan, folder):
    (folder / "matrix.yaml").write_text(
        MATRIX.replace("[data, 'published:Pipeshard', diloco]", "[diloco]")
    )
    assert farspan("bench", "matrix.yaml", cwd=folder).returncode == 0
    with open(folder / "matrix.yaml", "a") as file:
        file.write("tokens: 20M\n")
    done = farspan("bench", "matrix.yaml", "--json", cwd=folder)
    assert [row["run_tokens"] for row in json.loads(done.stdout)["rows"]] == [20e6, 20e6]
    assert len(rows_of(folder)) == 4


def test_a_plan_file_answers_what_it_was_made_for(folder):
    matrix = load_yaml(folder / "matrix.yaml", Matrix)
    cluster = load_cluster(folder / "here.yaml")
    both, one = (cell for cell in cells(matrix) if cell.technique == "data")
    save(case(both, matrix, cluster, load_engine("farspan")).made, folder / "mine.json")

    def found(cell, **changed):
        changed = {"technique": str(folder / "mine.json"), **changed}
        return case(
            msgspec.structs.replace(cell, **changed), matrix, cluster, load_engine("farspan")
        ).made

    assert isinstance(found(both), Plan)
    for made, unlike in (
        (found(both, batch=8), "batch"),
        (found(one), "the devices, batch"),
        (found(both, seq_len=16), "seq_len"),
        (found(both, precision="bf16"), "precision"),
        (found(both, attention="vanilla"), "attention"),
    ):
        assert isinstance(made, Problem) and made.fact == f"unlike: {unlike}"
    mine = json.loads((folder / "mine.json").read_text())
    (folder / "mine.json").write_text(
        json.dumps(mine | {"train": mine["train"] | {"compile": True}})
    )
    made = found(both)
    assert isinstance(made, Problem) and made.fact == "unlike: compile"
    mine["replicas"][0]["stages"][0]["units"] = [0, 3]
    (folder / "mine.json").write_text(json.dumps(mine))
    made = found(both)
    assert isinstance(made, Problem) and "units [0, 3]" in made.fact


def test_rows_of_another_version_are_refused(farspan, folder):
    (folder / "matrix.yaml").write_text(
        MATRIX.replace("[data, 'published:Pipeshard', diloco]", "[diloco]")
    )
    assert farspan("bench", "matrix.yaml", cwd=folder).returncode == 0
    path = folder / "bench/small/rows.jsonl"
    path.write_text(path.read_text().replace(f'"farspan":"{farspan_version}"', '"farspan":"0.0.1"'))
    told = problem(farspan("bench", "matrix.yaml", "--json", cwd=folder))
    assert told["code"] == "version-mismatch" and "0.0.1" in told["fact"]


def test_rows_that_cannot_be_read_are_refused(farspan, folder):
    out = folder / "bench" / "small"
    out.mkdir(parents=True)
    (out / "rows.jsonl").write_text('{"matrix": "small", "seconds": 3}\n')
    done = farspan("bench", "matrix.yaml", "--json", cwd=folder)
    assert problem(done)["code"] == "version-mismatch"


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        (
            ("techniques: [data, 'published:Pipeshard', diloco]", "techniques: [pipeshrad]"),
            "out-of-range",
            "pipeshard",
        ),
        (
            ("techniques: [data, 'published:Pipeshard', diloco]", "techniques: []"),
            "out-of-range",
            "techniques",
        ),
        (("devices: [all, 1]", "devices: [3]"), "device-missing", "2 devices"),
        (("devices: [all, 1]", "devices: [mars]"), "device-missing", "here"),
        (("steps: 3", "seq_len: [64]"), "out-of-range", "32 positions"),
        (("steps: 3", "stepz: 3"), "unknown-key", "steps"),
        (("here.yaml}", "there.yaml}"), "path-missing", "there.yaml"),
        (("{layers: 2,", "{layers: 0,"), "out-of-range", "layers"),
        (("name: small", "name: small\ntokens: -4"), "out-of-range", "tokens"),
        (("name: small", "name: small\ndeadline: soon"), "out-of-range", "deadline"),
        (
            ("{layers: 2, d_model: 32, vocab: 300, context: 32}", "gtp2"),
            "out-of-range",
            "key models",
        ),
        (("{layers: 2, d_model: 32, vocab: 300, context: 32}", "0M"), "out-of-range", "key models"),
    ],
)
def test_bench_refuses_invalid_matrix_files_naming_the_key(farspan, folder, change, code, word):
    assert change[0] in MATRIX
    (folder / "matrix.yaml").write_text(MATRIX.replace(*change))
    done = farspan("bench", "matrix.yaml", "--json", cwd=folder)
    told = problem(done)
    assert told["code"] == code and word in " ".join(told.values()), told
    assert "run.yaml" not in told["where"] and "--" not in told["where"] + told["remedy"], told
    assert not (folder / "bench" / "small" / "rows.jsonl").exists()


def test_bench_of_hundreds_of_cells_reports_the_predicted_time_and_does_not_start(farspan, folder):
    many = MATRIX.replace("batch: [4]", f"batch: {list(range(1, 121))}")
    (folder / "matrix.yaml").write_text(
        many.replace("[data, 'published:Pipeshard', diloco]", "[data]")
    )
    done = farspan("bench", "matrix.yaml", "--json", cwd=folder)
    told = problem(done)
    assert (
        told["code"] == "usage"
        and "240 cells" in told["what"]
        and "predicted to take" in told["fact"]
    )


def test_bench_of_many_thousands_of_cells_is_refused_with_their_number(farspan, folder):
    many = MATRIX.replace(
        "batch: [4]", f"batch: {list(range(1, 31))}\nseq_len: {list(range(1, 33))}\nrepeats: 10"
    )
    (folder / "matrix.yaml").write_text(
        many.replace("[data, 'published:Pipeshard', diloco]", "[data]")
    )
    done = farspan("bench", "matrix.yaml", "--json", cwd=folder)
    told = problem(done)
    assert told["code"] == "usage" and "19,200 cells" in told["what"], told


def test_a_matrix_is_the_product_of_its_lists_each_once():
    matrix = convert(
        {
            "name": "m",
            "clusters": {"a": "x", "b": "y"},
            "models": {"p": "gpt2", "q": "gpt2m"},
            "techniques": ["data", "data", "zero1"],
            "batch": [1, 2],
            "repeats": 2,
        },
        Matrix,
        "matrix.yaml",
    )
    found = cells(matrix)
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2 * 2
    assert [cell.repeat for cell in found] == [0] * 16 + [1] * 16


def test_an_unknown_matrix_names_the_nearest(farspan, folder):
    told = problem(farspan("bench", "fabrik", "--json", cwd=folder))
    assert told["code"] == "path-missing" and "fabric" in told["remedy"]


@pytest.mark.parametrize("name", ["fabric", "fabric-memory", "slm-cost"])
def test_the_matrices_that_ship_can_be_read(name):
    matrix = load_yaml(path_of(name), Matrix)
    check_techniques(matrix)
    assert matrix.name == name and len(cells(matrix)) <= 100
    for model in matrix.models.values():
        assert count_parameters(spec_of(model)) > 10**5
