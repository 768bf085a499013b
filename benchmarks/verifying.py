"""What verifying the blocks of token files costs a step: the same run with checksums and without.

    python benchmarks/verifying.py [--pairs 5] [--steps 25]

A model of 3 M parameters on this machine, one worker, in the first epoch, where nearly every block
is new: of a larger model the share is less. Runs alternate, each in fresh processes. `ratios` are
the mean steps of the pairs, with checksums over without. On a busy machine they are noise, so
`share` says it directly: the CPU seconds that reading the same windows takes more with checksums,
over the least mean step without.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from farspan.app import training
from farspan.app.plans import best_plan
from farspan.app.resolving import resolve
from farspan.app.supervisor import Supervisor
from farspan.app.updates import silent
from farspan.corpus.tokens import TokenFile
from farspan.domain.codec import load, save
from farspan.domain.config import BatchConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import parameters
from farspan.domain.plan import Plan
from farspan.domain.results import Event, Step
from farspan.domain.run import RunFolder, RunRecord, commit
from farspan.runtime.training.data import Order, Windows
from farspan_lab.chaos import twin

RESULTS = Path(__file__).parent / "results" / "verifying.json"
#: Steps that warm up, and times that reading is measured, of which the least counts.
WARMUP, REPEATS = 5, 5


class Verifying(msgspec.Struct, frozen=True, kw_only=True):
    commit: str | None
    parameters: int
    steps: int
    tokens_per_step: int
    threads: int
    #: Of each pair, in seconds: the mean step without checksums, and with them.
    plain_s: tuple[float, ...]
    verified_s: tuple[float, ...]
    #: CPU seconds of verifying in a step, and their share of the least mean step.
    verifying_s: float
    share: float

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.verified_s, self.plain_s, strict=True)]


def mean_step(run: RunFolder) -> float:
    """Seconds of a step in the mean."""
    events = list[Event]()
    Supervisor(run, silent, events.append).train()
    steps = [event for event in events if isinstance(event, Step)]
    return (steps[-1].at - steps[WARMUP - 1].at) / (len(steps) - WARMUP)


def reading_s(run: RunFolder, manifest: CorpusManifest) -> float:
    """CPU seconds of reading the windows of all steps, each for the first time."""
    train = run.load_plan().train
    folder = load(run.record, RunRecord).corpus_folder
    windows = Windows(TokenFile.open(folder, "train", manifest).tokens, train.seq_len)
    order = Order(windows.count, train.seed)
    chosen = [
        order.window(np.arange(step * train.batch, (step + 1) * train.batch))
        for step in range(train.steps)
    ]
    began = time.thread_time()
    for window in chosen:
        windows.read(window)
    return time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first = RunFolder(Path(folder, "first"))
        config = RunConfig(
            data="pydocs",
            size="tiny",
            model=ModelConfig(context=256),
            train=TrainConfig(
                steps=given.steps,
                batch=BatchConfig(global_=8),
                precision="fp32",
                validate_every=given.steps,
            ),
            parallel=ParallelConfig(technique="data", workers=1),
        )
        training.make(
            first.path, config, best_plan(resolve(config, silent, trial=False), config.parallel)
        )
        manifest = load(first.corpus, CorpusManifest)
        plain_s, verified_s = list[float](), list[float]()
        for pair in range(given.pairs):
            bare = twin(first, Path(folder, f"plain-{pair}"))
            save(manifest.without_checksums(), bare.corpus)
            plain_s.append(mean_step(bare))
            verified_s.append(mean_step(twin(first, Path(folder, f"verified-{pair}"))))
            print(
                f"pair {pair + 1}: {plain_s[-1]:.4f} s a step, {verified_s[-1]:.4f} s with "
                "checksums",
                flush=True,
            )
        least = [
            min(reading_s(first, one) for _ in range(REPEATS))
            for one in (manifest, manifest.without_checksums())
        ]
        plan = load(first.plan, Plan)
        verifying_s = (least[0] - least[1]) / given.steps
        done = Verifying(
            commit=commit(),
            parameters=parameters(plan.model),
            steps=given.steps,
            tokens_per_step=plan.train.tokens_per_step,
            threads=plan.devices[0].threads,
            plain_s=tuple(plain_s),
            verified_s=tuple(verified_s),
            verifying_s=verifying_s,
            share=verifying_s / min(plain_s),
        )
    save(done, RESULTS)
    print(
        f"median {statistics.median(done.ratios):.4f}; {verifying_s * 1e6:.0f} us a step, "
        f"{done.share:.3%} of it; {done.threads} threads, commit {done.commit}"
    )


if __name__ == "__main__":
    main()
