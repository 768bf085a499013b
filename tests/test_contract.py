"""What no file may do: ask which technique made a plan, where plans are priced or run, and
unpickle."""

import ast
from pathlib import Path

import pytest

import farspan

ROOT = Path(farspan.__file__).parent
#: Modules that run what they read, and functions that do: torch's exchanges of objects unpickle
#: what peers send.
UNPICKLING_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
}
UNPICKLING_NAMES = {
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
    "allow_pickle",
    "Pickler",
    "Unpickler",
    "unsafe_load",
    "UnsafeLoader",
    "FullLoader",
}
#: `torch.load` and `torch.save`, and of `multiprocessing.connection` what listens to others.
UNPICKLING_OF = {
    ("torch", "load"),
    ("torch", "save"),
    ("torch", "jit"),
    ("multiprocessing", "connection"),
}


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


def unpickling(code: str) -> set[str]:
    """What of a file's code unpickles, or could: by import, by name, or as a word that a function
    is given."""
    found = set[str]()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {name for name in names if name.split(".")[0] in UNPICKLING_MODULES}
            found |= {
                name for name in names for pair in UNPICKLING_OF if name.startswith(".".join(pair))
            }
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name for name in names if name.split(".")[0] in UNPICKLING_MODULES}
            found |= {
                name for name in names for pair in UNPICKLING_OF if name.startswith(".".join(pair))
            }
            found |= {alias.name for alias in node.names if alias.name in UNPICKLING_NAMES}
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in UNPICKLING_OF:
                found.add(f"{node.value.id}.{node.attr}")
            found |= {node.attr} & UNPICKLING_NAMES
        elif isinstance(node, ast.Name):
            found |= {node.id} & UNPICKLING_NAMES
        elif isinstance(node, ast.keyword):
            found |= {node.arg or ""} & UNPICKLING_NAMES
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & (UNPICKLING_NAMES | UNPICKLING_MODULES)
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import torch, pickle as p",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list as share",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "getattr(dist, 'all_gather_object')",
        "importlib.import_module('pickle')",
        "yaml.load(text, yaml.UnsafeLoader)",
        "from multiprocessing.connection import Listener",
    ],
)
def test_the_check_itself_finds_what_unpickles(code):
    assert unpickling(code)


def test_nothing_unpickles():
    """Peers, run folders and model folders are other people's: what reads a pickle runs what they
    like."""
    assert not unpickling("import torch\nstate = load_file('model.safetensors')\nmodel.load(state)")
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 100
    assert {str(file): what for file in files if (what := unpickling(file.read_text()))} == {}


def test_no_file_asks_the_formatter_to_skip_lines():
    folders = ("farspan", "farspan_lab", "farspan_studies", "tests", "benchmarks", "tools")
    files = [file for folder in folders for file in sorted((ROOT.parent / folder).rglob("*.py"))]
    asked = "fmt: " + "skip"
    assert len(files) > 500
    assert [str(file) for file in files if asked in file.read_text()] == []
