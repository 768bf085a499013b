"""Text goes on the same whether keys and values are kept or every window is computed whole."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from farspan.corpus import tokenizer as tokenizers
from farspan.runtime.model.decoder import Decoder, initial_parameters
from farspan.runtime.model.generate import _sample_top, generate
from farspan.runtime.model.kv_cache import KVCache
from tests import tiny

GPT2 = tiny.SPEC
LLAMA = replace(
    GPT2,
    family="llama",
    heads=4,
    kv_heads=2,
    d_ff=96,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tied=False,
    context=48,
)


def model_of(spec) -> Decoder:
    model = Decoder(spec)
    model.load_state_dict(dict(initial_parameters(spec, 3)))
    # Far from uniform, so that what is likeliest is clear.
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
    return model.eval()


@pytest.mark.parametrize("spec", [GPT2, LLAMA])
@pytest.mark.parametrize("parts", [(1,) * 12, (5, 1, 1, 5), (12,)])
def test_states_are_those_of_the_whole_sequence(spec, parts):
    model = model_of(spec)
    tokens = torch.randint(0, 300, (12,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole_SD = model.hidden_states(tokens[None])[0]
    cache = KVCache(model)
    at = 0
    for size in parts:
        state_D = cache.append_tokens(tokens[at : at + size])
        at += size
        assert torch.allclose(state_D, whole_SD[at - 1], atol=1e-5)
    with pytest.raises(ValueError, match="context"):
        cache.append_tokens(torch.zeros(spec.context, dtype=torch.long))


@pytest.mark.parametrize("spec", [GPT2, LLAMA])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (0.8, 50)])
def test_tokens_are_those_of_windows_computed_whole(spec, temperature, top_k):
    """Also past the context, where the window slides."""
    model = model_of(spec)
    tokenizer = tokenizers.train_bpe_tokenizer(["alpha beta gamma delta"] * 50, 300)
    for seed in range(4):
        text = generate(
            model, tokenizer, "beta", tokens=60, temperature=temperature, top_k=top_k, seed=seed
        )
        random = torch.Generator().manual_seed(seed)
        ids = [tokenizer.end_of_text, *tokenizer.encode("beta")]
        first = len(ids)
        while len(ids) < first + 60 and (len(ids) == first or ids[-1] != tokenizer.end_of_text):
            with torch.no_grad():
                state_D = model.hidden_states(torch.tensor([ids[-spec.context :]]))[0, -1]
                logits_V = (model.head_VD @ state_D)[: tokenizer.vocab_size]
            ids.append(_sample_top(logits_V, temperature, top_k, 1.0, random))
        assert text == tokenizer.decode(
            [token for token in ids[first:] if token != tokenizer.end_of_text]
        )


def test_top_p_takes_the_fewest_tokens_that_come_to_it():
    logits_V = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))
    random = torch.Generator().manual_seed(0)

    def sampled(top_p: float) -> set[int]:
        return {_sample_top(logits_V, 1.0, 0, top_p, random) for _ in range(300)}

    assert sampled(0.01) == {1} and sampled(0.4) == {1}
    assert sampled(0.5) == {1, 2} and sampled(0.71) == {1, 2, 3}
    assert sampled(1.0) == {0, 1, 2, 3}
