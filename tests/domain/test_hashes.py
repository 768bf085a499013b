"""Hashes that name files and folders, in files from elsewhere: other text is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farspan.app.jobs import Job
from farspan.domain.cluster import Host
from farspan.domain.corpus import CorpusManifest
from farspan.domain.plan import Inputs, Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import content_hash, is_content_hash, load, save
from farspan.runtime.checkpoint.manifest import StoredSlice
from farspan.runtime.comm.distribute_files import ShipmentOffer
from tests.report.fake_run import CORPUS, make_plan

HASH = content_hash("a corpus")
#: Texts that lead out of the folder in which a hash names something, or nearly are a hash.
PATHS = (
    "../../../etc",
    "/etc",
    "..",
    ".",
    "a/b",
    f"{HASH}/..",
    HASH[:-1],
    HASH.upper(),
    f"{HASH}\n",
)


def refuses(kind: type[Any], fields: dict[str, object], key: str, value: str) -> bool:
    """Whether a struct is read with these fields, and not with this value of one."""
    assert msgspec.convert(fields, kind)
    with pytest.raises(msgspec.ValidationError, match=key):
        msgspec.convert({**fields, key: value}, kind)
    return True


@pytest.mark.parametrize("text", PATHS)
def test_what_names_a_file_is_a_hash(text: str):
    assert is_content_hash(HASH) and not is_content_hash(text)
    offer = {"plan": HASH, "corpus": HASH, "address": "a", "port": 1}
    assert refuses(Inputs, {"cluster": "", "corpus": HASH}, "corpus", text)
    assert refuses(Inputs, {"cluster": HASH, "corpus": ""}, "cluster", text)
    assert refuses(ShipmentOffer, offer, "corpus", text)
    assert refuses(ShipmentOffer, offer, "plan", text)
    assert refuses(CorpusManifest, msgspec.to_builtins(CORPUS), "hash", text)


def test_file_of_a_checkpoint_lies_in_its_folder():
    part = {"file": "rank-0.safetensors", "at": (), "shape": (), "sha256": ()}
    for name in ("../model.safetensors", "/model.safetensors", "model.safetensors\n", "model.bin"):
        assert refuses(StoredSlice, part, "file", name)


@pytest.mark.parametrize("name", ["-oProxyCommand=touch INJECTED", "a b", "a\n"])
def test_name_of_a_host_is_no_option(name: str):
    assert refuses(Host, {"name": "box", "devices": ()}, "name", name)
    job = {"pid": 1, "host": "box", "started": 0.0, "began": None}
    assert refuses(Job, job, "host", name)


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("text", PATHS)
def test_plan_of_a_run_with_a_path_for_a_corpus_is_refused(text: str, tmp_path: Path):
    run = RunFolder(tmp_path)
    save(make_plan(10), run.plan)
    assert load(run.plan, Plan).inputs.corpus == CORPUS.hash
    edited(run.plan, lambda plan: plan["inputs"].update(corpus=text))
    with pytest.raises(Refusal) as refused:
        run.load_plan()
    problem = refused.value.problem
    assert problem.code == "out-of-range" and "inputs.corpus" in problem.what
    assert problem.remedy == "set inputs.corpus to a hash of 16 hexadecimal digits, or empty"
