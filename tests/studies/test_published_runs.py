"""The lists of published runs and block times load, and what they say of their plans holds
together."""

from __future__ import annotations

from collections import Counter

import pytest

from farspan_studies.papers.published_runs import Block, Run, published_blocks, published_runs


def twice(ids: list[str]) -> list[str]:
    return [x for x, count in Counter(ids).items() if count > 1]


def test_there_are_enough_runs_and_no_id_comes_twice():
    runs = published_runs().runs
    assert len(runs) >= 30
    assert twice([run.id for run in runs]) == []
    assert len({run.gpu for run in runs}) >= 5


def test_no_id_of_a_block_comes_twice():
    blocks = published_blocks().blocks
    assert twice([block.id for block in blocks]) == []
    assert len({block.gpu for block in blocks}) >= 3


@pytest.mark.parametrize("run", published_runs().runs, ids=lambda run: run.id)
def test_the_plan_of_a_run_is_whole(run: Run):
    assert run.gpus == run.data * run.tensor * run.pipeline
    assert run.batch % (run.data * run.microbatch) == 0
    assert run.gpus % run.gpus_per_host == 0
    assert sum(x is not None for x in (run.step_s, run.tokens_per_s, run.tflops_per_gpu)) == 1
    assert run.model.d_model % run.model.heads == 0
    assert run.model.heads % run.model.kv_heads == 0
    assert run.seq_len <= run.model.context
    assert run.model.layers % (run.pipeline * run.interleave) == 0


@pytest.mark.parametrize("block", published_blocks().blocks, ids=lambda block: block.id)
def test_a_block_has_a_shape(block: Block):
    assert block.model.d_model % block.model.heads == 0
    assert block.seq_len <= block.model.context
    assert block.layers <= block.model.layers


def test_every_assumed_name_is_a_field_of_its_run_block_or_model():
    items: list[Run | Block] = [*published_runs().runs, *published_blocks().blocks]
    for item in items:
        for name in item.assumed:
            assert hasattr(item, name) or hasattr(item.model, name), f"{item.id}: {name}"
