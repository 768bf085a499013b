"""What no file may do: ask which technique made a plan, where plans are priced or run, unpickle,
and write a file of a run or a cache through a link."""

import ast
import re
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


#: Functions that write a file themselves, whatever lies in its place.
WRITING_NAMES = {
    "write_text",
    "write_bytes",
    "tofile",
    "write_index",
    "save_file",
    "copyfile",
    "copytree",
    "extract",
    "extractall",
}
#: Modes of `open` that write to what is there, also where a link leads; "x" makes a new file.
WRITING_MODE = re.compile("[wa]b?[+]?|r[+]b?|rb[+]")
#: Files that write so, and why no link can be in the way.
LINKLESS = {
    "app/track_process.py": "the null device",
    "cli/main.py": "the null device",
    "corpus/archives.py": "into a temporary folder",
    "corpus/documents.py": "into a file that `open_own` has opened",
    "corpus/processes.py": "the null device",
    "launch/agent.py": "claims, in a folder that it has made for this user alone",
    "launch/trial.py": "into a temporary folder",
    "launch/secure_agent.py": "into a folder that only root writes to",
    "launch/tune_agent.py": "the kernel's settings, and a record where only root writes",
    "retrieval/build.py": "copies a store into the folder of a new index",
    "retrieval/embed.py": "into the folder of a new index",
    "retrieval/farspan_embedding.py": "a folder that the user names",
    "retrieval/pooling.py": "into a temporary folder",
    "retrieval/sentence_transformers.py": "into a folder that is new or empty",
    "retrieval/stores/faiss.py": "into a new folder",
    "retrieval/vector_file.py": "files that the user names",
    "launch/setup_agent.py": "into a folder that it has made for this user alone",
    "runtime/device.py": "a control group",
    "models/_base_files.py": "into a folder that is new or empty",
    "runtime/model/weight_shards.py": "into a folder that is new or empty",
}


def may_write_through_a_link(call: ast.Call) -> bool:
    """Whether a call opens a file for writing by a path that may be a link."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name == "open":
        flags = {part.attr for part in ast.walk(call) if isinstance(part, ast.Attribute)}
        if flags & {"O_WRONLY", "O_RDWR", "O_CREAT"}:
            return not flags & {"O_NOFOLLOW", "O_EXCL"}
        words = [word.value for word in given if isinstance(word, ast.Constant)]
        return any(WRITING_MODE.fullmatch(word) for word in words if isinstance(word, str))
    if name == "touch":  # With exist_ok=False it makes a new file.
        return not any(keyword.arg == "exist_ok" for keyword in call.keywords)
    if isinstance(function, ast.Attribute) and ast.unparse(function) in ("np.save", "numpy.save"):
        return ast.unparse(call.args[0]) != "file"
    return name in WRITING_NAMES


def writes_through_links(code: str) -> bool:
    calls = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    return any(map(may_write_through_a_link, calls))


@pytest.mark.parametrize(
    "code",
    [
        "open(path, 'wb')",
        "open(path, mode='a')",
        "(folder / 'lock').open('w')",
        "open(path, 'rb+')",
        "path.write_text('x')",
        "path.touch()",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "np.save(folder / 'rows.npy', rows)",
        "tokens.tofile(path)",
    ],
)
def test_the_check_itself_finds_what_writes_through_a_link(code):
    assert writes_through_links(code)


def test_files_of_runs_and_caches_are_opened_without_following_links():
    """Run folders may be other people's, and caches a group's: a link there leads anywhere."""
    assert not writes_through_links("open(path)\nopen(path, 'rb')\nopen(path, 'xb')")
    assert not writes_through_links("with open_own(path, 'wb') as file:\n    np.save(file, rows)")
    files = sorted(ROOT.rglob("*.py"))
    found = {
        str(file.relative_to(ROOT)) for file in files if writes_through_links(file.read_text())
    }
    assert found == LINKLESS.keys()


def test_no_file_asks_the_formatter_to_skip_lines():
    folders = (
        "farspan",
        "farspan_exports",
        "farspan_lab",
        "farspan_studies",
        "tests",
        "benchmarks",
        "tools",
    )
    files = [file for folder in folders for file in sorted((ROOT.parent / folder).rglob("*.py"))]
    asked = "fmt: " + "skip"
    assert len(files) > 500
    assert [str(file) for file in files if asked in file.read_text()] == []
