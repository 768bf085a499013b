"""The forward pass of a BERT-like encoder in torch, for passages.

Texts of nearly one length are a batch; on a CPU each core computes its own batch by one thread.

Shapes: B texts, S positions, T = B S, D size of a state, H heads, K size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.retrieval.cpu_threads import compute_on_threads, one_thread_each
from farspan.retrieval.encoders.architecture import (
    Architecture,
    Layer,
    LinearWeights,
    Norm,
    Weights,
)
from farspan.retrieval.encoders.encoder import Ids
from farspan.retrieval.encoders.numpy_forward import relative_buckets
from farspan.retrieval.encoders.tensors import Floats
from farspan.runtime.device import usable_gpus
from farspan.runtime.native_dtypes import has_native_bf16


class _Product(NamedTuple):
    weight: Tensor
    bias: Tensor


class _Block(NamedTuple):
    qkv: _Product
    out: _Product
    attention_norm: _Product
    up: _Product
    down: _Product
    norm: _Product


class TorchForward:
    """An encoder's weights on a device, products in bf16 where it has instructions for them.

    The residual stream and norms stay in fp32.
    """

    def __init__(self, weights: Weights, architecture: Architecture, device: str = "auto") -> None:
        self._architecture = architecture
        self._device = _choose_device(device)
        self._dtype = _product_dtype(self._device)
        self._words_VD = self._tensor(weights.words)
        self._positions_PD = self._tensor(weights.positions)
        self._norm = self._norm_of(weights.norm)
        self._blocks = [self._block(layer) for layer in weights.layers]
        relative = weights.relative
        self._relative_BH = None if relative is None else self._tensor(relative)

    def states(self, batches: Sequence[Sequence[Ids]]) -> Iterator[Floats]:
        """Yield the last states (B, S, D) of each batch, in order; behind a text's end they mean
        nothing."""
        if self._device.type != "cpu":
            for batch in batches:
                yield self._compute(batch)
            return
        yield from compute_on_threads(self._compute, batches)

    @torch.inference_mode()
    def _compute(self, ids: Sequence[Ids]) -> Floats:
        heads = self._architecture.heads
        eps = self._architecture.eps
        first = self._architecture.first_position
        lengths = [len(text) for text in ids]
        longest = max(lengths)
        tokens_BS = np.zeros((len(ids), longest), np.int64)
        for row, text in enumerate(ids):
            tokens_BS[row, : len(text)] = text
        tokens = torch.from_numpy(tokens_BS).to(self._device)
        x_BSD = F.embedding(tokens, self._words_VD)
        x_BSD = x_BSD + self._positions_PD[first : first + longest]
        size = x_BSD.shape[-1]
        x_BSD = F.layer_norm(x_BSD, (size,), *self._norm, eps)
        mask = self._mask(lengths)
        for block in self._blocks:
            qkv = F.linear(x_BSD.to(self._dtype), *block.qkv)
            query, key, value = qkv.view(len(ids), longest, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed_BHSK = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            mixed_BSD = mixed_BHSK.transpose(1, 2).reshape(len(ids), longest, size)
            x_BSD = x_BSD + F.linear(mixed_BSD, *block.out)
            x_BSD = F.layer_norm(x_BSD, (size,), *block.attention_norm, eps)
            wide = self._activate(F.linear(x_BSD.to(self._dtype), *block.up))
            x_BSD = x_BSD + F.linear(wide, *block.down)
            x_BSD = F.layer_norm(x_BSD, (size,), *block.norm, eps)
        return x_BSD.float().cpu().numpy()

    def _mask(self, lengths: Sequence[int]) -> Tensor | None:
        """Return the bias of scores: None for texts of one length."""
        longest = max(lengths)
        mask: Tensor | None = None
        if min(lengths) < longest:
            positions = torch.arange(longest)
            is_padding = positions >= torch.tensor(lengths)[:, None]
            mask = torch.zeros(is_padding.shape).masked_fill(is_padding, -torch.inf)
            mask = mask[:, None, None, :].to(self._device, self._dtype)
        if self._relative_BH is None:
            return mask
        buckets = torch.from_numpy(relative_buckets(longest, self._architecture.relative_buckets))
        relative = self._relative_BH[buckets.to(self._device)].permute(2, 0, 1)[None]
        relative = relative.to(self._dtype)
        return relative if mask is None else relative + mask

    def _activate(self, x: Tensor) -> Tensor:
        name = self._architecture.activation
        if name == "relu":
            return F.relu(x)
        return F.gelu(x, approximate="none" if name == "gelu" else "tanh")

    def _tensor(self, array: Floats) -> Tensor:
        # A copy: torch warns of arrays that cannot be written, as those of a mapped file.
        return torch.from_numpy(np.array(array, np.float32)).to(self._device)

    def _block(self, layer: Layer) -> _Block:
        qkv = self._product(layer.query, layer.key, layer.value)
        out = self._product(layer.attention_out)
        attention_norm = self._norm_of(layer.attention_norm)
        up = self._product(layer.up)
        down = self._product(layer.down)
        return _Block(qkv, out, attention_norm, up, down, self._norm_of(layer.norm))

    def _product(self, *linears: LinearWeights) -> _Product:
        weight = np.concatenate([linear.weight for linear in linears])
        bias = np.concatenate([linear.bias for linear in linears])
        return _Product(self._tensor(weight).to(self._dtype), self._tensor(bias).to(self._dtype))

    def _norm_of(self, norm: Norm) -> _Product:
        return _Product(self._tensor(norm.scale), self._tensor(norm.shift))


def sum_bags(rows_FE: Floats, columns: Ids, starts_N: Ids) -> Floats:
    """Return the sums (N, E) of a matrix's rows; bag n is `columns` from `starts_N[n]` on."""
    flat = torch.from_numpy(columns)
    starts = torch.from_numpy(starts_N)
    with one_thread_each():
        sums_NE = F.embedding_bag(flat, torch.from_numpy(rows_FE), starts, mode="sum")
    return sums_NE.numpy()


def _choose_device(device: str) -> torch.device:
    """Return the device that is asked for; `auto` is a GPU that can be opened, or the CPU."""
    gpus = usable_gpus()
    if device in ("auto", "cuda") and gpus:
        return torch.device("cuda", gpus[0])
    return torch.device("cpu" if device == "auto" else device)


def _product_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 where the device multiplies in it: with AVX-512's instructions twice as fast as
    fp32."""
    if device.type == "cuda":
        return torch.bfloat16 if has_native_bf16(device) else torch.float32
    if device.type == "cpu" and torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32
