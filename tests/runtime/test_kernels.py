"""Hand-written backward passes against autograd through the textbook formulas, in double
precision."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from farspan.runtime.model import decoder, kernels
from farspan.runtime.model.decoder import vanilla_attention


def _grads(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.randn(
        output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1)
    )
    return list(torch.autograd.grad((output * weights).sum(), inputs))


@given(
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    repeat=st.integers(1, 3),
    length=st.integers(1, 150),
    size=st.integers(1, 9),
    seed=st.integers(0, 2**20),
)
def test_matrix_attention_equals_the_textbook(rows, kv_heads, repeat, length, size, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (rows, kv_heads * repeat, length, size),
        (rows, kv_heads, length, size),
        (rows, kv_heads, length, size),
    ]
    inputs = [
        torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes
    ]
    ours = kernels.MatrixAttention.apply(*inputs)
    reference = vanilla_attention(*inputs)
    # The textbook version takes its softmax in fp32, so this bound is fp32's.
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(_grads(ours, inputs), _grads(reference, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@given(
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    repeat=st.integers(1, 3),
    length=st.integers(1, 150),
    window=st.integers(1, 160),
    scale=st.sampled_from([None, 0.3]),
    in_memory=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_attention_with_a_window_equals_the_textbook(
    rows, kv_heads, repeat, length, window, scale, in_memory, seed
):
    """With its scores in memory, and by the kernels that keep none."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(
            (rows, heads, length, 4), dtype=torch.float64, generator=generator, requires_grad=True
        )
        for heads in (kv_heads * repeat, kv_heads, kv_heads)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "keeps_scores", lambda *given: in_memory)
        ours = kernels.causal_attention(*inputs, window=window, scale=scale)
    reference = vanilla_attention(*inputs, window, scale)
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(_grads(ours, inputs), _grads(reference, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_matrix_attention_equals_sdpa_in_float64():
    inputs = [torch.randn(2, 3, 33, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    ours = kernels.MatrixAttention.apply(*inputs)
    reference = F.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(_grads(ours, inputs), _grads(reference, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk_bytes", [64, 4096, 2**26])
def test_head_loss_equals_cross_entropy_however_it_is_chunked(monkeypatch, chunk_bytes):
    monkeypatch.setattr(kernels, "LOGITS_CHUNK_BYTES", chunk_bytes)
    x = torch.randn(37, 12, requires_grad=True)
    weight = torch.randn(50, 12, requires_grad=True)
    targets = torch.randint(-1, 50, (37,))
    ours = kernels.head_cross_entropy(x, weight, targets) / 7
    reference = F.cross_entropy(x @ weight.T, targets, ignore_index=-1, reduction="sum") / 7
    torch.testing.assert_close(ours, reference)
    for mine, theirs in zip(
        torch.autograd.grad(ours, [x, weight]),
        torch.autograd.grad(reference, [x, weight]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_head_loss_in_bf16_stays_within_bf16_of_fp32():
    x = torch.randn(256, 64)
    weight = torch.randn(1000, 64) * 0.1
    targets = torch.randint(0, 1000, (256,))
    exact = F.cross_entropy(x @ weight.T, targets, reduction="sum")
    ours = kernels.head_cross_entropy(x.bfloat16(), weight.bfloat16(), targets)
    assert ours.dtype == torch.float32
    assert abs(float(ours - exact)) / float(exact) < 2**-8


def test_head_loss_makes_gradients_only_where_they_are_asked_for(monkeypatch):
    x = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(11, 4, requires_grad=True)
    products = []
    plain = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *given, **more: products.append(given) or plain(*given, **more)
    )
    with torch.no_grad():
        validated = kernels.head_cross_entropy(x, weight, torch.arange(6))
    assert len(products) == 1 and not validated.requires_grad
    assert (
        float(kernels.head_cross_entropy(x, weight, torch.arange(6))) == float(validated)
        and len(products) == 4
    )


def test_head_loss_of_uniform_logits_is_log_v():
    loss = kernels.head_cross_entropy(
        torch.zeros(5, 4), torch.randn(11, 4), torch.tensor([0, 3, -1, 10, 5])
    )
    assert float(loss) == pytest.approx(4 * math.log(11))


def test_head_loss_with_nothing_to_predict_is_zero():
    x = torch.randn(3, 4, requires_grad=True)
    loss = kernels.head_cross_entropy(x, torch.randn(11, 4), torch.tensor([-1, -1, -1]))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not x.grad.any()


def test_a_head_with_rows_of_zeros_behind_it_is_the_same_head(monkeypatch):
    """As it is multiplied on a GPU, over several chunks, of which one has a target to skip."""
    x = torch.randn(300, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(77, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(77, (300,))
    targets[5] = -1
    monkeypatch.setattr(kernels, "LOGITS_CHUNK_BYTES", 80 * 77 * 8)
    alone = kernels.head_cross_entropy(x, weight, targets)
    alone_grads = torch.autograd.grad(alone, [x, weight])
    monkeypatch.setattr(kernels, "_pad_vocabulary", lambda V, device: 128)
    padded = kernels.head_cross_entropy(x, weight, targets)
    padded_grads = torch.autograd.grad(padded, [x, weight])
    torch.testing.assert_close(padded, alone, rtol=1e-12, atol=0)
    for ours, reference in zip(padded_grads, alone_grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_lookups_that_are_divided_are_the_same(monkeypatch):
    """Between 1,024 and 3,072 tokens, where a GPU's kernel of the gradient is unsafe."""
    generator = torch.Generator().manual_seed(0)
    for tokens, lookups in (((4, 256), 1), ((5, 256), 2), ((12, 256), 3), ((13, 256), 1)):
        tokens_BS = torch.randint(50, tokens, generator=generator)
        gradient_BSD = torch.randn(*tokens, 8, generator=generator)
        gradients = {}
        for device in ("cuda", "cpu"):
            monkeypatch.setattr(decoder, "UNSAFE_LOOKUP_DEVICES", frozenset({device}))
            table_VD = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
            table_VD.requires_grad_()
            x_BSD = decoder.embed_tokens(tokens_BS, table_VD)
            assert torch.equal(x_BSD, table_VD[tokens_BS])
            x_BSD.backward(gradient_BSD)
            gradients[device] = table_VD.grad
            divided = "View" in str(x_BSD.grad_fn)
            assert divided == (lookups > 1 and device == "cpu")
        torch.testing.assert_close(gradients["cpu"], gradients["cuda"])
