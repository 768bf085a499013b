"""Events to a Measurement: what a run took, in the fields of its Estimate."""

from __future__ import annotations

import math
from statistics import fmean, median

from farspan.domain.model import train_flops_per_token
from farspan.domain.results import Measurement
from farspan.report import losses
from farspan.report.history import RunHistory


def measure(run: RunHistory) -> Measurement | None:
    """Return what `run` took so far, or None before its first step.

    Times and rates are medians over the steps that count (`History.timed`). TFLOP/s a device and
    MFU follow `domain.model.train_flops_per_token`; MFU is None where the device's peak is unknown.
    Money is `History.usd`.
    """
    history = run.history
    if not history.steps:
        return None
    warm = history.timed
    rates = [timed.step.tokens / timed.step.step_s for timed in warm]
    flops_per_token = train_flops_per_token(run.plan.model, run.plan.train.seq_len)
    flops = [(flops_per_token * rate, timed.start) for rate, timed in zip(rates, warm, strict=True)]
    used = [rate / start.peak_flops for rate, start in flops if start.peak_flops]
    last = losses.last(run)
    best = min(history.validations, key=lambda event: losses.compared(event)[0], default=None)
    entropies = losses.entropies(run, last)
    return Measurement(
        step_s=median(timed.step.step_s for timed in warm),
        run_s=history.run_s,
        tokens_per_s=median(rates),
        memory_bytes=max(rank_history.memory_bytes for rank_history in run.histories.values()),
        usd=history.usd,
        steps=len(history.steps),
        tokens=history.steps[-1].tokens,
        train_loss=fmean(timed.step.loss for timed in history.steps[-losses.LAST_STEPS :]),
        val_loss=last.loss if last else None,
        best_val_loss=losses.compared(best)[0] if best else None,
        perplexity=math.exp(last.loss) if last and last.loss < 700 else None,
        bits_per_byte=last.bits_per_byte if last else None,
        mfu=median(used) if len(used) == len(warm) else None,
        tflops_per_device=median(rate / start.world / 1e12 for rate, start in flops),
        reason=history.reason,
        val_step=last.step if last else None,
        val_tokens=last.tokens if last else None,
        val_of=last.of if last else None,
        val_read=last.read if last else None,
        val_standard_error=last.standard_error if last else None,
        unigram_nats=entropies["unigram"] if last else None,
        bigram_nats=entropies["bigram"] if last else None,
        best_val_step=best.step if best else None,
        best_val_tokens=losses.compared(best)[1] if best else None,
    )
