"""Events to a Measurement: what a run took, in the fields of its Estimate."""

from __future__ import annotations

import math
from statistics import fmean, median

from msgspec.structs import replace

from farspan.domain.cost import Measurement
from farspan.domain.model import train_flops_per_token
from farspan.report import losses
from farspan.report.history import RunHistory


def measure_run(run: RunHistory) -> Measurement | None:
    """Measure the times and memory of `run`; None before its first step.

    Times and rates are medians over the steps that count (`History.timed`). TFLOP/s a device and
    MFU follow `domain.model.train_flops_per_token`; MFU is None where the device's peak is unknown.
    Money is `History.usd`.
    """
    history = run.history
    if not history.steps:
        return None

    # Medians over the steps that count.
    warm = history.timed
    flops_per_token = train_flops_per_token(run.plan.model, run.plan.train.seq_len)
    step_seconds = []
    rates = []
    tflops = []
    mfus = []
    for timed in warm:
        rate = timed.step.tokens / timed.step.step_s
        flops = flops_per_token * rate
        step_seconds.append(timed.step.step_s)
        rates.append(rate)
        tflops.append(flops / timed.start.world / 1e12)
        if timed.start.peak_flops:
            mfus.append(flops / timed.start.peak_flops)
    mfu = median(mfus) if len(mfus) == len(warm) else None
    memory_bytes = max(each.memory_bytes for each in run.histories.values())
    train_loss = fmean(timed.step.loss for timed in history.steps[-losses.LAST_STEPS :])
    step_s = median(step_seconds)
    tokens_per_s = median(rates)
    steps = len(history.steps)
    tokens = history.steps[-1].tokens
    measured = Measurement(
        step_s=step_s,
        run_s=history.run_s,
        tokens_per_s=tokens_per_s,
        memory_bytes=memory_bytes,
        usd=history.usd,
        steps=steps,
        tokens=tokens,
        train_loss=train_loss,
        val_loss=None,
        best_val_loss=None,
        perplexity=None,
        bits_per_byte=None,
        mfu=mfu,
        tflops_per_device=median(tflops),
        reason=history.reason,
    )

    # The last validation, and the best one.
    last = losses.last_validation(run)
    if last is None:
        return measured
    unigram_nats, bigram_nats = losses.entropies(run, last).values()
    perplexity = math.exp(last.loss) if last.loss < 700 else None
    best = min(history.validations, key=lambda event: losses.comparable_loss(event)[0])
    best_val_loss, best_val_tokens, _ = losses.comparable_loss(best)
    best_step = best.step
    measured = replace(measured, val_sources=last.sources)
    return replace(
        measured,
        val_loss=last.loss,
        best_val_loss=best_val_loss,
        perplexity=perplexity,
        bits_per_byte=last.bits_per_byte,
        val_step=last.step,
        val_tokens=last.tokens,
        val_of=last.of,
        val_read=last.read,
        val_standard_error=last.standard_error,
        unigram_nats=unigram_nats,
        bigram_nats=bigram_nats,
        best_val_step=best_step,
        best_val_tokens=best_val_tokens,
    )
