"""Vectors of tokens from the passages that they share: tokens that stand with the same others lie
near.

Positive pointwise mutual information of tokens in passages, and its leading directions (Bullinaria
and Levy 2007; Levy and Goldberg 2014):

    M_tu = max(0, log(N n_tu / (n_t n_u)))        n_t passages of N have token t, n_tu have both

Shapes: V tokens, T tokens that count, N passages, E size of a vector.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

#: The most frequent tokens count, so that M fits into memory: 256 MiB.
MAX_FREQUENT_TOKENS = 8192
#: Passages that a token must be in.
_LEAST = 2
#: Of subspace iteration, which finds the leading directions of a symmetric matrix (Halko et al.,
#: arXiv 0909.4061).
_ROUNDS = 4
#: A row this short is rounding, of a token that says nothing of others.
_ROUNDING = 1e-3


def cooccurrence_vectors(
    bags: Sequence[Sequence[int]], vocab_size: int, size: int, seed: int
) -> Tensor:
    """Return unit vectors (V, E) of tokens, from the distinct tokens of each passage; zeros for a
    token that is too rare."""
    vectors_VE = torch.zeros(vocab_size, size)
    tokens = torch.tensor(list(itertools.chain.from_iterable(bags)), dtype=torch.long)
    counts_V = torch.bincount(tokens, minlength=vocab_size)
    frequent_T = counts_V.argsort(descending=True, stable=True)[:MAX_FREQUENT_TOKENS]
    frequent_T = frequent_T[counts_V[frequent_T] >= _LEAST]
    if not len(frequent_T):
        return vectors_VE
    generator = torch.Generator().manual_seed(seed)
    rank = min(size, len(frequent_T))
    basis_TE = torch.randn(len(frequent_T), rank, generator=generator)
    information_TT = _mutual_information(tokens, bags, frequent_T, counts_V)
    for _ in range(_ROUNDS):
        basis_TE = torch.linalg.qr(information_TT @ basis_TE)[0]
    values_E, turn_EE = torch.linalg.eigh(basis_TE.T @ information_TT @ basis_TE)
    vectors_VE[frequent_T, :rank] = F.normalize(
        basis_TE @ turn_EE * values_E.abs().sqrt(), dim=1, eps=_ROUNDING
    )
    return vectors_VE


def _mutual_information(
    tokens: Tensor, bags: Sequence[Sequence[int]], frequent_T: Tensor, counts_V: Tensor
) -> Tensor:
    """M (T, T), with zeros on the diagonal."""
    place_V = torch.full((len(counts_V),), -1)
    place_V[frequent_T] = torch.arange(len(frequent_T))
    passages = torch.arange(len(bags)).repeat_interleave(torch.tensor([len(bag) for bag in bags]))
    kept = place_V[tokens] >= 0
    pairs = torch.stack([place_V[tokens[kept]], passages[kept]])
    with warnings.catch_warnings():  # PyTorch warns that products of sparse matrices may change.
        warnings.simplefilter("ignore")
        has_TN = torch.sparse_coo_tensor(
            pairs, torch.ones(pairs.shape[1]), (len(frequent_T), len(bags))
        )
        shared_TT = torch.sparse.mm(has_TN, has_TN.t()).to_dense()
    counts_T = counts_V[frequent_T].float()
    shared_TT.fill_diagonal_(0).mul_(len(bags)).div_(counts_T[:, None]).div_(counts_T)
    return shared_TT.clamp_(min=1).log_()
