"""Files of a run and of a user in which anything was changed: each is read, or refused with a coded
message, and leads to no file elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import farspan
from farspan import models
from farspan.app import jobs
from farspan.app.configs import refuse_edited
from farspan.app.plans import check_cluster, read_plan
from farspan.app.reporting import write_report
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.clusterfile import load_cluster
from farspan.domain.config import RunConfig
from farspan.domain.engine import load_engine
from farspan.domain.epoch_fence import read_ledger
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load_yaml
from farspan.estimate.estimate_plan import estimate
from farspan.launch import trust
from farspan.runtime.worker import check_plan

JSON = (
    "plan.json",
    "cluster.json",
    "run.json",
    "estimate.json",
    "epochs.json",
    "corpus.json",
    "job.json",
)
YAML = ("run.yaml", "cluster.yaml")
#: A file that nothing has a reason to open.
SECRET = "/proc/self/environ"
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 2**31, 2**63, 10**30, 1e308, -0.5, float("nan"), float("inf")]),
    st.sampled_from(
        [
            "",
            "..",
            SECRET,
            f"../../../../../..{SECRET}",
            "x" * 5000,
            "\x00",
            "1e9",
            "auto",
            "worker-lost",
        ]
    ),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
CLUSTER = """
sites:
  a: {hosts: {a0: {devices: [{kind: h100, count: 2, price: 2.0}]}, a1: {devices: [{kind: a100-40, memory: 40GB}]}}}
  b: {hosts: {b0: {address: 10.0.0.5, enter: [ssh, b0], devices: [{kind: l4}]}}}
links: [{between: [a, b], rtt: 20ms, bandwidth: 1Gbit/s}]
"""  # noqa: E501
opened = list[str]()
watching = [False]


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if watching[0] and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        opened.append(os.path.realpath(os.fsdecode(arguments[0])))


sys.addaudithook(_watch)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was trained, and beside its files a cluster's."""
    folder = tmp_path_factory.mktemp("mutated")
    (folder / "papers").mkdir()
    for number in range(60):
        (folder / "papers" / f"{number}.txt").write_text(
            f"On the {number} winds. " + "They blow where they list. " * 30
        )
    trained = farspan.train(
        folder / "papers",
        run=folder / "run",
        tokenizer={"vocab": 270},
        model={"layers": 1, "d_model": 32, "heads": 2, "context": 16},
        train={"steps": 3, "precision": "fp32", "batch": {"global": 2}},
    )
    (trained.path / "cluster.yaml").write_text(CLUSTER)
    (trained.path / "job.json").write_text(
        '{"pid": 4194303, "host": "x", "started": 1.0, "began": 2.0}'
    )
    return trained.folder


def mutated(value: Any, data: st.DataObject) -> Any:
    """The same with one value in it changed, or a key taken out."""
    at = value
    while isinstance(at, dict | list) and at:
        key = data.draw(
            st.sampled_from(sorted(at, key=str) if isinstance(at, dict) else range(len(at)))
        )
        if not isinstance(at[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
            if data.draw(st.integers(0, 5)) == 0:
                del at[key]
            else:
                at[key] = data.draw(ANYTHING)
            break
        at = at[key]
    return value


def priced(run: RunFolder) -> None:
    """As a plan in a file is run."""
    plan = read_plan(run.plan)
    cluster = load_cluster_json(run.cluster)
    check_cluster(plan, cluster, run.plan, "farspan plan")
    estimate(plan, models.graph(plan.model), cluster, load_engine(plan.engine))


def uses(run: RunFolder) -> Iterator[Any]:
    """What reads a run's files: each may refuse."""
    yield lambda: jobs.read_status(run)
    yield lambda: write_report(run.path, page=False)
    yield lambda: read_plan(run.plan)
    yield lambda: priced(run)
    yield lambda: check_plan(run.load_plan(), run, 0, 1)
    yield lambda: trust.require_trusted(run)
    yield lambda: refuse_edited(run)
    yield lambda: read_ledger(run.epochs)
    yield lambda: load_yaml(run.config, RunConfig)
    yield lambda: load_cluster(run.path / "cluster.yaml")


@settings(suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from([*JSON, *YAML]), raw=st.integers(0, 9), data=st.data())
def test_a_file_in_which_anything_was_changed_is_read_or_refused(
    run: RunFolder, name: str, raw: int, data
) -> None:
    path = run.path / name
    before = path.read_bytes()
    if raw == 0:  # Bytes, not values.
        at = data.draw(st.integers(0, len(before) - 1))
        byte = data.draw(st.binary(min_size=0, max_size=2))
        content = before[:at] + byte + before[at + 1 :]
    elif name in JSON:
        content = json.dumps(mutated(json.loads(before), data)).encode()
    else:
        content = yaml.safe_dump(mutated(yaml.safe_load(before), data)).encode()
    path.write_bytes(content)
    opened.clear()
    watching[0], refused = True, list[Problem]()
    try:
        for use in uses(run):
            try:
                use()
            except Refusal as refusal:
                refused.append(refusal.problem)
    finally:
        watching[0] = False
        path.write_bytes(before)
    assert all(problem.exit_code and problem.fact for problem in refused)
    assert not [file for file in opened if file.endswith("/environ")]
