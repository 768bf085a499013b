"""A decoder that adds a few tokens at a time: keys and values of those before are kept, not
computed again.

Shapes as in `decoder.py`; T new positions after P that are kept. Its states are those of the whole
sequence, but for the rounding of sums in another order.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.runtime.model.compute_dtype import product_dtype
from farspan.runtime.model.decoder import Attention, Block, Decoder
from farspan.runtime.model.rotary import apply_rotary, layer_rotation
from farspan.semantics.kernel_choice import first_key
from farspan.semantics.tensor_sharding import RESIDUAL


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
        dtype = product_dtype(model)
        #: Of each block.
        self._rotations = list[tuple[Tensor, Tensor] | None]()
        for layer in range(spec.layers):
            keys = weight.new_empty(shape, dtype=dtype)
            self._kept.append((keys, torch.empty_like(keys)))
            self._rotations.append(
                layer_rotation(spec, layer, spec.context, weight.device, weight.dtype)
            )

    @torch.no_grad()
    def append_tokens(self, tokens_T: Tensor) -> Tensor:
        """Return the state (D) after the final norm of the last of these tokens, which follow those
        that are kept. Raises ValueError past the context."""
        model = self._model
        first = self.length
        last = self.length + len(tokens_T)
        if last > model.spec.context:
            raise ValueError(f"{last} positions given, the model's context is {model.spec.context}")
        x_BTD = F.embedding(tokens_T[None], model.tok.weight)
        if model.spec.scaled_embedding:
            x_BTD = x_BTD * math.sqrt(model.spec.d_model)
        if model.spec.positions == "learned":
            before = model.spec.extra_positions
            positions_TD = model.pos.weight[before + first : before + last]
            x_BTD = x_BTD + positions_TD
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            h_BTD = block.normalize(x_BTD, RESIDUAL, "attn_norm", "attn.qkv")
            h_BTD = self._attend(block.attn, layer, h_BTD, first)
            h_BTD = block.normalize(h_BTD, "attn.out", "attn_post_norm", RESIDUAL)
            after_BTD = x_BTD + h_BTD
            mlp_input_BTD = x_BTD if block.is_parallel else after_BTD
            h_BTD = block.normalize(mlp_input_BTD, RESIDUAL, "mlp_norm", "mlp.up")
            h_BTD = block.normalize(block.mlp(h_BTD), "mlp.down", "mlp_post_norm", RESIDUAL)
            x_BTD = after_BTD + h_BTD
        self.length = last
        state_D: Tensor = model.norm(x_BTD[0, -1])
        return state_D

    def _attend(self, attn: Attention, layer: int, h_BTD: Tensor, first: int) -> Tensor:
        keys, values = self._kept[layer]
        rotation = self._rotations[layer]
        T = h_BTD.shape[1]
        last = first + T
        new = slice(first, last)
        projected = attn.normalize_heads(attn.qkv(h_BTD))
        heads_BTHE = projected.view(1, T, -1, attn.head_dim)
        head_counts = [attn.heads, attn.kv_heads, attn.kv_heads]
        q, k, v = heads_BTHE.transpose(1, 2).split(head_counts, dim=1)
        if rotation is not None:
            cos_SR, sin_SR = rotation
            q = apply_rotary(q, cos_SR[new], sin_SR[new])
            k = apply_rotary(k, cos_SR[new], sin_SR[new])
        keys[:, :, new] = k
        values[:, :, new] = v
        start = first_key(first, attn.window)
        seen_TS = None
        if T > 1:
            # Each new position sees all that are kept, and of the new ones those up to itself; or
            # the last ones of these.
            seen_TS = torch.ones(T, last - start, dtype=torch.bool, device=q.device)
            seen_TS = seen_TS.tril(first - start)
            if attn.window is not None:
                seen_TS = seen_TS.triu(first - start - attn.window + 1)
        k = keys[:, :, start:last]
        v = values[:, :, start:last]
        grouped = attn.heads != attn.kv_heads
        if grouped and attn.policy.repeats_keys:
            k = k.repeat_interleave(attn.heads // attn.kv_heads, dim=1)
            v = v.repeat_interleave(attn.heads // attn.kv_heads, dim=1)
            grouped = False
        y_BHTE = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen_TS, enable_gqa=grouped, scale=attn.scale
        )
        y_BTD = y_BHTE.transpose(1, 2).reshape(1, T, -1)
        out: Tensor = attn.out(y_BTD)
        return out
