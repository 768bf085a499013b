"""No file of the current folder is imported by a process that farspan starts."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farspan.domain.problems import EXIT_CODES
from farspan.domain.run_events import Step, read_events
from farspan.launch.hosts import BOOTSTRAP
from tests.cli.conftest import TINY
from tests.waiting import LIMIT_S, wait_for

ROOT = Path(__file__).parents[2]
#: Where Python is started, and programs for old Pythons, which import nothing of farspan: one of
#: them starts others from the folder /. pip's wheel is run by its path, which is all that leads its
#: module path.
STARTERS = {
    "farspan/domain/interpreter.py",
    "farspan/launch/agent.py",
    "farspan/launch/hosts.py",
    "farspan/launch/own_release.py",
    "farspan/launch/setup_agent.py",
}
#: The one file that makes pools of processes.
POOLS = "farspan/corpus/processes.py"
SOURCES = sorted(
    path
    for package in ("farspan", "farspan_exports", "farspan_lab", "farspan_studies")
    for path in (ROOT / package).rglob("*.py")
)
#: Written by whatever imports a planted module.
PLANTED = "open({mark!r}, 'a').write(__name__ + '\\n')\nraise ImportError('planted')\n"
#: Names of modules that farspan's processes import, or that Python's own do.
NAMES = [*sorted(sys.stdlib_module_names - set(sys.builtin_module_names)), "torch", "numpy"]
NAMES += ["msgspec", "psutil", "tokenizers", "yaml", "rich", "packaging"]


def starts_of_python(tree: ast.AST) -> Iterator[int]:
    """Lines that compose a command of an interpreter, or import what starts processes."""
    for node in ast.walk(tree):
        match node:
            case ast.List(elts=[_, _, *_] as words) | ast.Tuple(elts=[_, _, *_] as words):
                constants = {word.value for word in words if isinstance(word, ast.Constant)}
                names = {ast.unparse(word).partition("(")[0] for word in words}
                if constants & {"-m"} or names & {"sys.executable", "host_python"}:
                    yield node.lineno
            case ast.Import(names=names):
                if any(name.name.startswith("multiprocessing") for name in names):
                    yield node.lineno
            case ast.ImportFrom(module=module, names=names):
                pools = {"ProcessPoolExecutor"} & {name.name for name in names}
                if str(module).startswith("multiprocessing") or pools:
                    yield node.lineno


def test_python_is_started_only_where_the_path_is_made_safe():
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for line in starts_of_python(ast.parse(path.read_text()))
    }
    assert {place.split(":")[0] for place in found} == STARTERS | {POOLS}


@pytest.fixture
def hostile(desk: Path, tmp_path: Path) -> Path:
    """A folder with text, a run.yaml, and a file called as each module that is imported."""
    shutil.copytree(desk / "docs", tmp_path / "docs")
    long = TINY.replace("steps: 4", "steps: 10_000_000")
    (tmp_path / "run.yaml").write_text(
        f"{long}parallel: {{workers: 2, device: cpu, technique: data}}\n"
    )
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(PLANTED.format(mark=str(tmp_path / "imported")))
    return tmp_path


def start_farspan(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start the command in this folder, as its script does: without the folder on its own path."""
    environment = {**os.environ, "FARSPAN_CACHE": str(folder / "cache"), "PYTHONSAFEPATH": ""}
    script = "import sys; del sys.path[0]; from farspan.__main__ import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", script, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_untouched(folder: Path, process: subprocess.Popen[str], code: int = 0) -> None:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, output
    imported = folder / "imported"
    assert not imported.exists(), imported.read_text()


def test_doctor_imports_nothing_of_the_current_folder(hostile: Path):
    assert_untouched(hostile, start_farspan(hostile, "doctor", "--json"))


def test_python_m_farspan_imports_nothing_of_the_current_folder_once_farspan_runs(hostile: Path):
    """Until it is imported the folder is on the path, whatever is run."""
    (hostile / "docs" / "loaded.py").write_text("import sys, farspan; print(*sys.modules)")
    python_m = [sys.executable, "-m"]
    loaded = subprocess.check_output([*python_m, "loaded"], cwd=hostile / "docs", text=True)
    for name in loaded.split():
        (hostile / f"{name}.py").unlink(missing_ok=True)
    process = subprocess.Popen(
        [*python_m, "farspan", "plan", "--model", "gpt2", "--cluster", "nowhere"],
        cwd=hostile,
        env={**os.environ, "PYTHONSAFEPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert_untouched(hostile, process, EXIT_CODES["path-missing"])


def test_agent_imports_nothing_of_the_current_folder(hostile: Path):
    program = b"import json, platform, tempfile; print(json.dumps(platform.python_version()))"
    done = subprocess.run(
        [sys.executable, "-u", "-c", BOOTSTRAP],
        input=b"%d\n%b" % (len(program), program),
        cwd=hostile,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert json.loads(done.stdout) and not (hostile / "imported").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_train_and_resume_import_nothing_of_the_current_folder(hostile: Path, launcher: str):
    options = ("--set", f"parallel.launcher={launcher}")
    for words in (("train", "run.yaml", "--run", "run", *options), ("resume", "run")):
        process = start_farspan(hostile, *words)
        before = made_steps(hostile)
        wait_for(lambda before=before: made_steps(hostile) > before, "a step", process)
        process.send_signal(signal.SIGINT)
        assert_untouched(hostile, process, EXIT_CODES["interrupted"])


def made_steps(folder: Path) -> int:
    events = folder / "run" / "events.jsonl"
    return sum(isinstance(e, Step) for e in read_events(events)) if events.exists() else 0


@pytest.mark.slow
def test_prepare_and_embed_import_nothing_of_the_current_folder(hostile: Path):
    short = ("--set", "train.steps=4")
    for words in (
        ("prepare", "run.yaml"),
        ("train", "run.yaml", "--run", "run", *short),
        ("embed", "run", "--no-eval"),
    ):
        assert_untouched(hostile, start_farspan(hostile, *words))
