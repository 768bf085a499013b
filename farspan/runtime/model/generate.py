"""Text from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from farspan.corpus.tokenizer import Tokenizer
from farspan.runtime.model.compute_dtype import autocast_products
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.model.kv_cache import KVCache


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
    """Generate up to `tokens` tokens after `prompt`, as text; as `sample_tokens`."""
    ids = [tokenizer.end_of_text, *tokenizer.encode(prompt)]
    sampled = sample_tokens(
        model,
        tokenizer,
        ids,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        enough=enough,
    )
    return tokenizer.decode(list(sampled))


@torch.no_grad()
def sample_tokens(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    top_p: float = 1.0,
    enough: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Yield up to `tokens` tokens after a prompt's; stop before the end of text, and when it is
    `enough`. Temperature 0 takes the likeliest.

    The window slides: at most `context` tokens are looked back at. Until then keys and values are
    kept. A window that slides begins with another token each time, and is computed whole.
    """
    device = model.tok.weight.device
    cache = KVCache(model)
    generator = torch.Generator().manual_seed(seed)
    end = tokenizer.end_of_text
    context = model.spec.context
    ids = list(prompt_ids)
    was_training = model.training
    model.eval()
    try:
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
            ids.append(_sample_top(logits_V, temperature, top_k, top_p, generator))
            if ids[-1] == end:
                break
            yield ids[-1]
    finally:
        model.train(was_training)


def _sample_top(
    logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """Return a token of the `top_k` likeliest, and of the fewest whose probabilities come to
    `top_p`."""
    if temperature == 0:
        return int(logits_V.argmax())
    count = min(top_k or len(logits_V), len(logits_V))
    values, indices = logits_V.topk(count)
    p = torch.softmax(values / temperature, dim=-1)
    if top_p < 1:
        # A token is kept where those before it come to less.
        p = torch.where(p.cumsum(-1) - p < top_p, p, 0)
    chosen = torch.multinomial(p, 1, generator=generator)
    return int(indices[chosen])
