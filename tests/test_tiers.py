"""The tiers of tests: what `make test-slow CHANGED=...` runs, and that no verdict depends on the
clock.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FILES = sorted({*TESTS.rglob("*.py")} - {TESTS / "waiting.py"})
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "monotonic_ns", "perf_counter_ns"}
#: A shorter limit ends what a busy machine has not finished; tests/waiting.py has the usual one.
SHORTEST_LIMIT_S = 60
WAITS = {"wait", "join", "communicate", "result"}


def is_clock_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
        and node.func.attr in CLOCKS
    )


def reads_clock(node: ast.AST, timed: set[str]) -> bool:
    """Whether an expression reads a clock or a variable in `timed`."""
    return any(
        is_clock_call(child) or (isinstance(child, ast.Name) and child.id in timed)
        for child in ast.walk(node)
    )


def timed_variables(function: ast.AST) -> set[str]:
    """Names that are assigned a difference of clock readings, or something made of one."""
    timed = set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and reads_clock(node.value, timed):
            for target in node.targets:
                timed |= {child.id for child in ast.walk(target) if isinstance(child, ast.Name)}
    return timed


def upper_bounds(function: ast.AST) -> Iterator[int]:
    """Lines of asserts that something took less than so long.

    A lower bound holds on a busy machine too.
    """
    timed = timed_variables(function)
    for statement in ast.walk(function):
        if not isinstance(statement, ast.Assert):
            continue
        for node in ast.walk(statement.test):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
                shorter = left if isinstance(operator, ast.Lt | ast.LtE) else right
                if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and reads_clock(
                    shorter, timed
                ):
                    yield statement.lineno


def constants(tree: ast.Module) -> dict[str, float]:
    """Numbers that the module gives names to."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, int | float):
                    found[target.id] = node.value.value
    return found


def short_limits(tree: ast.Module) -> Iterator[int]:
    """Lines of calls that give a process, a thread or a queue less than SHORTEST_LIMIT_S."""
    named = constants(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        limits = [word.value for word in node.keywords if word.arg == "timeout"]
        if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            limits += node.args[:1]
        for limit in limits:
            seconds = None
            if isinstance(limit, ast.Constant):
                seconds = limit.value
            elif isinstance(limit, ast.Name):
                seconds = named.get(limit.id)
            if isinstance(seconds, int | float) and 0 < seconds < SHORTEST_LIMIT_S:
                yield node.lineno


def clock_verdicts(code: str) -> list[int]:
    tree = ast.parse(code)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return sorted(
        {line for function in functions for line in upper_bounds(function)}
        | set(short_limits(tree))
    )


@pytest.mark.parametrize(
    "code",
    [
        "began = time.monotonic()\n    assert time.monotonic() - began < 3",
        "began = time.time()\n    took = time.time() - began\n    assert 3 > took",
        "process.wait(5)",
        "process.wait(SHORT_S)",
        "subprocess.run(words, timeout=20)",
    ],
)
def test_the_check_finds_verdicts_of_the_clock(code):
    assert clock_verdicts(f"SHORT_S = 5\ndef test():\n    {code}\n")


@pytest.mark.parametrize(
    "code",
    [
        "began = time.monotonic()\n    assert time.monotonic() - began >= 3",
        "process.wait(LIMIT_S)",
        "subprocess.run(words, timeout=300)",
        "assert steps < 3",
    ],
)
def test_the_check_passes_lower_bounds_and_long_limits(code):
    assert not clock_verdicts(f"def test():\n    {code}\n")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TESTS)))
def test_no_verdict_depends_on_the_clock(file):
    assert clock_verdicts(file.read_text()) == []


def test_every_folder_of_the_packages_names_the_slow_tests_that_it_can_break():
    table = dict(re.findall(r"^PARTS_(\w+) := (.+)$", (ROOT / "Makefile").read_text(), re.M))
    folders = {path.parent.name for path in (ROOT / "farspan").glob("*/__init__.py")}
    assert set(table) == folders | {"farspan_exports", "farspan_lab", "farspan_studies"}
    parts = {part for row in table.values() for part in row.split()}
    assert parts <= {path.name for path in TESTS.iterdir() if path.is_dir()}
