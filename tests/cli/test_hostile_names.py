"""Fixes of refusals that are pasted into a real shell run nothing of the names that they hold."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import TINY, Farspan

TOUCH = "touch INJECTED"
NAMES = (
    f"x'$({TOUCH})'",
    f'x"$({TOUCH})"',
    f"it's `{TOUCH}`",
    f"a;{TOUCH};",
    f"a&{TOUCH}|{TOUCH}",
    f"a\n{TOUCH}\n'\n{TOUCH}\n",
    f"C:\\docs\\'$({TOUCH})",
    f"-x '$({TOUCH})",
    f"\x1b[31m'$({TOUCH})'\x9b\u202e",
    f"caf\udce9'$({TOUCH})'",
    f"!$({TOUCH}) # {TOUCH}",
    "a > INJECTED < INJECTED 'b > INJECTED",
)
SHELLS = [shell for shell in ("bash", "dash", "zsh") if shutil.which(shell)]
#: What fixes call. Each stub writes down its words; what else a fix calls is not found.
PROGRAMS = (
    "cp",
    "farspan",
    "gzip",
    "iconv",
    "ls",
    "mv",
    "rm",
    "sed",
    "split",
    "ssh",
    "tail",
    "zstd",
)
Case = Callable[[Path, str], tuple[str, ...]]


def config(folder: Path, **keys: object) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump({**yaml.safe_load(TINY), **keys}))


def document(folder: Path, name: str, content: bytes) -> tuple[str, ...]:
    """The command that prepares a folder with a document of this name."""
    (folder / "docs").mkdir()
    (folder / "docs" / name).write_bytes(content)
    config(folder)
    return ("prepare",)


def run_folder(folder: Path, name: str) -> str:
    """A folder that looks like a run."""
    (folder / "runs" / name).mkdir(parents=True)
    (folder / "runs" / name / "plan.json").write_text("{}")
    return f"runs/{name}"


def line_that_is_no_json(folder: Path, name: str) -> tuple[str, ...]:
    return document(folder, f"{name}.jsonl", b'{"text": "a"}\n{\n')


def packed_line_that_is_no_json(folder: Path, name: str) -> tuple[str, ...]:
    return document(folder, f"{name}.jsonl.gz", gzip.compress(b"{\n"))


def text_that_is_not_utf8(folder: Path, name: str) -> tuple[str, ...]:
    return document(folder, f"{name}.txt", bytes(range(128, 256)) * 9)


def file_that_is_not_what_it_says(folder: Path, name: str) -> tuple[str, ...]:
    return document(folder, f"{name}.parquet", b"no Parquet file")


def column_that_is_unknown(folder: Path, name: str) -> tuple[str, ...]:
    return document(folder, "a.jsonl", json.dumps({"id": ascii(name)}).encode())


def folder_without_documents(folder: Path, name: str) -> tuple[str, ...]:
    (folder / name).mkdir()
    (folder / name / "docs").mkdir()
    return ("init", f"{name}/docs", "--out", "run.yaml")


def folder_that_is_missing(folder: Path, name: str) -> tuple[str, ...]:
    (folder / name).mkdir()
    return ("init", "--out", "run.yaml", "--", f"{name}x")


def file_that_exists(folder: Path, name: str) -> tuple[str, ...]:
    document(folder, "a.txt", b"a")
    (folder / f"{name}.yaml").write_text("")
    return ("init", "docs", f"--out={name}.yaml")


def run_that_exists(folder: Path, name: str) -> tuple[str, ...]:
    document(folder, "a.txt", b"a")
    return ("train", f"--run={run_folder(folder, name)}")


def run_that_is_missing(folder: Path, name: str) -> tuple[str, ...]:
    return ("status", "--", f"{run_folder(folder, name)}x")


def run_without_an_index(folder: Path, name: str) -> tuple[str, ...]:
    return ("search", "word", f"--run={run_folder(folder, name)}")


def worker_without_a_log(folder: Path, name: str) -> tuple[str, ...]:
    return ("logs", "--rank", "3", "--", run_folder(folder, name))


def key_that_is_unknown(folder: Path, name: str) -> tuple[str, ...]:
    document(folder, "a.txt", b"a")
    config(folder, **{"model": {name.encode(errors="replace").decode(): 1}})
    return ("prepare",)


def host_that_is_named_twice(folder: Path, name: str) -> tuple[str, ...]:
    host = {f"a{name.encode(errors='replace').decode()}": {"devices": ["a30"]}}
    sites = {"a": {"hosts": host}, "b": {"hosts": host}}
    (folder / "c.yaml").write_text(yaml.safe_dump({"sites": sites}))
    return ("plan", "--model", "gpt2", "--cluster", "c.yaml")


def device_kind_that_is_unknown(folder: Path, name: str) -> tuple[str, ...]:
    kinds = {"x": {"hosts": {"h": {"devices": [name.encode(errors="replace").decode()]}}}}
    (folder / "c.yaml").write_text(yaml.safe_dump({"sites": kinds}))
    return ("plan", "--model", "gpt2", "--cluster", "c.yaml")


def tokenizer_that_is_missing(folder: Path, name: str) -> tuple[str, ...]:
    document(folder, "a.txt", b"a")
    config(folder, tokenizer={"use": name.encode(errors="replace").decode()})
    return ("prepare",)


CASES: tuple[Case, ...] = (
    line_that_is_no_json,
    packed_line_that_is_no_json,
    text_that_is_not_utf8,
    file_that_is_not_what_it_says,
    column_that_is_unknown,
    folder_without_documents,
    folder_that_is_missing,
    file_that_exists,
    run_that_exists,
    run_that_is_missing,
    run_without_an_index,
    worker_without_a_log,
    key_that_is_unknown,
    host_that_is_named_twice,
    device_kind_that_is_unknown,
    tokenizer_that_is_missing,
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH: the stubs, and the `touch` that a name would run."""
    folder = tmp_path_factory.mktemp("programs")
    for name in PROGRAMS:
        stub = folder / name
        stub.write_text(f'#!/bin/sh\nprintf \'%s\\0\' {name} "$@" >>"$WORDS"\n')
        stub.chmod(0o755)
    touch = shutil.which("touch")
    assert touch is not None
    (folder / "touch").symlink_to(touch)
    return folder


