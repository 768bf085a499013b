"""Which plan `farspan train` runs, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from farspan import models
from farspan.app.plans import best_plan
from farspan.app.resolving import Resolved
from farspan.cli.console import Console
from farspan.cli.show_updates import Show
from farspan.domain.config import ParallelConfig
from farspan.domain.corpus import CorpusManifest, Split
from farspan.domain.problems import Refusal
from farspan.domain.train import TrainSpec
from farspan.planning.ranking import candidate_name
from tests.planning.worlds import FAST, SLOW, cluster, ranking

SPLIT = Split(tokens=10**6, documents=9, text_bytes=3 * 10**6)
CORPUS = CorpusManifest(
    hash="c" * 16,
    source="docs",
    vocab_size=50257,
    end_of_text=0,
    dtype="uint16",
    unigram_nats=6.0,
    bigram_nats=4.0,
    exact_duplicates=0,
    near_duplicates=0,
    train=SPLIT,
    val=SPLIT,
)


def resolved(*sites) -> Resolved:
    return Resolved(
        model=models.presets()["gpt2"].spec,
        train=TrainSpec(steps=100, batch=8, seq_len=1024, precision="fp16"),
        cluster=cluster(*sites),
        corpus=CORPUS,
        corpus_folder=Path("c"),
        warnings=(),
        origin={},
    )


def test_the_best_plan_of_those_allowed_is_run_and_named(capsys) -> None:
    asked = ParallelConfig(allow=("data", "zero2"))
    planned = best_plan(resolved((FAST, FAST), (SLOW, SLOW)), asked, Show(Console(json=False)))
    best = ranking("FF", "SS", allow=("data", "zero2")).candidates[0]
    assert planned.estimate.step_s == best.estimate.step_s
    said = " ".join(capsys.readouterr().out.split())
    assert (
        said.startswith(f"{candidate_name(best)} is chosen: ")
        and "0 of " in said
        and "than they could save" in said
    )


def test_best_plan_on_one_device_prints_nothing_except_its_table(capsys) -> None:
    asked = ParallelConfig(allow=("data",))
    best_plan(resolved((FAST,)), asked, Show(Console(json=False)))
    assert capsys.readouterr().out == ""
    best_plan(resolved((FAST,)), asked, Show(Console(json=False)), table=True)
    assert "data on all devices (1 fast) is fastest" in capsys.readouterr().out


def test_a_technique_that_is_named_runs_on_all_devices() -> None:
    for name in ("zero2", "pipeshard"):
        planned = best_plan(
            resolved((FAST, FAST), (SLOW, SLOW)),
            ParallelConfig(technique=name),
            Show(Console(json=False)),
        )
        assert planned.plan.technique == name and len(planned.plan.devices) == 4


def test_technique_without_a_plan_on_this_cluster_is_refused_with_the_reason() -> None:
    with pytest.raises(Refusal) as caught:
        best_plan(
            resolved((FAST, FAST)), ParallelConfig(allow=("diloco",)), Show(Console(json=False))
        )
    assert caught.value.problem.code == "cannot-plan" and "one site" in caught.value.problem.fact
