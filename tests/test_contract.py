"""One estimator prices any plan and one runtime executes it: neither may ask which technique made it."""

import ast
from pathlib import Path

import pytest

import farspan

ROOT = Path(farspan.__file__).parent


def reads_technique(code: str) -> bool:
    """Whether the code reads an attribute `technique`, by name or by string."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "technique")
        or (isinstance(node, ast.Constant) and node.value == "technique")
        for node in ast.walk(ast.parse(code))
    )


def test_the_check_itself_finds_both_ways_of_reading():
    assert reads_technique("if plan.technique == 'data': pass")
    assert reads_technique("getattr(plan, 'technique')")
    assert not reads_technique("plan.train.steps")


@pytest.mark.parametrize("layer", ["estimate", "runtime", "launch"])
def test_no_layer_that_prices_or_runs_plans_reads_the_technique(layer):
    files = sorted((ROOT / layer).rglob("*.py"))
    assert len(files) > 1
    assert [str(file) for file in files if reads_technique(file.read_text())] == []
