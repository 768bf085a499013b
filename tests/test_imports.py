"""What the command line may load before it has work to do, and how long that may take."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

#: Processor seconds, user and system, of starting up.
BUDGET_S = 0.3
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
REPORT = (
    "; import json, sys; print('\\n' + json.dumps(sorted({name.split('.')[0] for name in "
    "sys.modules})))"
)
HELP = "import farspan.cli.main as m\ntry: m.main({words})\nexcept SystemExit: pass\n"
STARTS = {
    "import farspan": "import farspan\n",
    "--help": HELP.format(words=["--help"]),
    "plan --help": HELP.format(words=["plan", "--help"]),
}


def cpu_s(code: str) -> float:
    """User and system time of a Python process that runs `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True, env={**os.environ}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.timed
@pytest.mark.parametrize("code", STARTS.values(), ids=STARTS)
def test_starting_is_light(code: str):
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT[2:]], capture_output=True, text=True, check=True
    )
    assert set(json.loads(done.stdout.splitlines()[-1])).isdisjoint(HEAVY)
    assert min(cpu_s(code) for _ in range(5)) < BUDGET_S


def test_naming_the_commands_imports_none():
    code = (
        "import farspan.cli.main as m, sys; m.overview(); print([n for n in sys.modules if "
        "'commands.' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
