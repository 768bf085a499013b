"""The fix that a refusal names: it leads where the user meant to go, or nowhere else."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from farspan.app.clusters import _given_links, given_cluster
from farspan.cli import main as cli
from farspan.domain.config import ParallelConfig, RunConfig, SlurmConfig, SlurmSite
from farspan.domain.problems import EXIT_CODES, Finding, Refusal, exit_code_of
from farspan.domain.run import RunFolder
from farspan.launch.run_lock import Lease
from tests.cli.conftest import Farspan

ROOT = Path(__file__).parents[2]
PRICED = ("plan", "--model", "gpt2", "--cluster", "fabric/gat-amst")
STORES = " or ".join(
    ("--store chroma, --store faiss, --store pgvector, --store qdrant", "--store qdrant_server")
)
SITES = "sites: {a: {hosts: {x: {devices: [DEVICE]}}}, b: {hosts: {y: {devices: [t4]}}}}\n"


def fix_of(done) -> str:
    """The last line of a refusal."""
    assert done.returncode in EXIT_CODES.values(), done.stderr
    return done.stderr.rpartition("  fix:   ")[2].strip()


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        # Techniques, precisions, models and clusters by flags.
        ([*PRICED, "--technique", "ddp"], "--technique data"),
        ([*PRICED, "--technique", "zero3"], "--technique fsdp"),
        (
            [*PRICED, "--technique", "zero"],
            "--technique zero1, --technique zero2 or --technique fsdp",
        ),
        ([*PRICED, "--technique", "pp"], "--technique pipeshard"),
        ([*PRICED, "--precision", "fp8"], "--precision auto"),
        ([*PRICED, "--precision", "bfloat16"], "--precision bf16"),
        (["plan", "--model", "gpt2-small", "--cluster", "here"], "--model gpt2"),
        (["plan", "--model", "gpt2", "--cluster", "gat-amst"], "--cluster fabric/gat-amst"),
        (["plan", "--model", "gpt2", "--cluster", "localhost"], "--cluster here"),
        (["rent", "--model", "gpt2", "--device", "NVIDIA A100-SXM4-80GB"], "--device a100-80"),
        ([*PRICED, "--export", "ds"], "--export deepspeed"),
        ([*PRICED, "--diff", "ddp", "1"], "use data"),
        # The same in run.yaml.
        (["train", "--set", "parallel.technique=ddp"], "use data"),
        (["train", "--set", "train.precision=float16"], "set train.precision: fp16"),
        (
            ["train", "--set", "train.precision=fp8"],
            "set train.precision to one of auto, fp32, tf32, bf16, fp16",
        ),
        (["train", "--set", "train.optimizer=adam"], "set train.optimizer: adamw"),
        (["train", "--set", "learning_rate=1"], "use train.optimizer.lr instead of learning_rate"),
        (
            ["train", "--set", "batch_size=8"],
            "use train.batch.global or train.batch.per_device instead of batch_size",
        ),
        (
            ["plan", "--launcher", "mpirun"],
            "--launcher local, --launcher ray, --launcher slurm or --launcher torchrun",
        ),
        (["train", "--set", "index.store=postgres"], "set index.store: pgvector"),
        (["train", "--set", "data.bad=ignore"], "set data.bad: skip"),
        (["train", "--set", "size=big"], "use large"),
        (["train", "--set", "model.preset=gpt2-small"], "use gpt2"),
        (["embed", "my docs", "--store", "postgres"], "--store pgvector"),
        (["tune", "my docs", "--store", "milvus"], STORES),
        # Commands, their parts, options and choices.
        (["run", "run.yaml"], "farspan train --help"),
        (["kill"], "farspan stop --help"),
        (["stat"], "farspan status --help"),
        (["frobnicate"], "farspan --help"),
        (["cluster", "ls"], "farspan cluster status or farspan cluster list"),
        (["cluster", "shwo"], "farspan cluster show"),
        (["train", "--learning-rate", "1"], "use --set train.optimizer.lr=VALUE"),
        (["train", "--epochs=3"], "use --set train.epochs=3"),
        (["plan", "--tecnique", "data"], "use --technique"),
        (["train", "--bogus"], "farspan train --help"),
        (["doctor", "--device", "gpu"], "--device cuda"),
        (["doctor", "--device", "tpu"], "farspan doctor --help"),
        (["search", "x", "--system", "hybrid"], "--system fused"),
        # Folders and sources in the place of files.
        (["train", "docs"], "farspan init docs --out docs.yaml"),
        (["plan", "pydocs"], "farspan init pydocs --out pydocs.yaml"),
        (["train", "my docs"], "farspan resume 'my docs'"),
        (["init", "pydoc", "--out", "new.yaml"], "use pydocs"),
        # Times without a unit.
        (["init", "docs", "--out", "new.yaml", "--time", "5"], "--time 5m or --time 5s"),
        (["init", "docs", "--out", "new.yaml", "--time", "0.5"], "--time 0.5m or --time 0.5s"),
        (["demo", "--run", "runs/new", "--time", "3"], "--time 3m or --time 3s"),
        (["stop", "my docs", "--timeout", "5"], "--timeout 5m or --timeout 5s"),
        (["select", "--budget", "2"], "--budget 2m or --budget 2s"),
        (["prepare", "--set", "budget.time=5"], "set budget.time: 5m or 5s"),
        (["plan", "--set", "checkpoint.every='5'"], "set checkpoint.every: 5m or 5s"),
        # A run in the place of a text.
        (["search", "my docs"], "farspan search TEXT 'my docs'"),
        (["search", "my docs", "two words"], "farspan search 'two words' 'my docs'"),
        (["generate", "my docs", "hi"], "farspan generate hi 'my docs'"),
        (["search", "x", "my docs", "--run", "other"], "leave --run out"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else "",
)
def test_fix_leads_to_what_was_meant(here: Farspan, words: list[str], fix: str) -> None:
    assert fix_of(here(*words)) == fix


@pytest.mark.parametrize(
    ("device", "fix"),
    [
        ("a100", "write a100-40, a100-40-pcie, a100-80 or a100-80-pcie"),
        ("'3090'", "write rtx3090"),
        ("v100", "write v100-16, v100-16-pcie, v100-32 or v100-32-pcie"),
        ("NVIDIA A100-SXM4-80GB", "write a100-80"),
        ("NVIDIA GeForce RTX 3090", "write rtx3090"),
        ("Tesla T4", "write t4"),
        ("NVIDIA H100 PCIe", "write h100-pcie"),
        (
            "A100 MIG 3g.20gb",
            "write {kind: a100-40, memory: 20GB, share: 43%} or "
            "{kind: a100-40-pcie, memory: 20GB, share: 43%}",
        ),
        ("cpu-xeon", "write cpu-amx, cpu-avx2 or cpu-avx512"),
        ("frobnicator", "farspan cluster list"),
    ],
)
def test_device_of_a_cluster_file_brings_its_kind(
    here: Farspan, tmp_path: Path, device: str, fix: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(SITES.replace("DEVICE", device))
    assert fix_of(here("plan", "--model", "gpt2", "--cluster", str(file))) == fix


@pytest.mark.parametrize(
    ("kinds", "own"),
    [("", ""), ("kinds: {mine: {memory: 1GB, bandwidth: 1GB/s, flops: {bf16: 1e12}}}", "mine")],
)
def test_unknown_device_is_not_followed_by_all_kinds(
    here: Farspan, tmp_path: Path, kinds: str, own: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(SITES.replace("DEVICE", "cpu") + kinds)
    done = here("plan", "--model", "gpt2", "--cluster", str(file), "--json")
    problem = json.loads(done.stdout)["problem"]
    assert "a100-40" not in problem["fact"] and len(problem["fact"]) < 80
    assert problem["fact"].endswith(f"; the file's own: {own}" if own else "has that name")


@pytest.mark.parametrize(
    ("link", "fix"),
    [
        ("between: [a, b], latency: 5ms", "use links[0].rtt instead of links[0].latency"),
        ("between: [a, b], rtt: 57", "set links[0].rtt: 57ms or 57s"),
        ("between: [a, b], rtt: 5ms, memory: 1", "move it to "),
    ],
)
def test_link_of_a_cluster_file_brings_a_plain_fix(
    here: Farspan, tmp_path: Path, link: str, fix: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(SITES.replace("DEVICE", "t4") + f"links: [{{{link}}}]\n")
    found = fix_of(here("plan", "--model", "gpt2", "--cluster", str(file)))
    assert found.startswith(fix) and "{" not in found and "[:" not in found


@pytest.mark.parametrize(
    ("host", "link", "units"),
    [
        ("devices: [t4]", "rtt: 20", "ms"),
        ("devices: [t4]", "rtt: 20ms, jitter: 20", "ms"),
        ("devices: [{kind: t4, turn: 20}]", "rtt: 20ms", "ms"),
        ("devices: [t4], lease: 20", "rtt: 20ms", "h"),
    ],
)
def test_time_of_a_cluster_file_has_the_same_units_in_fact_and_fix(
    here: Farspan, tmp_path: Path, host: str, link: str, units: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"sites: {{a: {{hosts: {{x: {{{host}}}}}}}, b: {{hosts: {{y: {{devices: [t4]}}}}}}}}\n"
        f"links: [{{between: [a, b], {link}}}]\n"
    )
    done = here("plan", "--model", "gpt2", "--cluster", str(file))
    assert f"20 has no unit; write it like 20{units} or 20s\n" in done.stderr
    assert fix_of(done).endswith(f": 20{units} or 20s")


def test_round_trip_of_a_slurm_site_is_proposed_in_milliseconds() -> None:
    config = SlurmConfig(sites={"b": SlurmSite(login="b", rtt=20)})
    with pytest.raises(Refusal) as refused:
        _given_links(config)
    problem = refused.value.problem
    assert problem.fact == "20 has no unit; write it like 20ms or 20s"
    assert problem.remedy == "set slurm.sites.b.rtt to something like 20ms"
    (link,) = _given_links(SlurmConfig(sites={"b": SlurmSite(login="b", rtt="20ms")}))
    assert link.rtt_s == 0.02


def test_missing_source_brings_no_unrelated_folder(here: Farspan, tmp_path: Path) -> None:
    for name in ("docs", "pods", "doc-tools", "python"):
        (tmp_path / name).mkdir()
    assert fix_of(here("init", "pydoc", cwd=tmp_path)) == "use pydocs"
    assert fix_of(here("init", "recipes", cwd=tmp_path)) == f"see what is there: ls {tmp_path}"


def test_run_that_is_not_there_brings_no_other_run(here: Farspan, tmp_path: Path) -> None:
    for name in ("a", "papers"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.json").write_text("{}")
    assert fix_of(here("report", "runs/b", cwd=tmp_path)) == "see them: farspan status"
    assert fix_of(here("report", "runs/papres", cwd=tmp_path)) == "use runs/papers"


NEED_A_RUN = (["status"], ["report"], ["embed"], ["resume"], ["generate", "x"], ["report", "none"])
NEED_AN_INDEX = (["search", "x"], ["serve"], ["ask", "x", "--llm", "http://127.0.0.1:9"])


@pytest.mark.parametrize("words", [*NEED_A_RUN, *NEED_AN_INDEX], ids=" ".join)
def test_folder_without_runs_brings_a_command_that_works_there(
    here: Farspan, tmp_path: Path, words: list[str]
) -> None:
    fix = fix_of(here(*words, cwd=tmp_path)).removeprefix("start one: ")
    assert fix == ("farspan index FOLDER" if words in NEED_AN_INDEX else "farspan init FOLDER")
    (tmp_path / "run.yaml").write_text("data: docs\n")
    fix = fix_of(here(*words, cwd=tmp_path)).removeprefix("start one: ")
    assert fix == "farspan train run.yaml"


GIVEN = (
    *("run.yaml", "--cluster", "my cluster.yaml", "--launcher", "torchrun"),
    *("--set", "train.steps=7", "--run", "runs/a b"),
)


def test_second_train_brings_the_same_command_for_a_folder_that_is_free(
    here: Farspan, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("data: docs\n")
    run = RunFolder(tmp_path / "runs" / "a b")
    run.make()
    run.plan.write_text("{}")
    (tmp_path / "runs" / "a b-2").mkdir()
    words = shlex.split(fix_of(here("train", *GIVEN, "--detach", cwd=tmp_path)), comments=True)
    assert words == ["farspan", "train", *GIVEN[:-1], "runs/a b-3", "--detach"]
    fix = fix_of(here("train", *GIVEN, cwd=tmp_path))
    assert fix.endswith("   # to go on with this one: farspan resume 'runs/a b'")
    # A run that is being trained cannot be resumed.
    with Lease(run):
        fix = fix_of(here("train", *GIVEN, cwd=tmp_path))
    assert fix.endswith("   # this one is being trained: farspan status 'runs/a b'")
    # What is no run cannot be either.
    run.plan.rename(run.path / "another.json")
    fix = fix_of(here("train", *GIVEN, cwd=tmp_path))
    assert shlex.split(fix) == ["farspan", "train", *GIVEN[:-1], "runs/a b-3"]


def test_sites_given_up_in_a_new_run_bring_the_same_command_that_may_resume(
    here: Farspan, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("data: docs\n")
    without = ("--without", "a", "--without", "b c")
    fix = fix_of(here("train", *GIVEN, *without, cwd=tmp_path))
    assert shlex.split(fix) == ["farspan", "train", *GIVEN, "--until-done", *without]


@pytest.mark.parametrize("name", ["cluster.yaml", "none/cluster.yml", "cluster"])
def test_cluster_that_is_not_there_brings_those_that_are(
    here: Farspan, tmp_path: Path, name: str
) -> None:
    (tmp_path / "run.yaml").write_text("data: docs\n")
    for words in (("doctor",), ("plan", "--model", "gpt2"), ("train",)):
        fix = fix_of(here(*words, "--cluster", name, cwd=tmp_path))
        command, _, where = fix.partition("   # how to write a file: ")
        assert command == "farspan cluster list"
        if where:
            path, heading = where.split(", ")
            assert f"\n## {heading}\n" in (ROOT / path).read_text()
    (tmp_path / "clusters.yaml").write_text(SITES)
    fix = fix_of(here("doctor", "--cluster", "cluster.yaml", cwd=tmp_path))
    assert fix == f"use {tmp_path}/clusters.yaml, the nearest that exists"


def test_folder_in_place_of_a_cluster_brings_the_files_in_it(here: Farspan, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "c.yaml").write_text(SITES)
    done = here("plan", "--model", "gpt2", "--cluster", "mine", cwd=tmp_path)
    assert fix_of(done) == "--cluster mine/c.yaml"


# -- one way to name a run


def test_every_command_that_takes_a_run_takes_it_as_a_word_alone() -> None:
    """`train`, `slurm` and `demo` make a folder; what an option of theirs names is no run yet."""
    takers = []
    for name in cli.command_names():
        parser = cli.build_command_parser(name)
        runs = [
            action for action in parser._actions if action.dest in ("run", "runs", "run_option")
        ]
        shown = [action for action in runs if action.help != cli.argparse.SUPPRESS]
        if not shown or name in ("train", "demo", "slurm"):
            continue
        takers.append(name)
        assert not [action for action in shown if action.option_strings], name
        assert [action.metavar for action in shown] == ["RUN"], name
    assert {"generate", "search", "resume", "status", "embed", "serve"} <= set(takers)


def test_run_is_named_by_a_word_or_as_before(here: Farspan, tmp_path: Path) -> None:
    for words in (
        ("search", "time", "none"),
        ("search", "time", "--run", "none"),
        ("search", "--eval", "none"),
        ("generate", "time", "none"),
        ("generate", "time", "--run", "none"),
        ("embed", "none"),
        ("embed", "--run", "none"),
    ):
        done = here(*words, "--json", cwd=tmp_path)
        problem = json.loads(done.stdout)["problem"]
        assert (problem["code"], problem["where"]) == ("not-a-run", "none"), words


@pytest.mark.parametrize("text", ["time " * 500, "a\0b", "~nobody-here/x", "/"])
def test_text_that_can_be_no_path_is_a_text(here: Farspan, tmp_path: Path, text: str) -> None:
    for name in ("search", "generate"):
        done = here(name, text, "none", "--json", cwd=tmp_path)
        assert json.loads(done.stdout)["problem"]["code"] == "not-a-run", done.stdout


# -- this machine by name


def test_here_is_this_machine_wherever_a_cluster_is_named() -> None:
    config = RunConfig(data="docs", parallel=ParallelConfig(cluster="here"))
    assert given_cluster(config, reach=True) is None


@pytest.mark.slow
def test_plan_takes_here_as_resume_does(farspan: Farspan) -> None:
    words = ("plan", "--model", "gpt2", "--technique", "data", "--json", "--cluster")
    found = json.loads(farspan(*words, "here").stdout)
    assert found["candidates"][found["chosen"]]["devices"]
    too_many = farspan(*words, "here:4096")
    assert too_many.returncode == EXIT_CODES["device-missing"]
    done = farspan("plan", "run.yaml", "--cluster", "here", "--json")
    assert done.returncode == 0, done.stderr


# -- doctor's exit code


def finding(severity: str, code: str) -> Finding:
    return Finding(severity=severity, code=code, what="", where="", fact="", remedy="")


def test_exit_code_is_that_of_the_first_finding_that_stops_a_run() -> None:
    assert exit_code_of(()) == 0
    assert exit_code_of([finding("warned", "disk-full")]) == 0
    found = [finding("warned", "disk-full"), finding("refused", "extra-missing")]
    assert exit_code_of([*found, finding("refused", "device-missing")]) == 23


def test_doctor_ends_with_the_code_with_which_train_would_refuse(
    farspan: Farspan, tmp_path: Path
) -> None:
    """Without PyTorch."""
    hidden = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "sys.modules['torch'] = None\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hidden)
    path = f"{tmp_path}:{Path(cli.__file__).parents[2]}"
    trained = farspan("train", "--run", "runs/new", PYTHONPATH=path)
    done = farspan("doctor", "--json", PYTHONPATH=path)
    assert done.returncode == trained.returncode == EXIT_CODES["extra-missing"]
    found = json.loads(done.stdout)["findings"]
    assert found[0]["code"] == "extra-missing" and found[0]["severity"] == "refused"
