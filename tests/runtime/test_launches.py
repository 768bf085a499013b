"""How many kernels a step launches on a GPU, counted on the meta device."""

from __future__ import annotations

import pytest
import torch

from farspan import models
from farspan.domain.model import ModelSpec
from farspan.domain.train import TrainSpec
from farspan.planning.size import shape_for
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.state.train_state import TrainState
from tests.runtime.launches import LaunchCounter, meta_executor


def norm_of_meta(state: TrainState, counted: object = None) -> float:
    """The norm's kernels; the meta device has no values that the host could ask for."""
    torch.stack(torch._foreach_norm(state.grad))
    return 1.0


def count_step(
    monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, rows: int, *, is_fused: bool = True
) -> LaunchCounter:
    """Return the launches of a step of one GPU in bf16 with AdamW, without compiled blocks; with a
    compiled loss, or with that of PyTorch's operators."""
    monkeypatch.setattr(TrainState, "squared_grad_norm", norm_of_meta)
    train = TrainSpec(steps=1, batch=rows, seq_len=spec.context, precision="bf16")
    worker, counter = meta_executor(monkeypatch, spec, train)
    if not is_fused:
        worker.model.fused_loss = None
    tokens = torch.zeros(rows, spec.context, dtype=torch.int64, device="meta")
    # Once before, as what a run computes once does not count.
    worker.model.forward_blocks(tokens)
    with counter:
        worker.pipeline.run_microbatches(lambda microbatch: Batch(tokens, tokens), 1.0)
        worker.grad_reducer.finish_sums()
        worker.state.squared_grad_norm()
        worker.optimizer_step(train.optimizer, 1e-3, 1, 1.0)
    return counter


def test_a_small_model_launches_few_kernels(monkeypatch):
    spec = shape_for("llama", 3_000_000, vocab_size=8192, context=256, knobs={})
    assert 100 < count_step(monkeypatch, spec, 8).count <= 200


def test_gpt2_medium_launches_few_kernels(monkeypatch):
    spec = models.presets()["gpt2-medium"].spec
    assert 800 < count_step(monkeypatch, spec, 16).count <= 1250
