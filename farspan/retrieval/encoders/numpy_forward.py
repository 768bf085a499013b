"""The forward pass of a BERT-like encoder in numpy, for queries: importing torch alone takes longer
than a search.

Shapes: B texts, S positions, D size of a state, H heads, K size of a head, M of a feed-forward
layer.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from farspan.retrieval.encoders.architecture import Architecture, LinearWeights, Norm, Weights
from farspan.retrieval.encoders.tensors import Floats

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: Added to the scores of padding; its exponential is 0 in 32 bits.
_MASKED = np.float32(-1e9)
#: MPNet's relative positions share buckets by their logarithm up to this distance.
_MAX_RELATIVE_DISTANCE = 128
#: erf(x) = x P(x^2) / Q(x^2) for |x| < 4, by XLA (xla/client/lib/math.cc, ErfImpl32): within 3e-7
#: of erf, the highest power first.
_ERF_LIMIT = np.float32(3.7439211)
_ERF_NUMERATOR = (
    0.00022905065861350646,
    0.0034082910107109506,
    0.050955695062380861,
    0.18520832239976145,
    1.128379143519084,
)
_ERF_DENOMINATOR = (
    -1.1791602954361697e-7,
    0.000023547966471313185,
    0.0010179625278914885,
    0.014070470171167667,
    0.11098505178285362,
    0.49746925110067538,
    1.0,
)


def compute_states(
    weights: Weights, architecture: Architecture, ids_BS: Ids, mask_BS: Mask
) -> Floats:
    """Return the last states (B, S, D) of texts that are padded at their ends; `mask_BS` is true
    where a token is."""
    texts, length = ids_BS.shape
    heads = architecture.heads
    head_size = architecture.d_model // heads
    first = architecture.first_position
    x_BSD = weights.words[ids_BS] + weights.positions[first : first + length]
    x_BSD = _normalize(x_BSD, weights.norm, architecture.eps)

    bias_BHSS: Floats | None = None
    if not mask_BS.all():
        bias_BHSS = np.where(mask_BS, np.float32(0), _MASKED)[:, None, None, :]
    if weights.relative is not None:
        buckets_SS = relative_buckets(length, architecture.relative_buckets)
        relative_HSS = weights.relative[buckets_SS].transpose(2, 0, 1)
        bias_BHSS = relative_HSS if bias_BHSS is None else bias_BHSS + relative_HSS

    def split_heads(states_BSD: Floats) -> Floats:
        return states_BSD.reshape(texts, length, heads, head_size).transpose(0, 2, 1, 3)

    for layer in weights.layers:
        query_BHSK = split_heads(_linear(x_BSD, layer.query))
        key_BHSK = split_heads(_linear(x_BSD, layer.key))
        value_BHSK = split_heads(_linear(x_BSD, layer.value))
        scores_BHSS: Floats = query_BHSK @ key_BHSK.transpose(0, 1, 3, 2)
        scores_BHSS *= np.float32(1 / math.sqrt(head_size))
        if bias_BHSS is not None:
            scores_BHSS += bias_BHSS
        scores_BHSS -= scores_BHSS.max(-1, keepdims=True)
        np.exp(scores_BHSS, out=scores_BHSS)
        scores_BHSS /= scores_BHSS.sum(-1, keepdims=True)
        mixed_BSHK = (scores_BHSS @ value_BHSK).transpose(0, 2, 1, 3)
        mixed_BSD: Floats = mixed_BSHK.reshape(texts, length, architecture.d_model)
        x_BSD = _normalize(
            x_BSD + _linear(mixed_BSD, layer.attention_out), layer.attention_norm, architecture.eps
        )
        wide_BSM = activate(_linear(x_BSD, layer.up), architecture.activation)
        x_BSD = _normalize(x_BSD + _linear(wide_BSM, layer.down), layer.norm, architecture.eps)
    return x_BSD


def _linear(x_BSD: Floats, linear: LinearWeights) -> Floats:
    # One product of two matrices: numpy would make one a text of three dims.
    flat: Floats = x_BSD.reshape(-1, x_BSD.shape[-1]) @ linear.weight.T
    flat += linear.bias
    return flat.reshape(*x_BSD.shape[:-1], -1)


def _normalize(x_BSD: Floats, norm: Norm, eps: float) -> Floats:
    centered_BSD: Floats = x_BSD - x_BSD.mean(-1, keepdims=True)
    variance_BS1 = np.square(centered_BSD).mean(-1, keepdims=True)
    centered_BSD /= np.sqrt(variance_BS1 + np.float32(eps))
    centered_BSD *= norm.scale
    centered_BSD += norm.shift
    return centered_BSD


def activate(x: Floats, name: str) -> Floats:
    """Apply an activation by its name in config.json."""
    if name == "relu":
        return np.maximum(x, 0)
    if name == "gelu":
        return x * (np.float32(0.5) + np.float32(0.5) * erf(x * np.float32(math.sqrt(0.5))))
    # gelu_new and gelu_pytorch_tanh are one function.
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def erf(x: Floats) -> Floats:
    """Return the error function of 32-bit numbers, which numpy lacks."""
    clipped = np.clip(x, -_ERF_LIMIT, _ERF_LIMIT)
    square = clipped * clipped
    return clipped * _polynomial(square, _ERF_NUMERATOR) / _polynomial(square, _ERF_DENOMINATOR)


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += np.float32(coefficient)
    return total


def relative_buckets(length: int, buckets: int) -> npt.NDArray[np.int64]:
    """Return MPNet's bucket (S, S) of each pair of positions: half of them for later ones, and in
    each half the near ones alone and the far ones by their logarithm."""
    positions_S = np.arange(length)
    back_SS = positions_S[:, None] - positions_S[None, :]
    half = buckets // 2
    exact = half // 2
    distance_SS = np.abs(back_SS)
    far_SS = np.log(np.maximum(distance_SS, 1).astype(np.float32) / np.float32(exact))
    far_SS = far_SS / np.float32(math.log(_MAX_RELATIVE_DISTANCE / exact)) * (half - exact)
    bucket_SS = np.minimum(exact + far_SS.astype(np.int64), half - 1)
    bucket_SS = np.where(distance_SS < exact, distance_SS, bucket_SS)
    return np.where(back_SS < 0, bucket_SS + half, bucket_SS)
