"""What a checkpoint costs the steps beside it: 60 M parameters through the Trainer, a save every
second."""

from __future__ import annotations

import shutil
import statistics
from itertools import pairwise

from gpu_small import RANDOM_CORPUS, run_folder, train_run
from gpu_stage import Context
from gpu_step import TINY, plan_of

from farspan.domain.run_events import Saved, Step, read_events
from farspan.domain.train import TrainSpec
from farspan.planning.size import shape_for

WARMUP = 10
#: Seconds that training takes at most, and between two saves.
TRAINED_S = 6.0
SAVE_EVERY_S = 1.0


def measure(context: Context) -> None:
    spec = TINY
    if not context.dry:
        spec = shape_for("llama", 60_000_000, vocab_size=8192, context=512, knobs={})
    train = TrainSpec(
        steps=10**6,
        batch=2 if context.dry else 32,
        seq_len=spec.context,
        precision="bf16",
        validate_every=10**7,
        validate_tokens=spec.context,
        checkpoint_every_s=SAVE_EVERY_S,
        deadline_s=TRAINED_S,
    )
    plan = plan_of(spec, train, context.device.type, corpus=RANDOM_CORPUS)
    run = run_folder(context, 100, plan)
    train_run(run)
    events = list(read_events(run.events))
    steps = [event for event in events if isinstance(event, Step)][WARMUP:]
    saves = [event for event in events if isinstance(event, Saved)]
    gaps_ms = [(b.at - a.at) * 1e3 for a, b in pairwise(steps)]
    median_ms = statistics.median(gaps_ms)
    stall_ms = max(gaps_ms) - median_ms
    found = {
        "bytes": saves[-1].size_bytes if saves else 0,
        "saves": len(saves),
        "seconds": [save.seconds for save in saves],
        "step_ms": median_ms,
        "mean_ms": statistics.mean(gaps_ms),
        "slowest_ms": max(gaps_ms),
    }
    context.row(
        found,
        f"{len(saves)} saves of {found['bytes'] / 1e6:,.0f} MB beside {len(gaps_ms)} steps of "
        f"{median_ms:.2f} ms (mean {found['mean_ms']:.2f}): the slowest {stall_ms:.1f} ms longer",
    )
    shutil.rmtree(run.path)
