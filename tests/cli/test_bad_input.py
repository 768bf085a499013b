"""Every kind of bad input, as a user meets it: one message, its own exit code, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import zstandard

from farspan.domain.escapes import shell_word
from farspan.domain.problems import EXIT_CODES
from tests.cli.conftest import TINY, Farspan
from tests.examples import slow_after
from tests.waiting import LIMIT_S, wait_for


def expect(done: subprocess.CompletedProcess[str], code: str, *words: str) -> None:
    """One refusal of kind `code` whose message holds `words`."""
    assert done.returncode == EXIT_CODES[code], done.stdout + done.stderr
    assert done.stderr.count("error[") == 1 and f"error[{code}]: " in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    for part in ("where:", "fact:", "fix:", *words):
        assert part in done.stderr


COMMANDS = [
    (["trian"], "usage", ["farspan train --help"]),
    (["--json", "train"], "usage", ["the command comes before", "farspan --help"]),
    (["--bogus"], "usage", ["COMMAND"]),
    (["train", "--bogus"], "usage", ["--bogus", "farspan train --help"]),
    (["init"], "usage", ["SOURCE"]),
    (["init", "dcs", "--out", "b.yaml"], "path-missing", ["docs"]),
    (["init", "docs"], "run-exists", ["run.yaml", "--out"]),
    (["init", "docs", "--out", "b.yaml", "--time", "soon"], "out-of-range", ["soon", "10m"]),
    (["init", "docs", "--out", "b.yaml", "--time=-5m"], "out-of-range", ["'-5m' is negative"]),
    (
        ["init", "docs", "--out", "b.yaml", "--time", "1000y"],
        "out-of-range",
        ["fix:   --time 100y"],
    ),
    (["demo", "--time", "soon"], "out-of-range", ["where: --time"]),
    (["train", "rum.yaml"], "path-missing", ["run.yaml"]),
    (["prepare", "docs"], "path-unusable", ["Is a directory"]),
    (["prepare", "~nobody-here/run.yaml"], "path-missing", ["~NAME"]),
    (["init", "~nobody-here", "--out", "b.yaml"], "path-missing", ["~nobody-here"]),
    (
        ["probe", "--cluster", "fabric/gat-amst", "-o", "none/measured.yaml"],
        "path-missing",
        ["none"],
    ),
    (["select", "-o", "none/plan.json"], "path-missing", ["none"]),
    (["train", "--set", "steps"], "usage", ["KEY=VALUE"]),
    (
        ["train", "--set", "train.step=3"],
        "unknown-key",
        ["'train.step'", "use train.steps instead"],
    ),
    (
        ["train", "--set", "train.lr=0.1"],
        "unknown-key",
        ["use train.optimizer.lr instead of train.lr"],
    ),
    (["train", "--set", "time=5m"], "unknown-key", ["use budget.time instead of time"]),
    (
        ["train", "--set", "train.weight_decy=1"],
        "unknown-key",
        ["use train.optimizer.weight_decay instead"],
    ),
    (["train", "--set", "zzzz=1"], "unknown-key", ["remove zzzz"]),
    (
        ["prepare", "--set", "budget.time=-5m"],
        "out-of-range",
        ["where: --set budget.time=-5m", "negative"],
    ),
    (
        ["prepare", "--set", "budget={time: 1e-9s}"],
        "out-of-range",
        ["where: --set budget={", "set budget.time: 1ms"],
    ),
    (["prepare", "--set", "size=tinny"], "out-of-range", ["where: --set size=tinny"]),
    (
        ["prepare", "--set", "size=1e3", "--set", "size=-5M"],
        "out-of-range",
        ["where: --set size=1e3"],
    ),
    (
        ["prepare", "--set", "train.tokens=x", "--set", "train.steps=3"],
        "out-of-range",
        ["where: --set train.tokens=x"],
    ),
    (
        ["plan", "--launcher", "roy"],
        "launcher-unusable",
        ["where: --launcher roy", "--launcher ray"],
    ),
    (
        ["plan", "--set", "parallel.technique=zero9"],
        "out-of-range",
        ["where: --set parallel.technique=zero9"],
    ),
    (["train", "--set", "train.steps={"], "file-unreadable", ["--set train.steps={", "YAML"]),
    (["train", "--set", 'name="a\\0b"'], "file-unreadable", ["NUL", "--set"]),
    (["train", "--set", "train.steps=" + "[" * 20_000], "file-unreadable", ["recursion"]),
    (["resume", "docs"], "not-a-run", ["no plan.json"]),
    (["report", "runs/none"], "not-a-run", ["no such folder", "runs here: "]),
    (["generate", "hi", "--run", "none"], "not-a-run", []),
    (["generate", "--tokens", "0"], "usage", ["--tokens", "at least 1"]),
    (["generate", "--temperature", "nan"], "usage", ["--temperature"]),
    (["search", "  "], "usage", ["empty"]),
    (["search", "x", "-k", "0"], "usage", ["-k", "at least 1"]),
    (["search", "x", "--system", "magic"], "usage", ["bm25"]),
]


@pytest.mark.parametrize(
    ("words", "code", "parts"), COMMANDS, ids=[" ".join(row[0])[:60] for row in COMMANDS]
)
def test_command_with_bad_arguments_is_refused_with_code_and_fix(here: Farspan, words, code, parts):
    expect(here(*words), code, *parts)


def bomb(plain: str, around: str) -> str:
    """YAML whose aliases stand for 9 to the twelfth values."""
    lines = [f"a0: &a0 {plain}"]
    lines += [
        f"a{n}: &a{n} " + around.replace("...", ", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 13)
    ]
    return "\n".join(lines)


CONFIGS = [
    ("", "out-of-range", ["`data`"]),
    ("- data\n", "out-of-range", ["it is a list", "set it to a table of keys"]),
    ("data: [docs\n", "file-unreadable", ["YAML", "line 2"]),
    ("data: docs\ndata: other\n", "file-unreadable", ["'data' is set twice", "line 2"]),
    ("data: docs\ntrain: {steps: 5, steps: 6}\n", "file-unreadable", ["'steps' is set twice"]),
    (b"data: caf\xe9\n", "file-unreadable", ["UTF-8", "0xe9", "position 9"]),
    ("data: docs\n? [a]\n: b\n", "file-unreadable", ["line 2", "unhashable"]),
    ("data: docs\nname: 2026-13-01\n", "file-unreadable", ["month"]),
    ("data: ''\n", "out-of-range", ["it must have at least 1 letter"]),
    ("data: dosc\n", "path-missing", ["docs"]),
    ("data: ~nobody-here/docs\n", "path-missing", ["~nobody-here/docs", "~/nobody-here/docs"]),
    (
        "data: {source: docs, vall: 1%}\n",
        "unknown-key",
        ["run.yaml:1", "use data.val instead of data.vall"],
    ),
    (
        "data: docs\ntrain: {batch: {globl: 3}}\n",
        "unknown-key",
        ["run.yaml:2", "use train.batch.global"],
    ),
    ("data: docs\ntrain: {optimiser: {lr: 1}}\n", "unknown-key", ["use train.optimizer instead"]),
    (
        "data: docs\ntrain: {lr: 1}\n",
        "unknown-key",
        ["train.optimizer.lr: train: {optimizer: {lr: ...}}"],
    ),
    ("data: docs\ntrain.steps: 1\n", "unknown-key", ["train.steps: train: {steps: ...}"]),
    ("data: docs\nmodel: {size: tiny}\n", "unknown-key", ["move it to size: size: ..."]),
    ("data: docs\ntrain: {optimizer: moun}\n", "out-of-range", ["set train.optimizer: muon"]),
    ("data: docs\ntrain: {optimizer: {kind: sgd}}\n", "out-of-range", ["train.optimizer.kind"]),
    (
        "data: docs\ntrain: {optimizer: {average: 1}}\n",
        "out-of-range",
        ["set train.optimizer.average: 0.999"],
    ),
    ("data: docs\ntrain: {dropout: 1}\n", "out-of-range", ["below 1", "set train.dropout: 0.999"]),
    (
        "data: docs\ntrain: {dropout: -0.1}\n",
        "out-of-range",
        ["at least 0", "set train.dropout: 0"],
    ),
    ("data: docs\ntrain: {mask: 1.5}\n", "out-of-range", ["set train.mask: 0.999"]),
    ("data: docs\ntrain: {recipe: fast}\n", "out-of-range", ["train.recipe"]),
    (
        "data: docs\ntrain: {optimizer: {lr: 0}}\n",
        "out-of-range",
        ["above 0", "set train.optimizer.lr: 0.001"],
    ),
    (
        "data: docs\ntrain: {optimizer: {lr: 2}}\n",
        "out-of-range",
        ["at most 1", "set train.optimizer.lr: 1"],
    ),
    (
        "data: docs\ntrain: {optimizer: {beta1: 1}}\n",
        "out-of-range",
        ["below 1", "set train.optimizer.beta1: 0.999"],
    ),
    (
        "data: docs\ntrain: {optimizer: {beta1: -1}}\n",
        "out-of-range",
        ["set train.optimizer.beta1: 0"],
    ),
    ("data: docs\ntrain: {steps: 0}\n", "out-of-range", ["at least 1", "set train.steps: 1"]),
    (
        "data: docs\ntrain: {steps: many}\n",
        "out-of-range",
        ["it is text", "set train.steps to a whole number"],
    ),
    (
        "data: docs\ntrain: 5\n",
        "out-of-range",
        ["it is a whole number, and must be a table of keys"],
    ),
    ("data: docs\ntokenizer: {vocab: 1}\n", "out-of-range", ["set tokenizer.vocab: 257"]),
    (
        "data: docs\ntrain: {precision: fp8}\n",
        "out-of-range",
        ["'fp8' is not one of auto, fp32, tf32, bf16, fp16"],
    ),
    (
        "data: docs\nmodel: {family: lama}\n",
        "out-of-range",
        ["gpt2, gpt_neox, llama", "fix:   set model.family: llama"],
    ),
    ("data: docs\nparallel: {workers: all}\n", "out-of-range", ["a number, auto"]),
    ("data: docs\nversion: 2\n", "out-of-range", ["2 is not one of 1"]),
    ("data: docs\ntrain: {optimizer: {clip: .inf}}\n", "out-of-range", ["train.optimizer.clip"]),
    ("data: docs\ntrain: {epochs: .inf}\n", "out-of-range", ["train.epochs"]),
    ("data: docs\ntrain: {steps: 99999999999999999999}\n", "out-of-range", ["train.steps"]),
    ("data: docs\ntrain: {tokens: 1e300}\n", "out-of-range", ["train.tokens"]),
    ("data: docs\ntrain: {batch: {global: 0}}\n", "out-of-range", ["train.batch.global"]),
    ("data: docs\ntrain: {batch: {global: 4, per_device: 4}}\n", "out-of-range", ["remove"]),
    ("data: {source: docs, val: 120%}\n", "out-of-range", ["data.val", "120%"]),
    ("data: {source: docs, val: 60%}\n", "out-of-range", ["set data.val: 50%"]),
    (
        "data: docs\nbudget: {time: -5m}\n",
        "out-of-range",
        ["run.yaml, key budget.time", "'-5m' is negative"],
    ),
    (
        "data: docs\nbudget: {time: 1000y}\n",
        "out-of-range",
        ["at most 100y", "set budget.time: 100y"],
    ),
    ("data: docs\nsize: 1000000000000000\n", "out-of-range", ["at most 100T", "set size: 100T"]),
    ("data: docs\nsize: -5M\n", "out-of-range", ["'-5M' is negative"]),
    ("data: docs\nbudget: {time: 5 parsecs}\n", "out-of-range", ["parsecs", "1h"]),
    ("data: docs\nbudget: {usd: .inf, usd_per_hour: 1}\n", "out-of-range", ["budget.usd"]),
    ("data: docs\ncheckpoint: {every: never}\n", "out-of-range", ["checkpoint.every"]),
    (
        "data: docs\nmodel: {preset: gpt2, params: 124M}\n",
        "out-of-range",
        ["model.params", "model.preset"],
    ),
    ("data: docs\nmodel: {path: nowhere}\n", "path-missing", ["nowhere"]),
    ("data: docs\nsize: tinny\n", "out-of-range", ["use tiny"]),
    (
        "data: docs\nname: ../elsewhere\n",
        "out-of-range",
        ["set name to a name of 1 to 100 letters"],
    ),
    ("data: docs\ntokenizer: docs/00.txt\n", "tokenizer-unreadable", ["docs/00.txt"]),
    ("data: docs\ntokenizer: ./none.json\n", "path-missing", ["none.json"]),
    ("data: " + "[" * 20_000, "file-unreadable", ["YAML", "recursion"]),
    ("data: docs\nmodel: " + "{a: " * 20_000, "file-unreadable", ["YAML", "recursion"]),
    ("- " * 20_000 + "a", "file-unreadable", ["YAML", "recursion"]),
    ("data: &a [*a]\n", "file-unreadable", ["own anchor", "line 1"]),
    ("data: docs\nmodel: &a {<<: *a}\n", "file-unreadable", ["own anchor", "line 2"]),
    (bomb("[x]", "[...]"), "file-unreadable", ["aliases", "1,000,000"]),
    (bomb("{x: 1}", "{<<: [...]}"), "file-unreadable", ["aliases", "1,000,000"]),
    ('data: {source: "do\\0cs"}\n', "file-unreadable", ["NUL", "line 1"]),
    ('data: "hf:na\\0me"\n', "file-unreadable", ["NUL"]),
    ('data: "docs\\ud800"\n', "file-unreadable", ["surrogate"]),
    ('data: docs\ntokenizer: "a\\0.json"\n', "file-unreadable", ["NUL", "line 2"]),
    ('data: docs\nmodel: {path: "./a\\0b"}\n', "file-unreadable", ["NUL", "line 2"]),
    ('data: docs\nname: "a\\0b"\n', "file-unreadable", ["NUL", "line 2"]),
    ('data: docs\nparallel: {cluster: "a\\0b"}\n', "file-unreadable", ["NUL", "line 2"]),
]


@pytest.mark.parametrize(
    ("content", "code", "parts"), CONFIGS, ids=[str(row[0])[-40:].strip() for row in CONFIGS]
)
def test_a_bad_run_yaml_is_refused_before_any_work(
    desk: Path, tmp_path: Path, here: Farspan, content, code, parts
):
    (tmp_path / "docs").symlink_to(desk / "docs")
    (tmp_path / "run.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    expect(here("prepare", cwd=tmp_path), code, *parts)


SOURCES = [
    ({"a.bin": b"x", "b.exe": b"x"}, "no-documents", ["1 .bin", ".jsonl"]),
    ({"a.txt": b""}, "no-documents", ["no text"]),
    ({"a.txt": bytes(range(128, 256)) * 9}, "not-utf8", ["an unknown encoding (a.txt"]),
    ({"a.txt": b"PK\0\xff"}, "source-unreadable", ["1 .txt: binary data, not text (a.txt)"]),
    ({"a.jsonl": b'{"text": \n'}, "source-unreadable", ["a.jsonl:1: Expecting value"]),
    ({"a.jsonl": b'{"txt": "a"}\n'}, "source-unreadable", ["its columns are txt"]),
    ({"a.txt": b"a"}, "no-documents", ["validation"]),
]


@pytest.mark.parametrize(
    ("files", "code", "parts"), SOURCES, ids=[f"{list(row[0])}-{row[1]}" for row in SOURCES]
)
def test_text_that_cannot_be_read_is_named(tmp_path: Path, farspan: Farspan, files, code, parts):
    (tmp_path / "text").mkdir()
    for name, content in files.items():
        (tmp_path / "text" / name).write_bytes(content)
    (tmp_path / "run.yaml").write_text("data: text\n")
    expect(farspan("prepare", cwd=tmp_path), code, *parts)


def test_prepare_counts_skipped_files_by_extension_and_lists_each(
    tmp_path: Path, desk: Path, farspan: Farspan
):
    (tmp_path / "text").symlink_to(shutil.copytree(desk / "docs", tmp_path / "docs"))
    for name in ("a.bin", "b.BIN", "c.exe", "Makefile"):
        (tmp_path / "docs" / name).write_bytes(b"\0")
    (tmp_path / "docs" / "junk.txt").write_bytes(b"\0\xff")
    (tmp_path / "run.yaml").write_text("data: text\ntokenizer: {vocab: 300}\n")
    done = farspan("prepare", cwd=tmp_path)
    assert (
        "skipped 2 .bin, 1 without an extension, 1 .exe: not a kind of file that can be read "
        "(Makefile, a.bin, b.BIN)\n" in done.stdout
    )
    assert "skipped 1 .txt: binary data, not text (junk.txt)\n" in done.stdout
    skipped = json.loads(farspan("prepare", "--json", cwd=tmp_path).stdout)["manifest"]["skipped"]
    junk = {"path": "text/junk.txt", "reason": "binary data, not text", "bad": True}
    assert len(skipped) == 5 and junk in skipped


def test_prepare_says_which_files_and_rows_are_bad_and_reads_the_rest(
    tmp_path: Path, desk: Path, farspan: Farspan
):
    docs = shutil.copytree(desk / "docs", tmp_path / "docs")
    (docs / "cafe.txt").write_bytes("the café is open, “déjà vu”".encode("cp1252"))
    (docs / "rows.jsonl").write_text('{"text": "one"}\n{"text": \n{"text": "three"}\n')
    packed = zstandard.compress(b'{"text": "packed"}\n' * 50)
    (docs / "cut.jsonl.zst").write_bytes(packed[:-4])
    (tmp_path / "run.yaml").write_text("data: docs\ntokenizer: {vocab: 300}\n")
    done = farspan("prepare", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # A second time nothing is read, and the same is said.
    for said in (done.stdout, farspan("prepare", cwd=tmp_path).stdout):
        assert "skipped 1 .zst: cut off: ends before its end (cut.jsonl.zst)\n" in said
        assert (
            "skipped 1 .jsonl (rows): not a JSON object (rows.jsonl:2: Expecting value)\n" in said
        )
        assert "1 .txt: read as cp1252 (cafe.txt)\n" in said
    refused = farspan("prepare", "--set", "data.bad=refuse", cwd=tmp_path)
    expect(refused, "source-unreadable", "cut.jsonl.zst", "rows.jsonl:2", "data.bad=skip")
    wrong = farspan("prepare", "--set", "data.bad=stop", cwd=tmp_path)
    expect(wrong, "out-of-range", "data.bad", "skip, refuse")


PLANS = [
    (["model.context=100000"], "out-of-range", ["model.context", "tokens to train on"]),
    (["model.d_model=33", "model.heads=4"], "out-of-range", ["33", "4"]),
    (["model.layers=1000000000"], "out-of-memory", ["needs", "farspan fit"]),
]


@pytest.mark.parametrize(
    ("settings", "code", "parts"), PLANS, ids=[" ".join(row[0]) for row in PLANS]
)
def test_a_model_that_cannot_be_is_refused_before_it_is_tried(
    run: Path, farspan: Farspan, settings, code, parts
):
    done = farspan("plan", *(word for setting in settings for word in ("--set", setting)))
    expect(done, code, *parts)
    assert "trying" not in done.stdout


def test_corpus_too_small_is_refused_with_available_and_needed_tokens(
    tmp_path: Path, farspan: Farspan
):
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} is short")
    (tmp_path / "run.yaml").write_text(
        "data: {source: text, val: 40%}\nmodel: {layers: 1, d_model: 16, context: 32}\n"
    )
    expect(farspan("plan", cwd=tmp_path), "corpus-too-small", "there are", "33", "add text")


def test_another_run_file_is_named_and_all_runs_are_listed(
    desk: Path, tmp_path: Path, here: Farspan
):
    (tmp_path / "docs").symlink_to(desk / "docs")
    (tmp_path / "my.yaml").write_text("data: docs\nbudget: {time: soon}\n")
    expect(
        here("prepare", "my.yaml", cwd=tmp_path), "out-of-range", "where: my.yaml, key budget.time"
    )
    for number in range(12):
        (tmp_path / "runs" / f"r{number:02}").mkdir(parents=True)
        (tmp_path / "runs" / f"r{number:02}" / "plan.json").write_text("{}")
        os.utime(tmp_path / "runs" / f"r{number:02}" / "plan.json", (number, number))
    for words in (["report", "r05"], ["compare", "r05", "runs/r01"]):
        expect(
            here(*words, cwd=tmp_path),
            "not-a-run",
            "runs here: runs/r11, runs/r10,",
            "and 2 more",
            "use runs/r05",
        )


@pytest.mark.parametrize(
    "words", [["train", "none.yaml"], ["serach"], ["report", "none"], ["init", "--bogus"]]
)
def test_with_json_a_refusal_is_one_object(here: Farspan, words):
    done = here(*words, "--json")
    problem = json.loads(done.stdout)["problem"]
    assert set(problem) == {"code", "what", "where", "fact", "remedy"} and all(problem.values())
    assert done.returncode == EXIT_CODES[problem["code"]]


def test_a_refusal_of_a_file_whose_name_is_not_utf8_is_one_object(tmp_path: Path, farspan: Farspan):
    (tmp_path / "text").mkdir()
    try:
        (tmp_path / "text" / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"noir \0\xe9")
    except OSError:
        pytest.skip("waits for a file system that takes any bytes as a name")
    (tmp_path / "run.yaml").write_text("data: text\n")
    done = farspan("prepare", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["problem"]["code"] == "source-unreadable"
    assert "Traceback" not in done.stderr


def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "my run"))


def killed(run: Path) -> Path:
    """The run as if it had been killed before it could say how it ended."""
    *before, end = (run / "events.jsonl").read_text().splitlines(keepends=True)
    assert '"event":"finished"' in end
    (run / "events.jsonl").write_text("".join(before))
    return run


def test_a_run_and_an_export_are_never_written_over(run: Path, farspan: Farspan, tmp_path: Path):
    expect(farspan("train"), "run-exists", "farspan resume")
    (tmp_path / "x").write_text("mine")
    expect(
        farspan("train", "--run", "my docs"),
        "run-exists",
        "--run 'my docs-2'",
        "farspan resume 'my docs'",
    )
    expect(farspan("export", str(run), "--out", str(tmp_path)), "run-exists")
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_search_before_embed_names_the_command(run: Path, farspan: Farspan, tmp_path: Path):
    hurt = copied(run, tmp_path)
    expect(farspan("search", "time", "--run", str(hurt)), "no-index", f"farspan embed '{hurt}'")


def test_truncated_weights_are_named(run: Path, farspan: Farspan, tmp_path: Path):
    hurt = copied(run, tmp_path)
    for weights in hurt.rglob("part-00000.safetensors"):
        os.truncate(weights, 100)
    expect(
        farspan("generate", "a", "--run", str(hurt)), "checkpoint-corrupt", "best", "step-00000004"
    )
    expect(
        farspan("resume", str(killed(hurt))),
        "checkpoint-corrupt",
        "part-00000.safetensors",
        "--run",
    )


def test_damaged_best_weights_are_refused_by_all_that_read_them(
    run: Path, farspan: Farspan, tmp_path: Path
):
    hurt = copied(run, tmp_path)
    state = hurt / "checkpoints" / "best" / "manifest.json"
    state.write_bytes(state.read_bytes().replace(b'"p', b'"\xff'))
    for words in (("generate", "a", "--run"), ("embed",), ("export",)):
        expect(farspan(*words, str(hurt)), "checkpoint-corrupt", "best", "rm -r", "of step 4")


def test_a_truncated_plan_is_named(run: Path, farspan: Farspan, tmp_path: Path):
    hurt = copied(run, tmp_path)
    os.truncate(hurt / "plan.json", 50)
    for command in ("resume", "report"):
        expect(farspan(command, str(hurt)), "file-unreadable", "plan.json", "JSON")


@pytest.mark.parametrize(
    ("command", "name"),
    [("embed", "plan.json"), ("embed", "corpus.json"), ("report", "corpus.json")],
)
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"inputs":' * 100_000, b'{"corpus": "a\\u0000b"}']
)
def test_json_that_cannot_be_held_or_names_no_file_is_refused(
    run: Path, here: Farspan, tmp_path: Path, command, name, content
):
    hurt = copied(run, tmp_path)
    (hurt / name).write_bytes(content)
    done = here(command, str(hurt))
    assert done.returncode in (
        EXIT_CODES["file-unreadable"],
        EXIT_CODES["out-of-range"],
        EXIT_CODES["unknown-key"],
    )
    assert (
        done.stderr.count("error[") == 1 and name in done.stderr and "Traceback" not in done.stderr
    )


def test_a_cluster_file_with_a_nul_or_too_many_brackets_is_refused(here: Farspan, tmp_path: Path):
    for number, content in enumerate(
        ['sites: {a: {hosts: {"h\\0": {devices: [a10]}}}}', "[" * 20_000]
    ):
        file = tmp_path / f"{number}.yaml"
        file.write_text(content)
        expect(here("cluster", "show", str(file)), "file-unreadable", "YAML", file.name)


def test_without_torch_training_is_refused_and_the_rest_works(
    run: Path, farspan: Farspan, tmp_path: Path
):
    hidden = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "sys.modules['torch'] = None\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hidden)
    stopped = killed(copied(run, tmp_path))
    for words in (
        ["train", "--run", "runs/new"],
        ["resume", str(stopped)],
        ["embed"],
        ["generate", "a"],
        ["demo"],
    ):
        expect(
            farspan(*words, PYTHONPATH=str(tmp_path)),
            "extra-missing",
            "torch",
            IN_A_CLONE,
        )
    for words in (
        ["--help"],
        ["prepare"],
        ["report"],
        ["init", "docs", "--out", str(tmp_path / "new.yaml")],
    ):
        assert farspan(*words, PYTHONPATH=str(tmp_path)).returncode == 0


def test_any_other_library_of_an_extra_is_named(run: Path, farspan: Farspan, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['safetensors'] = None\n")
    expect(
        farspan("export", PYTHONPATH=str(tmp_path)),
        "extra-missing",
        "safetensors",
        IN_A_CLONE.replace("[train]", "[search]"),
    )


#: How an extra is added to a clone, from elsewhere.
IN_A_CLONE = f"-e {shell_word(f'{Path(__file__).parents[2]}[train]')}"

INTERRUPT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "{name}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""
SCRIPT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "scripts"
]["farspan"]
STARTS = {
    "module": ["-m", "farspan"],
    "script": ["-c", "import sys; from {} import {} as f; sys.exit(f())"],
}


@pytest.mark.parametrize("name", ["farspan.cli.main", "argparse", "farspan.cli.commands.prepare"])
@pytest.mark.parametrize("start", STARTS)
def test_ctrl_c_while_starting_is_no_traceback(
    desk: Path, environment: dict[str, str], tmp_path: Path, start, name
):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT.format(name=name))
    words = [word.format(*SCRIPT.split(":")) for word in STARTS[start]]
    done = subprocess.run(
        [sys.executable, *words, "prepare"],
        cwd=desk,
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode in (-signal.SIGINT, EXIT_CODES["interrupted"])
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.fixture
def training(desk: Path, run: Path, environment: dict[str, str], tmp_path: Path):
    """A run that would go on for hours, in training: its process and its folder."""
    path = tmp_path / "long"
    (tmp_path / "docs").symlink_to(desk / "docs")
    (tmp_path / "run.yaml").write_text(
        TINY.replace("steps: 4", "steps: 1000000").replace("every: 2}", "every: 100000}")
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "farspan", "train", "--run", str(path)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: '"event":"step"' in (path / "events.jsonl").read_text(), process)
        yield process, path
    finally:
        process.kill()
        process.communicate()


def until(happened, process: subprocess.Popen[str] | None = None) -> None:
    """Wait for something that may first need files that are not there yet."""

    def there() -> bool:
        try:
            return bool(happened())
        except OSError:
            return False

    wait_for(there, "what the test waits for", process)


def saved(path: Path) -> list[str]:
    return sorted(folder.name for folder in (path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGTERM, signal.SIGINT]))
def test_signal_saves_a_checkpoint_and_prints_the_resume_command(
    training, farspan: Farspan, number: signal.Signals
):
    process, path = training
    expect(farspan("resume", str(path)), "run-busy", str(path))
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    expect(
        subprocess.CompletedProcess([], process.returncode, out, err),
        "interrupted",
        f"farspan resume {path}",
    )
    assert len(saved(path)) == 1


def test_workers_whose_launcher_was_killed_save_and_end(training):
    process, path = training
    process.kill()
    until(lambda: '"reason":"interrupted"' in (path / "events.jsonl").read_text())
    assert len(saved(path)) == 1


NEEDS_FULL = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="waits for a system with /dev/full"
)


@NEEDS_FULL
@pytest.mark.parametrize(
    ("words", "code"), [(("cluster", "list"), "disk-full"), (("plan", "gone.yaml"), "path-missing")]
)
def test_full_disk_for_output_leaves_the_exit_code(words, code, tmp_path):
    """As of a job whose log lies there: not even the message can be written."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "farspan", *words],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
            timeout=LIMIT_S,
        )
    assert done.returncode == EXIT_CODES[code]


@NEEDS_FULL
def test_answer_of_json_comes_where_no_message_can_be_written(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "farspan", "plan", "gone.yaml", "--json"],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=LIMIT_S,
        )
    assert json.loads(done.stdout)["problem"]["code"] == "path-missing"
