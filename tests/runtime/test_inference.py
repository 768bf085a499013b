"""A trained model on a GPU: in which dtype it is used, and where it stays on the CPU instead."""

from __future__ import annotations

import copy

import pytest
import torch

from farspan.domain.problems import Refusal
from farspan.planning.size import shape_for
from farspan.retrieval.pooling import pool_batch
from farspan.runtime import inference
from farspan.runtime.inference import Trained, on_device, on_gpu
from farspan.runtime.model.attention_policy import AttentionPolicy
from farspan.runtime.model.compute_dtype import autocast_products, halve_matrices
from farspan.runtime.model.decoder import Decoder, initialize_model
from farspan.runtime.model.generate import generate
from farspan.runtime.model.kernel_selection import set_attention
from farspan.runtime.model.kv_cache import KVCache
from tests.retrieval.making import TOKENIZER
from tests.runtime.cards import A100, GB, H100, T4, pose_as_card


def trained(precision="fp32", *, kv_heads: int | None = None) -> Trained:
    knobs = {} if kv_heads is None else {"kv_heads": kv_heads}
    spec = shape_for("llama", 200_000, vocab_size=TOKENIZER.vocab_size, context=32, knobs=knobs)
    model = Decoder(spec).eval()
    initialize_model(model, 0)
    return Trained(model, TOKENIZER, 7, "w", precision)


def stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would move the model to a card that is not there leaves it where it is."""
    monkeypatch.setattr(Decoder, "to", lambda self, *place: self)


@pytest.mark.parametrize(
    ("card", "precision", "dtype"),
    [
        (A100, "fp32", torch.bfloat16),
        (T4, "fp16", torch.float16),
        (T4, "fp32", torch.float32),
    ],
)
def test_a_model_on_a_gpu_has_its_matrices_in_sixteen_bits_and_the_rest_in_fp32(
    monkeypatch, card, precision, dtype
):
    pose_as_card(monkeypatch, card)
    stay_on_the_cpu(monkeypatch)
    for moved in (on_device(trained(precision), "cuda"), on_gpu(trained(precision))):
        model = moved.model
        assert {block.attn.qkv.weight.dtype for block in model.blocks} == {dtype}
        assert {block.mlp.down.weight.dtype for block in model.blocks} == {dtype}
        assert model.tok.weight.dtype == model.norm.weight.dtype == torch.float32
        assert {block.attn_norm.weight.dtype for block in model.blocks} == {torch.float32}
        assert (moved.step, moved.weights) == (7, "w")


def test_texts_of_many_lengths_are_not_planned_for_one_by_one(monkeypatch):
    pose_as_card(monkeypatch, H100)
    stay_on_the_cpu(monkeypatch)
    policies = {block.attn.policy for block in on_gpu(trained()).model.blocks}
    (policy,) = policies
    assert policy.backends == () and policy.reason


def test_without_a_gpu_a_model_stays_as_it_is():
    before = trained()
    after = on_gpu(before)
    assert after is before
    for parameter in after.model.parameters():
        assert parameter.dtype == torch.float32 and parameter.device.type == "cpu"
    assert not autocast_products(after.model)._enabled


def test_a_gpu_without_memory_for_the_model_leaves_it_on_the_cpu_and_says_so(monkeypatch):
    pose_as_card(monkeypatch, A100, free=GB // 2)
    notes = list[str]()
    for used in (on_gpu(trained(), notes.append), on_device(trained(), "auto", notes.append)):
        assert used.model.blocks[0].attn.qkv.weight.dtype == torch.float32
    assert len(notes) == 2
    assert "no memory for the model" in notes[0] and "on the CPU" in notes[0]
    with pytest.raises(Refusal) as caught:
        on_device(trained(), "cuda")
    assert caught.value.problem.code == "out-of-memory"
    assert "--device cpu" in caught.value.problem.remedy


def test_a_gpu_that_another_program_holds_leaves_the_model_on_the_cpu_too(monkeypatch):
    pose_as_card(monkeypatch, A100, failure="CUDA error: all devices are busy or unavailable")
    notes = list[str]()
    on_gpu(trained(), notes.append)
    assert "another program holds it" in notes[0]
    with pytest.raises(Refusal, match="device-busy"):
        on_device(trained(), "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_and_their_sums_stay_in_fp32(dtype):
    model = trained().model
    halve_matrices(model, dtype)
    tokens = torch.randint(TOKENIZER.vocab_size, (2, 9))
    with torch.no_grad(), autocast_products(model):
        streams = list(model.residual_streams(tokens))
        assert {stream.dtype for stream in streams} == {torch.float32}
        assert model.blocks[0].attn.qkv(streams[0]).dtype == dtype
        assert model.norm(streams[-1]).dtype == torch.float32
    pooled = pool_batch(model, torch.ones(TOKENIZER.vocab_size), 0, [tokens[0], tokens[1, :4]])
    assert pooled.dtype == torch.float32 and pooled.isfinite().all()


def test_text_is_written_in_sixteen_bits_as_in_fp32_but_for_rounding():
    full = trained(kv_heads=1).model
    half = copy.deepcopy(full)
    halve_matrices(half, torch.bfloat16)
    ids = torch.randint(TOKENIZER.vocab_size, (12,))
    states = []
    for model in (full, half):
        cache = KVCache(model)
        with autocast_products(model):
            for part in ids.split([5, 1, 6]):
                state = cache.append_tokens(part)
        states.append(state)
    assert states[1].dtype == torch.float32
    torch.testing.assert_close(states[1], states[0], rtol=0.05, atol=0.05)
    text = generate(half, TOKENIZER, "socket", tokens=40, temperature=0, top_k=1, seed=0)
    assert isinstance(text, str)


def test_kept_keys_are_repeated_where_no_kernel_takes_grouped_queries():
    model = trained(kv_heads=1).model
    ids = torch.randint(TOKENIZER.vocab_size, (9,))
    plain = KVCache(model).append_tokens(ids)
    set_attention(model, AttentionPolicy((), True, "memory-efficient", "old"))
    torch.testing.assert_close(KVCache(model).append_tokens(ids), plain)


def test_the_room_beside_the_weights_is_counted(monkeypatch):
    pose_as_card(monkeypatch, A100, free=inference.STATES_BYTES)
    with pytest.raises(Refusal, match="out-of-memory"):
        on_device(trained(), "cuda")
