"""Compiled blocks: one graph without breaks, made before the first step; and no run that ends by
its compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from benchmarks.gpu_step import plan_of
from farspan.domain.plan import Plan, PlannedDevice
from farspan.domain.problems import Refusal
from farspan.domain.train import TrainSpec
from farspan.planning.size import shape_for
from farspan.runtime import compiler
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model import compiled_blocks, kernels
from farspan.runtime.model.attention_policy import CUDNN_FIRST, AttentionPolicy
from farspan.runtime.model.compiled_blocks import (
    BlockInputs,
    compile_or_restore,
    restore_blocks,
)
from farspan.runtime.model.decoder import Block, Decoder, initial_parameters
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.worker import block_inputs
from farspan.semantics.compile_choice import runs_compiled
from tests.waiting import LIMIT_S

CPU = torch.device("cpu")
LENGTH = 64
ROWS = 2
#: More than PyTorch keeps graphs of one function (`torch._dynamo.config.recompile_limit`, 8), so
#: that each block may not have its own.
LAYERS = 9
#: Knobs that make graphs of their own, where they make any.
KNOBS = {
    "plain": {},
    "recomputed": {"recompute": True},
    "dropped": {"dropout": 0.1},
    "recomputed and dropped": {"recompute": True, "dropout": 0.1},
}
#: As on a Hopper: flash attention, cuDNN's kernel first.
HOPPER = AttentionPolicy(CUDNN_FIRST, False, "cuDNN", "as on a Hopper")


def spec_of(family: str):
    knobs = {"layers": LAYERS, "d_model": 32, "heads": 2, "d_ff": 64}
    spec = shape_for(family, 100_000, vocab_size=512, context=LENGTH, knobs=knobs)
    return replace(spec, window=replace(spec.window, size=20)) if spec.window else spec


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Each test begins with a compiler that raises what fails."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts graphs of blocks, which PyTorch's own operators compute."""
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    plain = torch.compile

    def compile_by_operators(function, **how):
        return plain(function, backend=counter, **how)

    monkeypatch.setattr(torch, "compile", compile_by_operators)
    return counter


def tokens_of(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(512, (ROWS, LENGTH), generator=random)


@pytest.mark.slow
@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "smollm3", "olmo2", "gemma3"])
def test_blocks_of_a_kind_are_one_graph_without_a_break(monkeypatch, graphs, family, knobs):
    monkeypatch.setattr(kernels, "keeps_scores", lambda *about: False)
    share = knobs.get("dropout", 0.0)
    model = Decoder(spec_of(family), recompute=knobs.get("recompute", False))
    model.load_state_dict(dict(initial_parameters(model.spec, 0)))
    for block in model.blocks:
        block.attn.policy = HOPPER
    warning = compile_or_restore(model, CPU, torch.float32, BlockInputs((ROWS,), LENGTH, share))
    kinds = len({block.kind for block in model.blocks})
    assert kinds == (2 if family in ("smollm3", "gemma3") else 1)
    assert warning == "" and graphs.frame_count == kinds
    for step in range(3):
        seeds = torch.full((ROWS,), step, dtype=torch.int32)
        dropout = Dropout(share, seeds) if share else None
        states = model.forward_blocks(tokens_of(step), dropout)
        model.summed_loss(states, tokens_of(step)).backward()
    # The graph of the pass over zeros is that of the model's blocks.
    assert graphs.frame_count == kinds
    assert not counters["graph_break"]
    with torch.no_grad():
        model.eval().forward_blocks(tokens_of(0))
    assert graphs.frame_count == 2 * kinds


def test_each_number_of_rows_has_a_graph_of_its_own_before_the_first_step(graphs):
    """One graph for several could be another in the backward pass that computes it again."""
    model = Decoder(spec_of("llama"), recompute=True)
    model.load_state_dict(dict(initial_parameters(model.spec, 0)))
    compile_or_restore(model, CPU, torch.float32, BlockInputs((3, 2), LENGTH))
    assert graphs.frame_count == 2
    for rows in (2, 3, 2, 3):
        tokens = tokens_of(rows).repeat(2, 1)[:rows]
        model.summed_loss(model.forward_blocks(tokens), tokens).backward()
    assert graphs.frame_count == 2


def planned(compiled: bool = True) -> Plan:
    train = TrainSpec(steps=3, batch=ROWS, seq_len=LENGTH, precision="fp32", compile=compiled)
    return plan_of(spec_of("llama"), train, "cpu")


def losses_of(worker: Executor) -> list[float]:
    """Return the losses of three steps."""
    losses = []
    for step in range(1, 4):
        tokens = tokens_of(step)
        batch = Batch(tokens, tokens)
        outcome = worker.compute_gradients(tokens.numpy(), lambda i, b=batch: b, 1e-3)
        worker.optimizer_step(worker.topology.plan.train.optimizer, 1e-3, step, 1.0)
        losses.append(outcome.loss)
    return losses


def worker_of(plan: Plan) -> Executor:
    worker = Executor(Topology(plan, 0), CPU)
    worker.load_parameters(initial_parameters(plan.model, 0))
    return worker


