"""Kernels by device: the loss and attention equal PyTorch's, launch little, and never end a run."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from farspan import models
from farspan.planning.size import shape_for
from farspan.runtime.model import fused_loss, kernel_selection, kernels
from farspan.runtime.model.attention_policy import (
    CUDNN_FIRST,
    AttentionPolicy,
    attention_policy,
)
from farspan.runtime.model.decoder import Decoder, initialize_model
from farspan.runtime.model.kernel_selection import select_kernels
from farspan.runtime.model.rotary import apply_rotary, rotary_table
from farspan.semantics.kernel_choice import fused_logits_rows
from tests.runtime.launches import FUSED_KERNELS, LaunchCounter, pose_as_gpu
from tests.waiting import LIMIT_S


def padded_as_on_a_gpu(monkeypatch, rows: int) -> None:
    monkeypatch.setattr(kernels, "_pad_vocabulary", lambda V, device: -(-V // 64) * 64)
    monkeypatch.setattr(kernels, "fused_logits_rows", lambda width, size, memory: rows)


@pytest.mark.parametrize("seed", range(20))
def test_fused_loss_and_its_gradients_are_those_of_float64(monkeypatch, seed):
    """Over several chunks, the last of which is short, with columns of padding and with targets
    to skip."""
    random = torch.Generator().manual_seed(seed)
    N, D, V = (int(torch.randint(2, most, (), generator=random)) for most in (300, 40, 500))
    padded_as_on_a_gpu(monkeypatch, int(torch.randint(1, N + 50, (), generator=random)))
    x = torch.randn(N, D, dtype=torch.float64, generator=random).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64, generator=random).requires_grad_()
    targets = torch.randint(-1, V, (N,), generator=random)
    fused = fused_loss.cross_entropy_and_gradient_
    ours = kernels.head_cross_entropy(x, weight, targets, None, fused)
    exact = F.cross_entropy(x @ weight.T, targets, ignore_index=-1, reduction="sum")
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    for mine, reference in zip(
        torch.autograd.grad(ours * 3, [x, weight]),
        torch.autograd.grad(exact * 3, [x, weight]),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_loss_rounds_as_the_operators_do(monkeypatch, dtype):
    padded_as_on_a_gpu(monkeypatch, 256)
    x = torch.randn(600, 64).to(dtype).requires_grad_()
    weight = (torch.randn(777, 64) * 0.1).to(dtype).requires_grad_()
    targets = torch.randint(-1, 777, (600,))
    results = []
    for fused in (None, fused_loss.cross_entropy_and_gradient_):
        loss = kernels.head_cross_entropy(x, weight, targets, None, fused)
        results.append([loss, *torch.autograd.grad(loss, [x, weight])])
    for ours, operators in zip(*results, strict=True):
        assert ours.dtype == operators.dtype
        torch.testing.assert_close(ours, operators, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_seen_in_the_loss(bad):
    logits = torch.zeros(3, 8)
    logits[1, 2] = bad
    assert not fused_loss.cross_entropy_and_gradient_(logits, torch.tensor([0, 1, 2]), 7).isfinite()


def test_fused_loss_makes_no_gradients_in_validation(monkeypatch):
    padded_as_on_a_gpu(monkeypatch, 4)
    x = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(11, 4, requires_grad=True)
    products = []
    plain = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **b: products.append(a) or plain(*a, **b))
    with torch.no_grad():
        loss = kernels.head_cross_entropy(
            x, weight, torch.arange(6), None, fused_loss.cross_entropy_and_gradient_
        )
    assert len(products) == 2 and not loss.requires_grad


@pytest.mark.parametrize(
    ("vocabulary", "memory", "rows"),
    [
        (50_304, 141e9, 4096),
        (50_304, 16e9, 4096),
        (50_304, 8e9, 2304),
        (152_064, 16e9, 1536),
        (152_064, 1e9, 256),
        (512, 1e9, 4096),
    ],
)
def test_chunks_of_logits_fill_tiles_and_fit_the_card(vocabulary, memory, rows):
    assert fused_logits_rows(vocabulary, 2, memory) == rows
    assert rows % 256 == 0


def count_head(monkeypatch, preset: str, tokens: int, *, fused: bool) -> tuple[int, float]:
    """Return a head's launches, forward and backward, and its bytes beside the products for each
    logit."""
    pose_as_gpu(monkeypatch)
    spec = models.presets()[preset].spec
    x = torch.empty(tokens, spec.d_model, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(
        spec.vocab_size, spec.d_model, dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    given = torch.ones((), device="meta")
    with LaunchCounter() as counter:
        loss = kernels.head_cross_entropy(
            x, weight, targets, None, counter.fused_loss if fused else None
        )
        loss.backward(given)
    return counter.count, counter.bytes_beside_products / (tokens * spec.vocab_size)


def test_head_of_gpt2_medium_takes_few_launches_and_bytes(monkeypatch):
    launches, size = count_head(monkeypatch, "gpt2-medium", 16 * 1024, fused=True)
    assert launches <= 40
    assert size <= 10
    # What the operators take shows that the count sees them.
    launches, size = count_head(monkeypatch, "gpt2-medium", 16 * 1024, fused=False)
    assert launches > 300
    assert size > 30


@pytest.mark.slow
def test_compiler_makes_few_kernels_of_the_loss_and_the_same_numbers():
    if shutil.which("g++") is None:
        pytest.skip("the compiler needs g++ on a CPU")
    from torch._inductor import metrics

    metrics.reset()
    compiled = torch.compile(fused_loss.cross_entropy_and_gradient_, fullgraph=True)
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (64, 50):
            ours = torch.randn(rows, 1024).to(dtype)
            reference = ours.clone()
            targets = torch.randint(-1, 1000, (rows,))
            loss = compiled(ours, targets, 1000)
            expected = fused_loss.cross_entropy_and_gradient_(reference, targets, 1000)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-4)
            torch.testing.assert_close(ours, reference)
            if rows == 64 and dtype == torch.bfloat16:
                assert metrics.generated_kernel_count <= FUSED_KERNELS


def test_a_cpu_never_imports_the_compiler():
    program = (
        "import sys, torch\n"
        "from farspan.runtime.model.fused_loss import choose_loss\n"
        "assert choose_loss(torch.device('cpu'), torch.float32) == (None, '')\n"
        "assert not {'torch._dynamo', 'torch._inductor'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("capability", "cuda", "triton", "obstacle"),
    [
        ((9, 0), "13.0", True, ""),
        ((7, 0), "12.6", True, ""),
        ((6, 1), "12.6", True, "compute capability 6.1"),
        ((9, 0), "13.0", False, "Triton"),
        ((9, 4), None, True, ""),  # ROCm.
    ],
)
def test_loss_is_compiled_where_the_card_and_the_compiler_allow_it(
    monkeypatch, capability, cuda, triton, obstacle
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
    found = fused_loss.find_obstacle(torch.device("cuda"))
    assert (obstacle in found) if obstacle else found == ""


@pytest.mark.parametrize(
    ("capability", "dtype", "backends", "repeats_keys"),
    [
        ((9, 0), torch.bfloat16, CUDNN_FIRST, False),
        ((9, 0), torch.float16, CUDNN_FIRST, False),
        ((9, 0), torch.float32, (), True),
        ((8, 0), torch.bfloat16, (), False),
        ((8, 9), torch.float16, (), False),
        ((12, 0), torch.bfloat16, (), False),
        ((7, 5), torch.float16, (), True),
        ((7, 0), torch.float32, (), True),
    ],
)
def test_attention_takes_the_fast_kernel_of_each_card(
    monkeypatch, capability, dtype, backends, repeats_keys
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = attention_policy(torch.device("cuda"), dtype)
    assert found.backends == backends
    assert found.repeats_keys == repeats_keys
    assert found.kernel and found.reason


@pytest.mark.parametrize("backends", [(), tuple(CUDNN_FIRST)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_with_repeated_keys_equals_grouped_queries(backends, kv_heads):
    q = torch.randn(2, 4, 2000, 8, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 2000, 8, requires_grad=True) for _ in "kv")
    policy = AttentionPolicy(backends, True, "", "")
    ours = kernels.causal_attention(q, k, v, policy)
    reference = kernels.causal_attention(q, k, v)
    torch.testing.assert_close(ours, reference)
    for mine, other in zip(
        torch.autograd.grad(ours.sum(), [q, k, v]),
        torch.autograd.grad(reference.sum(), [q, k, v]),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_a_model_computes_as_its_device_was_selected_for(monkeypatch):
    fused = fused_loss.cross_entropy_and_gradient_
    monkeypatch.setattr(kernel_selection, "choose_loss", lambda device, dtype: (fused, "slower"))
    spec = shape_for("llama", 100_000, vocab_size=300, context=32, knobs={})
    plain, chosen = Decoder(spec), Decoder(spec)
    initialize_model(plain, 0)
    chosen.load_state_dict(plain.state_dict())
    warning = select_kernels(chosen, torch.device("cpu"), torch.float32)
    assert warning == "slower" and chosen.fused_loss is fused
    tokens = torch.randint(300, (3, 32))
    losses = [model.loss(tokens, tokens) for model in (plain, chosen)]
    torch.testing.assert_close(*losses)
    for ours, reference in zip(
        torch.autograd.grad(losses[1], list(chosen.parameters())),
        torch.autograd.grad(losses[0], list(plain.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_a_stage_without_a_head_compiles_no_loss(monkeypatch):
    def fail(device: torch.device, dtype: torch.dtype) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(kernel_selection, "choose_loss", fail)
    spec = shape_for("llama", 100_000, vocab_size=300, context=32, knobs={})
    assert select_kernels(Decoder(spec, units=(0, 2)), torch.device("cpu"), torch.float32) == ""


def test_a_compiler_that_fails_is_warned_of_and_done_without(monkeypatch):
    def fail(device: torch.device, dtype: torch.dtype) -> None:
        raise RuntimeError("ptxas exited with code 255\nmore")

    monkeypatch.setattr(fused_loss, "find_obstacle", lambda device: "")
    monkeypatch.setattr(fused_loss, "compile_loss", fail)
    chosen, warning = fused_loss.choose_loss(torch.device("cuda"), torch.float16)
    assert chosen is None
    assert "ptxas exited with code 255" in warning and "more" not in warning


def test_queries_and_keys_turned_together_are_those_turned_apart():
    spec = shape_for("llama", 100_000, vocab_size=300, context=32, knobs={})
    table = rotary_table(spec, 32, torch.device("cpu"), torch.float32)
    heads = torch.randn(2, 6, 32, spec.head_dim, requires_grad=True)
    together = apply_rotary(heads, *table)
    apart = torch.cat([apply_rotary(part, *table) for part in heads.split([4, 2], dim=1)], dim=1)
    assert torch.equal(together, apart)
    weights = torch.randn_like(together)
    gradients = [
        torch.autograd.grad((turned * weights).sum(), heads)[0] for turned in (together, apart)
    ]
    assert torch.equal(*gradients)


def test_rotary_table_made_in_inference_mode_serves_training():
    rotary_table.cache_clear()
    spec = shape_for("llama", 100_000, vocab_size=300, context=32, knobs={})
    model = Decoder(spec)
    initialize_model(model, 0)
    tokens = torch.randint(300, (2, 32))
    with torch.inference_mode():
        model(tokens)
    model.loss(tokens, tokens).backward()
