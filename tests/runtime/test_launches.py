"""How many kernels a step launches on a GPU, counted on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from benchmarks.gpu_step import plan_of
from farspan import models
from farspan.domain.model import ModelSpec
from farspan.domain.train import TrainSpec
from farspan.planning.size import shape_for
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model import decoder
from farspan.runtime.parallel import executor
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.state.train_state import TrainState
from tests.runtime.launches import LaunchCounter, pose_as_gpu


def attend_by_flash(q: Tensor, k: Tensor, v: Tensor, policy: object) -> Tensor:
    """Attention as a GPU computes it."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def norm_of_meta(state: TrainState, counted: object = None) -> float:
    """The norm's kernels; the meta device has no values that the host could ask for."""
    torch.stack(torch._foreach_norm(state.grad))
    return 1.0


def count_step(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, rows: int) -> LaunchCounter:
    """Return the launches of a step of one GPU in bf16 with AdamW, without compiled blocks."""
    counter = LaunchCounter()
    pose_as_gpu(monkeypatch)
    monkeypatch.setattr(decoder, "causal_attention", attend_by_flash)
    # A GPU has one kernel for it; the meta device takes it apart.
    monkeypatch.setattr(decoder.F, "rms_norm", lambda x, s, w, e: layer_norm(x, s, w, None, e))
    monkeypatch.setattr(Topology, "device", "meta")
    monkeypatch.setattr(executor, "synchronize_device", lambda device: None)
    monkeypatch.setattr(TrainState, "squared_grad_norm", norm_of_meta)
    train = TrainSpec(steps=1, batch=rows, seq_len=spec.context, precision="bf16")
    worker = Executor(Topology(plan_of(spec, train, "cuda"), 0), torch.device("meta"))
    worker.begin_run()
    worker.model.fused_loss = counter.fused_loss
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
