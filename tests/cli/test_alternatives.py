"""What `farspan train` says of plans that it does not run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farspan import models
from farspan.cli import job
from farspan.cli.console import Console
from farspan.domain.config import ParallelConfig
from farspan.domain.corpus import CorpusManifest, Split
from farspan.domain.problems import Refusal
from farspan.domain.train import TrainSpec
from farspan.planning.compare import full_s
from tests.planning.worlds import FAST, SLOW, cluster, ranking

SPLIT = Split(tokens=10**6, documents=9, text_bytes=3 * 10**6)
CORPUS = CorpusManifest(
    hash="c", source="docs", vocab_size=50257, end_of_text=0, dtype="uint16", unigram_nats=6.0, bigram_nats=4.0,
    exact_duplicates=0, near_duplicates=0, train=SPLIT, val=SPLIT,
)  # fmt: skip


def resolved(*sites) -> job.Resolved:
    return job.Resolved(
        model=models.presets()["gpt2"].spec, train=TrainSpec(steps=1000, batch=8, seq_len=1024, precision="fp16"),
        cluster=cluster(*sites), corpus=CORPUS, corpus_folder=Path("c"), warnings=(), origin={},
    )  # fmt: skip


def test_a_much_faster_plan_is_named_with_what_it_saves(capsys) -> None:
    asked = ParallelConfig(allow=("data", "zero2"))
    planned = job.plan(resolved((FAST, FAST), (SLOW, SLOW)), asked)
    assert planned.plan.unsupported is None
    job.say_alternatives(planned, asked, Console(json=False), table=False)
    best = ranking("FF", "SS", allow=("data", "zero2")).candidates[0]
    ours = 1000 * planned.estimate.step_s / 0.9
    (share,) = re.findall(r"(\d+)% less time", said := capsys.readouterr().out)
    assert said.startswith(f"{best.technique} on {best.where} would take ")
    assert int(share) == round(100 * (1 - full_s(best) / ours))


def test_nothing_is_said_where_data_over_all_devices_is_best(capsys) -> None:
    asked = ParallelConfig(allow=("data",))
    planned = job.plan(resolved((FAST,)), asked)
    job.say_alternatives(planned, asked, Console(json=False), table=False)
    assert capsys.readouterr().out == ""
    job.say_alternatives(planned, asked, Console(json=False), table=True)
    assert "chosen" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [ParallelConfig(technique="zero2"), ParallelConfig(allow=("zero2",))])
def test_what_the_workers_cannot_run_is_refused(asked: ParallelConfig) -> None:
    with pytest.raises(Refusal) as caught:
        job.plan(resolved((FAST, FAST)), asked)
    assert caught.value.problem.code == "cannot-plan"
    assert "divided state" in caught.value.problem.fact
