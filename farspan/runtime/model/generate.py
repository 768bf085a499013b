"""Text from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from farspan.corpus.tokenizer import Tokenizer
from farspan.runtime.model.compute_dtype import autocast_products
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.model.kv_cache import KVCache


@torch.no_grad()
def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    enough: Callable[[], bool] = lambda: False,
) -> str:
    """Up to `tokens` tokens after `prompt`, as text; stops at end of text, and when it is `enough`.
    Temperature 0 takes the likeliest.

    The window slides: at most `context` tokens are looked back at. Until then keys and values are
    kept. A window that slides begins with another token each time, and is computed whole.
    """
    device = model.tok.weight.device
    cache = KVCache(model)
    generator = torch.Generator().manual_seed(seed)
    end = tokenizer.end_of_text
    context = model.spec.context
    ids = [end, *tokenizer.encode(prompt)]
    first = len(ids)
    was_training = model.training
    model.eval()
    for _ in range(tokens):
        if enough():
            break
        with autocast_products(model):
            if len(ids) <= context:
                state_D = cache.append_tokens(torch.tensor(ids[cache.length :], device=device))
            else:
                window_BS = torch.tensor([ids[-context:]], device=device)
                state_D = model.hidden_states(window_BS)[0, -1]
        logits_V = (model.head_VD @ state_D).float().cpu()
        logits_V = logits_V[: tokenizer.vocab_size]
        ids.append(_sample_top_k(logits_V, temperature, top_k, generator))
        if ids[-1] == end:
            break
    model.train(was_training)
    return tokenizer.decode([i for i in ids[first:] if i != end])


def _sample_top_k(
    logits_V: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    count = min(top_k or len(logits_V), len(logits_V))
    values, indices = logits_V.topk(count)
    p = torch.softmax(values / temperature, dim=-1)
    chosen = torch.multinomial(p, 1, generator=generator)
    return int(indices[chosen])