def test_a_pass_over_zeros_changes_nothing(graphs):
    plan = planned()
    worker = worker_of(plan)
    before = [part.clone() for part in (*worker.state.master, *worker.state.grad)]
    random = torch.get_rng_state()
    inputs = block_inputs(worker.topology)
    assert inputs == BlockInputs((ROWS,), LENGTH)
    assert compile_or_restore(worker.model, CPU, worker.state.dtype, inputs) == ""
    assert torch.equal(random, torch.get_rng_state())
    after = (*worker.state.master, *worker.state.grad)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in worker.model.parameters())
    assert losses_of(worker) == pytest.approx(losses_of(worker_of(planned(False))), rel=1e-6)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_compiler_that_fails_is_warned_of_and_the_numbers_stay(monkeypatch, place):
    def fail(graph, inputs):
        raise OSError(28, "No space left on device")

    backend = fail
    if place == "backward":
        from torch._dynamo.backends.common import aot_autograd

        def plain(graph, inputs):
            return graph

        backend = aot_autograd(fw_compiler=plain, bw_compiler=fail)
    plain_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: plain_compile(f, backend=backend, **how))
    worker = worker_of(planned())
    inputs = block_inputs(worker.topology)
    warning = compile_or_restore(worker.model, CPU, worker.state.dtype, inputs)
    assert warning.startswith("the blocks could not be compiled, and take longer for it: ")
    assert "No space left" in warning
    assert losses_of(worker) == losses_of(worker_of(planned(False)))


def test_compiler_that_fails_later_on_computes_by_operators(monkeypatch):
    """A validation's rows make another graph, which no pass over zeros has tried."""
    made = []

    def fail_second(graph, inputs):
        made.append(graph)
        if len(made) > 1:
            raise RuntimeError("out of registers")
        return graph

    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: plain(f, backend=fail_second, **how))
    model = Decoder(spec_of("gpt2"))
    model.load_state_dict(dict(initial_parameters(model.spec, 0)))
    assert compile_or_restore(model, CPU, torch.float32, BlockInputs((ROWS,), LENGTH)) == ""
    with torch.no_grad():
        states = model.forward_blocks(tokens_of(0)[:1])
        restore_blocks(model)
        assert torch.equal(states, model.forward_blocks(tokens_of(0)[:1]))
    assert len(made) > 1


def test_cpu_without_a_compiler_is_refused_where_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(compiled_blocks.shutil, "which", lambda name: None)
    with pytest.raises(Refusal) as caught:
        compile_or_restore(Decoder(spec_of("gpt2")), CPU, torch.float32, BlockInputs((1,), LENGTH))
    assert caught.value.problem.code == "extra-missing"


def test_device_of_a_plan_decides_before_its_training():
    plan = planned(compiled=True)
    assert runs_compiled(plan, 0)
    eager = replace(plan.devices[0], compile=False)
    assert not runs_compiled(replace(plan, devices=(eager,)), 0)
    automatic = replace(plan, train=replace(plan.train, compile="auto"))
    assert not runs_compiled(automatic, 0)
    chosen: PlannedDevice = replace(plan.devices[0], compile=True)
    assert runs_compiled(replace(automatic, devices=(chosen,)), 0)


def test_blocks_of_a_stage_without_any_compile_nothing(graphs):
    model = Decoder(spec_of("gpt2"), units=(0, 1))
    assert compile_or_restore(model, CPU, torch.float32, BlockInputs((1,), LENGTH)) == ""
    assert graphs.frame_count == 0


def test_compiler_keeps_its_results_where_only_the_user_can_write(monkeypatch, tmp_path):
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path))
    monkeypatch.setenv(compiler.CACHE_VARIABLE, "/elsewhere")
    compiler.keep_compiled_code()
    assert os.environ[compiler.CACHE_VARIABLE] == "/elsewhere"
    monkeypatch.delenv(compiler.CACHE_VARIABLE)
    compiler.keep_compiled_code()
    folder = tmp_path / "compiled"
    assert os.environ.pop(compiler.CACHE_VARIABLE) == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiler.os, "getuid", lambda: 2**20)
    compiler.keep_compiled_code()
    assert compiler.CACHE_VARIABLE not in os.environ


#: Compiles two blocks as a worker does, and prints what the compiler found in its cache.
START = """
from farspan.runtime.compiler import keep_compiled_code
keep_compiled_code()
import torch
from torch._dynamo.utils import counters
from farspan.runtime.model.compiled_blocks import BlockInputs, compile_or_restore
from farspan.runtime.model.decoder import Decoder
from tests import tiny
model = Decoder(tiny.SPEC)
inputs = BlockInputs((1,), 16)
warning = compile_or_restore(model, torch.device("cpu"), torch.float32, inputs)
assert warning == "", warning
made = counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]
print(made, counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_second_start_compiles_nothing(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("the compiler needs g++ on a CPU")
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "FARSPAN_CACHE": str(tmp_path), "PYTHONPATH": root}
    environment.pop(compiler.CACHE_VARIABLE, None)
    answers = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", START],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        answers.append(tuple(map(int, done.stdout.split())))
    assert answers[0][0] > 0 and answers[0][1] == 0
    assert answers[1][0] == 0 and answers[1][1] > 0
    assert list((tmp_path / "compiled").iterdir())


def test_block_of_zeros_has_the_form_of_the_models_own():
    model = Decoder(spec_of("llama"))
    like = compiled_blocks._make_alike(model, 0, CPU, torch.bfloat16)
    first = next(iter(model.blocks))
    assert isinstance(like, Block)
    shapes = {name: value.shape for name, value in first.named_parameters()}
    assert {name: value.shape for name, value in like.named_parameters()} == shapes
    assert {value.dtype for value in like.parameters()} == {torch.bfloat16}
    assert like.attn.policy is first.attn.policy