def fix_of(stderr: str) -> str:
    """The fix of a refusal, as a person copies it from the screen."""
    assert stderr.count("\n  fix:   ") == 1, stderr
    return stderr.partition("\n  fix:   ")[2]


def pasted(shell: str, fix: str, programs: Path, scratch: Path) -> list[bytes]:
    """Paste a fix into a shell in an empty folder; the words that programs got."""
    scratch.mkdir()
    words = scratch.with_suffix(".words")
    words.touch()
    shell_path = shutil.which(shell)
    assert shell_path is not None
    process = subprocess.run(
        [shell_path],
        input=os.fsencode(fix),
        cwd=scratch,
        env={"PATH": str(programs), "WORDS": str(words)},
        capture_output=True,
    )
    assert b"unexpected EOF" not in process.stderr and b"Unterminated" not in process.stderr
    assert not list(scratch.iterdir()), (shell, fix)
    return words.read_bytes().split(b"\0")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_fix_in_a_shell_runs_nothing_of_a_name(
    case: Case, here: Farspan, programs: Path, tmp_path: Path
):
    for number, name in enumerate(NAMES):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        done = here(*case(folder, name), cwd=folder)
        assert done.returncode not in (0, 1), (name, done.stdout, done.stderr)
        for shell in SHELLS:
            pasted(shell, fix_of(done.stderr), programs, tmp_path / f"{number}.{shell}")
        assert not list(folder.rglob("INJECTED*")), name


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_fix_names_the_file_that_is_there(name: str, here: Farspan, programs: Path, tmp_path: Path):
    folder = tmp_path / "here"
    folder.mkdir()
    done = here(*run_without_an_index(folder, name), cwd=folder)
    words = pasted("bash", fix_of(done.stderr), programs, tmp_path / "shell")
    assert words == [b"farspan", b"embed", os.fsencode(f"runs/{name}"), b""]
