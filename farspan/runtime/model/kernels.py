"""Attention and the loss, written for how a training step spends its time; exact, with hand-written
backward passes.

Shapes: B rows, S positions, H heads, K kv heads, G = B K groups, R = H / K query heads a kv head, E
head size, N = B S tokens, D d_model, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import cross_entropy

from farspan.runtime.model.attention_policy import DEFAULT_POLICY, AttentionPolicy
from farspan.runtime.model.fused_loss import FusedLoss
from farspan.semantics.kernel_choice import (
    LOGITS_CHUNK_BYTES,
    first_key,
    fused_logits_rows,
    keeps_scores,
    padded_vocabulary,
    query_blocks,
)


@functools.lru_cache(maxsize=8)
def _future_mask(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (S, S): 0 up to each position, -inf after it."""
    mask_SS = torch.full((length, length), float("-inf"), dtype=dtype, device=device)
    return mask_SS.triu_(1)


def _make_window_mask(
    length: int, before: int, window: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return (S, before + S): 0 for the last `window` keys up to each query, -inf for others.
    `before` keys come before the first query."""
    visible = torch.ones(length, before + length, dtype=torch.bool, device=device)
    visible = visible.tril(before).triu(before - window + 1)
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))


_window_mask = functools.lru_cache(maxsize=8)(_make_window_mask)


class MatrixAttention(torch.autograd.Function):
    """Causal attention by batched matrix products, a block of queries at a time with the keys up to
    the last of them: what lies in the future of all of them is never computed. Keeps the
    probabilities for the backward pass.

    q (B, H, S, E), k and v (B, K, S, E) -> (B, H, S, E). Equations as in arXiv 1706.03762, section
    3.2.1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        B, H, S, E = q.shape
        K = k.shape[1]
        G = B * K
        q_GRSE = q.reshape(G, H // K, S, E)
        k_GSE = k.reshape(G, S, E)
        v_GSE = v.reshape(G, S, E)
        y_GRSE = torch.empty_like(q_GRSE)
        kept = []
        scale = 1 / math.sqrt(E) if scale is None else scale
        for part in query_blocks(S, q.element_size()):
            keys = slice(first_key(part.start, window), part.stop)
            num_keys = keys.stop - keys.start
            T = part.stop - part.start
            queries_GTE = q_GRSE[:, :, part].reshape(G, -1, E)
            scores = torch.bmm(queries_GTE, k_GSE[:, keys].transpose(1, 2))
            scores = scores.view(B * H, T, num_keys).mul_(scale)
            if window is None:
                scores[:, :, part].add_(_future_mask(T, q.dtype, q.device))
            else:
                scores.add_(_window_mask(T, num_keys - T, window, q.dtype, q.device))
            p_GTS = torch.softmax(scores, dim=-1).view(G, -1, num_keys)
            y_GTE = torch.bmm(p_GTS, v_GSE[:, keys])
            y_GRSE[:, :, part] = y_GTE.view(G, -1, T, E)
            kept.append(p_GTS)
        ctx.save_for_backward(q_GRSE, k_GSE, v_GSE, *kept)
        ctx.window = window
        ctx.scale = scale
        return y_GRSE.view(B, H, S, E)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_GRSE, k_GSE, v_GSE, *kept = ctx.saved_tensors
        G, R, S, E = q_GRSE.shape
        dy_GRSE = gradients[0].reshape(G, R, S, E)
        dq_GRSE = torch.empty_like(q_GRSE)
        dk_GSE = dv_GSE = None
        scale = ctx.scale
        if ctx.window is not None:
            dk_GSE = torch.zeros_like(k_GSE)
            dv_GSE = torch.zeros_like(v_GSE)
        # The last block comes first: without a window it writes to every key.
        for part in reversed(query_blocks(S, q_GRSE.element_size())):
            keys = slice(first_key(part.start, ctx.window), part.stop)
            p_GTS = kept.pop()
            dy_GTE = dy_GRSE[:, :, part].reshape(G, -1, E)
            dp_GTS = torch.bmm(dy_GTE, v_GSE[:, keys].transpose(1, 2))
            ds_GTS = torch._softmax_backward_data(dp_GTS, p_GTS, -1, p_GTS.dtype).mul_(scale)
            dq_GTE = torch.bmm(ds_GTS, k_GSE[:, keys])
            dq_GRSE[:, :, part] = dq_GTE.view(G, R, -1, E)
            queries_GTE = q_GRSE[:, :, part].reshape(G, -1, E)
            dk_GSE = _add_product(dk_GSE, keys, ds_GTS.transpose(1, 2), queries_GTE)
            dv_GSE = _add_product(dv_GSE, keys, p_GTS.transpose(1, 2), dy_GTE)
        assert dk_GSE is not None and dv_GSE is not None
        whole = (len(gradients[0]), -1, S, E)
        return dq_GRSE.view(whole), dk_GSE.view(whole), dv_GSE.view(whole), None, None


def _add_product(whole: Tensor | None, rows: slice, a: Tensor, b: Tensor) -> Tensor:
    """Add `a @ b` to rows of what is there."""
    if whole is None:
        return torch.bmm(a, b)
    whole[:, rows].baddbmm_(a, b)
    return whole


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: AttentionPolicy = DEFAULT_POLICY,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """q (B, H, S, E), k and v (B, K, S, E) -> (B, H, S, E), by the fastest exact path for the
    device and length. A query sees `window` keys, its own the last, or all up to it. `scale` is
    1 / sqrt(E) unless given."""
    if window is not None and window >= q.shape[2]:
        window = None
    if keeps_scores(q.shape[2], q.element_size(), q.device.type):
        return MatrixAttention.apply(q, k, v, window, scale)
    query_heads = q.shape[1] // k.shape[1]
    # No fast kernel of GPUs takes grouped queries with a mask.
    is_masked_on_gpu = window is not None and not q.is_cpu
    if query_heads > 1 and (policy.repeats_keys or is_masked_on_gpu):
        k = k.repeat_interleave(query_heads, dim=1)
        v = v.repeat_interleave(query_heads, dim=1)
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        enable_gqa=q.shape[1] != k.shape[1],
        scale=scale,
    )
    if window is not None:
        return _windowed_attention(q, k, v, window, attend)
    if not policy.backends:
        return attend(q, k, v, is_causal=True)
    with sdpa_kernel(list(policy.backends), set_priority=True):
        return attend(q, k, v, is_causal=True)


def _windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, attend: Callable[..., Tensor]
) -> Tensor:
    """Return attention (B, H, S, E) of windows shorter than S, by chunks as long as a window: its
    queries see keys of their own chunk and of the one before, as local attention of Longformer
    (arXiv 2004.05150, section 3.1)."""
    B, _, S, _ = q.shape
    chunks = -(-S // window) - 1  # Without the first, which has none before it.
    first = [x[:, :, :window].contiguous() for x in (q, k, v)]
    first_BHWE = attend(*first, is_causal=True)
    padding = (0, 0, 0, (chunks + 1) * window - S)
    q, k, v = (torch.nn.functional.pad(x, padding) for x in (q, k, v))

    def take_chunks(x: Tensor, start: int) -> Tensor:
        part = x[:, :, start : start + chunks * window]
        return part.unflatten(2, (chunks, window)).transpose(1, 2).flatten(0, 1)

    keys, values = (torch.cat((take_chunks(x, 0), take_chunks(x, window)), dim=2) for x in (k, v))
    # Not the one that is kept: compilers warn of caches.
    mask = _make_window_mask(window, window, window, q.dtype, q.device)
    rest = attend(take_chunks(q, window), keys, values, attn_mask=mask)
    rest_BHSE = rest.unflatten(0, (B, chunks)).transpose(1, 2).flatten(2, 3)
    return torch.cat((first_BHWE, rest_BHSE[:, :, : S - window]), dim=2)


class VocabularyShard(NamedTuple):
    """A rank's part of the vocabulary: V rows from `first` on; the other ranks of `group` have the
    rest."""

    group: dist.ProcessGroup | None
    first: int


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and exponentials: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


class HeadCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of a linear head, without ever holding all logits or their fp32 copy.

    x (N, D), weight (V, D), targets (N,) with -1 where no token is to be predicted -> scalar fp32,
    nats. The gradient, softmax - onehot, is formed chunk by chunk in the forward pass, while the
    logits are in cache. Where the vocabulary is sharded the loss is whole on every rank, and x's
    gradient a summand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        shard: VocabularyShard | None,
        fused_loss: FusedLoss | None,
    ) -> Tensor:
        is_trained = ctx.needs_input_grad[1]
        needs_grad = ctx.needs_input_grad[0] or is_trained
        if fused_loss is not None and shard is None:
            loss, kept = _fused_head(
                x_ND,
                weight_VD,
                targets_N,
                fused_loss,
                needs_grad=needs_grad,
                is_trained=is_trained,
            )
            ctx.save_for_backward(*kept)
            return loss
        N = x_ND.shape[0]
        V = weight_VD.shape[0]
        rows = max(1, min(N, LOGITS_CHUNK_BYTES // (V * x_ND.element_size())))
        loss = torch.zeros((), dtype=_sum_dtype(x_ND.dtype), device=x_ND.device)
        dx_ND = torch.empty_like(x_ND) if needs_grad else x_ND
        dw_VD = weight_VD
        aligned = weight_VD if shard is not None else _pad_head(weight_VD)
        width = len(aligned)
        logits = torch.empty(rows, width, dtype=x_ND.dtype, device=x_ND.device)
        for start in range(0, N, rows):
            chunk_rows = slice(start, start + rows)
            x = x_ND[chunk_rows]
            chunk = torch.mm(x, aligned.t(), out=logits[: len(x)])
            if width > V:
                chunk[:, V:] = float("-inf")
            loss += _cross_entropy_and_gradient_(chunk, targets_N[chunk_rows], shard)
            if needs_grad:
                torch.mm(chunk, aligned, out=dx_ND[chunk_rows])
            if is_trained:
                part_VD = torch.mm(chunk.t(), x)[:V]
                if rows >= N:
                    dw_VD = part_VD
                elif start == 0:
                    dw_VD = part_VD.to(loss.dtype)
                else:
                    dw_VD.add_(part_VD)
        if is_trained:
            ctx.save_for_backward(dx_ND, dw_VD.to(weight_VD.dtype))
        elif needs_grad:
            ctx.save_for_backward(dx_ND)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        # Of a frozen weight there is no gradient.
        dx_ND, *trained = ctx.saved_tensors
        # In place: a step goes backward once.
        scale = gradients[0].to(dx_ND.dtype)
        dx_ND.mul_(scale)
        dw_VD = trained[0].mul_(scale) if trained else None
        return dx_ND, dw_VD, None, None, None


def _fused_head(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    fused_loss: FusedLoss,
    *,
    needs_grad: bool,
    is_trained: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the loss of HeadCrossEntropy by chunks of a compiled loss, and the gradients of x and,
    where that is trained, of weight, in their dtype."""
    N = x_ND.shape[0]
    V = weight_VD.shape[0]
    sum_dtype = _sum_dtype(x_ND.dtype)
    aligned_WD = _pad_head(weight_VD)
    memory = _device_memory(x_ND.device)
    rows = min(N, fused_logits_rows(len(aligned_WD), x_ND.element_size(), memory))
    logits = torch.empty(rows, len(aligned_WD), dtype=x_ND.dtype, device=x_ND.device)
    losses = []
    dx_ND = torch.empty_like(x_ND)
    dw_WD: Tensor | None = None
    for start in range(0, N, rows):
        chunk_rows = slice(start, start + rows)
        x = x_ND[chunk_rows]
        chunk = torch.mm(x, aligned_WD.t(), out=logits[: len(x)])
        losses.append(fused_loss(chunk, targets_N[chunk_rows], V))
        if needs_grad:
            torch.mm(chunk, aligned_WD, out=dx_ND[chunk_rows])
        if is_trained:
            dw_WD = _accumulate_product(dw_WD, chunk.t(), x, sum_dtype)
    loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
    if dw_WD is None:
        return loss, (dx_ND,) if needs_grad else ()
    return loss, (dx_ND, dw_WD[:V].to(weight_VD.dtype))


def _accumulate_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `total + a @ b` in `dtype`; on NVIDIA's GPUs the product itself adds."""
    if a.dtype == dtype:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if a.device.type == "cpu" or torch.version.hip:
        part = torch.mm(a, b).to(dtype)
        return part if total is None else total.add_(part)
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype)


@functools.cache
def _device_memory(device: torch.device) -> int:
    """Return the bytes of a device's memory, of those without one of their own this machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total


def _pad_head(weight_VD: Tensor) -> Tensor:
    """Return the head with rows of zeros behind its own, as it is multiplied."""
    V, D = weight_VD.shape
    width = _pad_vocabulary(V, weight_VD.device)
    if width == V:
        return weight_VD
    aligned_WD = weight_VD.new_zeros(width, D)
    aligned_WD[:V] = weight_VD
    return aligned_WD


def _pad_vocabulary(V: int, device: torch.device) -> int:
    """Return the rows of the head that are multiplied, the last ones zeros."""
    return padded_vocabulary(V, device.type)


class LogitsCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of logits (N, V) that another rank's head may have computed; targets as
    in HeadCrossEntropy."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, shard: VocabularyShard | None
    ) -> Tensor:
        gradient_NV = logits_NV.clone()
        loss = _cross_entropy_and_gradient_(gradient_NV, targets_N, shard)
        ctx.save_for_backward(gradient_NV)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV.mul_(gradients[0].to(gradient_NV.dtype)), None, None


def _cross_entropy_and_gradient_(
    logits_NV: Tensor, targets_N: Tensor, shard: VocabularyShard | None
) -> Tensor:
    """Return the summed loss of one chunk; the logits are overwritten by their gradient."""
    step = _rows_at_once(logits_NV)
    if shard is not None:
        return _sharded_cross_entropy_and_gradient_(logits_NV, targets_N, shard, step)
    on_cpu = logits_NV.device.type == "cpu"
    loss = torch.zeros((), dtype=_sum_dtype(logits_NV.dtype), device=logits_NV.device)
    for start in range(0, len(logits_NV), step):
        part = logits_NV[start : start + step]
        target = targets_N[start : start + step]
        valid = target >= 0
        index = target.clamp(min=0).unsqueeze(1)
        # Row by row, so that on a CPU it may write where it reads.
        out = part if on_cpu and part.dtype == loss.dtype else None
        log_p = torch.log_softmax(part, dim=-1, dtype=loss.dtype, out=out)
        target_log_p = log_p.gather(1, index).squeeze(1)
        loss -= (target_log_p * valid).sum()
        p = log_p.exp_()
        p.scatter_add_(1, index, torch.full_like(index, -1, dtype=p.dtype))
        if out is None:
            part.copy_(p)
        if not on_cpu or not bool(valid.all()):  # Asking a GPU would wait for it.
            part.mul_(valid.unsqueeze(1))
    return loss


def _rows_at_once(logits_NV: Tensor) -> int:
    """Return the rows that a CPU works through at a time: their fp32 copy stays in cache."""
    rows, width = logits_NV.shape
    if logits_NV.device.type == "cpu":
        rows = 2**20 // width
    return max(1, rows)


def _sharded_cross_entropy_and_gradient_(
    logits_NV: Tensor, targets_N: Tensor, shard: VocabularyShard, step: int
) -> Tensor:
    """As `_cross_entropy_and_gradient_`: the ranks exchange each token's greatest log-sum, sum and
    target's logit only (Megatron-LM, arXiv 1909.08053, section 3)."""
    sum_dtype = _sum_dtype(logits_NV.dtype)
    valid_N = targets_N >= 0
    index_N1, here_N1 = _locate_targets(targets_N, shard, logits_NV.shape[1])
    log_sum_N, target_N = _sharded_sums(logits_NV, index_N1, here_N1, shard, step)
    for start in range(0, len(logits_NV), step):
        rows = slice(start, start + step)
        log_p = logits_NV[rows].to(sum_dtype) - log_sum_N[rows].unsqueeze(1)
        p = log_p.exp_()
        p.scatter_add_(1, index_N1[rows], -here_N1[rows].to(sum_dtype))
        logits_NV[rows] = p.mul_(valid_N[rows].unsqueeze(1))
    return ((log_sum_N - target_N) * valid_N).sum()


def _locate_targets(targets_N: Tensor, shard: VocabularyShard, V: int) -> tuple[Tensor, Tensor]:
    """Return where each target is in this rank's part of the vocabulary, and whether it is."""
    index_N1 = (targets_N - shard.first).unsqueeze(1)
    valid_N1 = (targets_N >= 0).unsqueeze(1)
    here_N1 = (index_N1 >= 0) & (index_N1 < V) & valid_N1
    return index_N1.clamp(0, V - 1), here_N1


def _sharded_sums(
    logits_NV: Tensor, index_N1: Tensor, here_N1: Tensor, shard: VocabularyShard, step: int
) -> tuple[Tensor, Tensor]:
    """Return each token's log-sum over the whole vocabulary, and its target's logit."""
    sum_dtype = _sum_dtype(logits_NV.dtype)
    own_N = torch.cat([part.to(sum_dtype).logsumexp(dim=1) for part in logits_NV.split(step)])
    most_N = own_N.clone()
    dist.all_reduce(most_N, dist.ReduceOp.MAX, shard.group)
    logit_N1 = logits_NV.gather(1, index_N1).to(sum_dtype)
    target_N = (logit_N1 * here_N1).squeeze(1)
    both_2N = torch.stack(((own_N - most_N).exp_(), target_N))
    dist.all_reduce(both_2N, group=shard.group)
    return most_N + both_2N[0].log(), both_2N[1]


def head_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    shard: VocabularyShard | None = None,
    fused_loss: FusedLoss | None = None,
) -> Tensor:
    """Return the summed cross-entropy in nats (fp32 scalar) of `x @ weight.T` against targets; -1
    marks targets to skip. `fused_loss` computes a chunk where the vocabulary is whole."""
    # A Function does not know that gradients are off: it would make them all the same.
    if not torch.is_grad_enabled():
        x_ND = x_ND.detach()
        weight_VD = weight_VD.detach()
    return HeadCrossEntropy.apply(x_ND, weight_VD, targets_N, shard, fused_loss)


@torch.no_grad()
def head_cross_entropies(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, shard: VocabularyShard | None = None
) -> Tensor:
    """Return each target's cross-entropy in nats (N,), fp32, of `x @ weight.T`; 0 where it is -1.
    No gradient follows."""
    V = weight_VD.shape[0]
    rows = max(1, LOGITS_CHUNK_BYTES // (V * x_ND.element_size()))
    # As wide as in training: cuBLAS has its fast products for that alone.
    aligned = weight_VD if shard is not None else _pad_head(weight_VD)
    losses = []
    for x, targets in zip(x_ND.split(rows), targets_N.split(rows), strict=True):
        # Without a name, so that one chunk of logits at a time is in memory.
        losses.append(logits_cross_entropies(torch.mm(x, aligned.t())[:, :V], targets, shard))
    return torch.cat(losses)


@torch.no_grad()
def logits_cross_entropies(
    logits_NV: Tensor, targets_N: Tensor, shard: VocabularyShard | None = None
) -> Tensor:
    """Return the results of `head_cross_entropies` for logits that are computed already."""
    step = _rows_at_once(logits_NV)
    if shard is not None:
        index_N1, here_N1 = _locate_targets(targets_N, shard, logits_NV.shape[1])
        log_sum_N, target_N = _sharded_sums(logits_NV, index_N1, here_N1, shard, step)
        return (log_sum_N - target_N) * (targets_N >= 0)
    sum_dtype = _sum_dtype(logits_NV.dtype)
    losses = []
    for part, targets in zip(logits_NV.split(step), targets_N.split(step), strict=True):
        logits = part.to(sum_dtype)
        losses.append(cross_entropy(logits, targets, ignore_index=-1, reduction="none"))
    return torch.cat(losses)
