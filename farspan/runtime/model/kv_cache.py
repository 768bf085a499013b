"""A decoder that goes on by a few tokens at a time: keys and values of those before are kept, not
computed again.

Shapes as in `decoder.py`; T new positions after P that are kept. Its states are those of the whole
sequence, but for the rounding of sums in another order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.runtime.model.decoder import Block, Decoder, rotary_table, rotate


class KVCache:
    """Keys and values (B, K, P, E) of one sequence for each block of a model that is all here.
    Holds up to the model's context: what comes then has another first token to look back at, and is
    another sequence."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.length = 0
        self._kept = list[tuple[Tensor, Tensor]]()
        spec = model.spec
        weight = model.tok.weight
        shape = 1, spec.kv_heads, spec.context, spec.head_dim
        for _ in model.blocks:
            self._kept.append((weight.new_empty(shape), weight.new_empty(shape)))
        learned = spec.positions == "learned"
        self._rotation = None if learned else rotary_table(spec, spec.context, weight.device)

    @torch.no_grad()
    def append(self, tokens_T: Tensor) -> Tensor:
        """The state (D) after the final norm of the last of these tokens, which follow those that
        are kept. Raises ValueError past the context."""
        model = self._model
        first = self.length
        last = self.length + len(tokens_T)
        if last > model.spec.context:
            raise ValueError(f"{last} positions given, the model's context is {model.spec.context}")
        x_BTD = F.embedding(tokens_T[None], model.tok.weight)
        if model.spec.positions == "learned":
            before = model.spec.extra_positions
            x_BTD = x_BTD + model.pos.weight[before + first : before + last]
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            x_BTD = x_BTD + self._attend(number, block, block.attn_norm(x_BTD), first, last)
            x_BTD = x_BTD + block.mlp(block.mlp_norm(x_BTD))
        self.length = last
        state_D: Tensor = model.norm(x_BTD[0, -1])
        return state_D

    def _attend(self, number: int, block: Block, h_BTD: Tensor, first: int, last: int) -> Tensor:
        attn = block.attn
        (keys, values) = self._kept[number]
        projected = attn.qkv(h_BTD).view(1, last - first, -1, attn.head_dim).transpose(1, 2)
        q, k, v = projected.split([attn.heads, attn.kv_heads, attn.kv_heads], dim=1)
        if self._rotation is not None:
            cos_SE, sin_SE = (table[first:last] for table in self._rotation)
            q = rotate(q, cos_SE, sin_SE)
            k = rotate(k, cos_SE, sin_SE)
        keys[:, :, first:last] = k
        values[:, :, first:last] = v
        # Each new position sees all that are kept, and of the new ones those up to itself.
        seen_TS = torch.ones(last - first, last, dtype=torch.bool, device=q.device).tril(first)
        y_BHTE = F.scaled_dot_product_attention(
            q,
            keys[:, :, :last],
            values[:, :, :last],
            attn_mask=None if last - first == 1 else seen_TS,
            enable_gqa=attn.heads != attn.kv_heads,
        )
        out: Tensor = attn.out(y_BHTE.transpose(1, 2).reshape(1, last - first, -1))
        return out
