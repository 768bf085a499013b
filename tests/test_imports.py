"""What the command line may load before it has work to do. benchmarks/startup.py times it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "scipy",
    "matplotlib",
    "transformers",
    "numpy",
    "tokenizers",
    "datasets",
    "pyarrow",
    "rich",
    "fastapi",
    "pydantic",
    "uvicorn",
)
REPORT = "\nimport json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"
HELP = "import farspan.cli.main as m\ntry: m.main({words})\nexcept SystemExit: pass\n"
#: Code of a start, and how many modules it may load beside those of Python itself.
STARTS = {
    "import farspan": ("import farspan\n", 10),
    "--help": (HELP.format(words=["--help"]), 140),
    "plan --help": (HELP.format(words=["plan", "--help"]), 160),
}


def loaded(code: str) -> list[str]:
    """Modules that a Python has loaded after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", STARTS)
def test_start_loads_few_modules_and_none_that_is_heavy(name: str):
    code, most = STARTS[name]
    modules = loaded(code)
    assert {module.split(".")[0] for module in modules}.isdisjoint(HEAVY)
    assert len(modules) - len(loaded("")) <= most


def test_naming_the_commands_imports_none():
    code = (
        "import farspan.cli.main as m, sys; m.build_overview_parser(); "
        "print([n for n in sys.modules if "
        "'commands.' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
