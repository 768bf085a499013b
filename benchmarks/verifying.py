"""What verifying the blocks of token files costs a step.

    python benchmarks/verifying.py [--pairs 9] [--steps 25]

A model of 3 M parameters on one thread, in the first epoch, where nearly every block is new: of a
larger model the share is less. In turns the windows of the first steps are read with checksums and
without, each for the first time. The difference in CPU seconds is set against those of a step's
forward and backward passes, which other programs on the machine hardly change. The result goes to
results/verifying.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from farspan.app import training
from farspan.app.plans import best_plan
from farspan.app.resolving import resolve_run
from farspan.app.updates import ignore_update
from farspan.corpus.token_files import TokenFile
from farspan.domain.config import BatchConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import count_parameters
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder, RunRecord, source_commit
from farspan.domain.struct_files import load, save
from farspan.runtime.model.decoder import Decoder, initial_parameters
from farspan.runtime.training.sample_order import PackedWindows, SampleOrder

RESULTS = Path(__file__).parent / "results" / "verifying.json"
#: Steps of the model whose CPU seconds are taken; the least counts.
MODEL_STEPS = 5


class Verifying(msgspec.Struct, frozen=True, kw_only=True):
    commit: str | None
    parameters: int
    tokens_per_step: int
    steps: int
    threads: int
    #: CPU seconds of reading all steps' windows, of each pair without checksums and with them.
    plain_s: tuple[float, ...]
    verified_s: tuple[float, ...]
    #: CPU seconds of each step of the model.
    model_steps_s: tuple[float, ...]

    @property
    def verifying_s(self) -> list[float]:
        """Of each pair, the CPU seconds of verifying in a step."""
        pairs = zip(self.verified_s, self.plain_s, strict=True)
        return [(verified - plain) / self.steps for verified, plain in pairs]


def reading_s(run: RunFolder, manifest: CorpusManifest, steps: int) -> float:
    """CPU seconds of reading the windows of the first steps."""
    train = run.load_plan().train
    folder = load(run.record, RunRecord).corpus_folder
    windows = PackedWindows(TokenFile.open(folder, "train", manifest).tokens, train.seq_len)
    order = SampleOrder(windows.count, train.seed)
    chosen = [
        order.window(np.arange(step * train.batch, (step + 1) * train.batch))
        for step in range(steps)
    ]
    began = time.thread_time()
    for window in chosen:
        windows.read(window)
    return time.thread_time() - began


def model_step_s(plan: Plan) -> float:
    """CPU seconds of the forward and backward passes of a step on this thread."""
    model = Decoder(plan.model)
    model.load_state_dict(dict(initial_parameters(plan.model, plan.train.seed)))
    tokens = torch.randint(0, plan.model.vocab_size, (plan.train.batch, plan.train.seq_len))
    began = time.process_time()
    logits = model(tokens).flatten(0, 1).float()
    torch.nn.functional.cross_entropy(logits, tokens.flatten()).backward()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=25)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder, "run"))
        config = RunConfig(
            data="pydocs",
            size="tiny",
            model=ModelConfig(context=256),
            train=TrainConfig(steps=given.steps, batch=BatchConfig(global_=8), precision="fp32"),
            parallel=ParallelConfig(technique="data", workers=1),
        )
        training.make_run(
            run.path,
            config,
            best_plan(resolve_run(config, ignore_update, trial=False), config.parallel),
        )
        manifest = load(run.corpus, CorpusManifest)
        plan = run.load_plan()
        pairs = [
            tuple(
                reading_s(run, one, given.steps) for one in (manifest.without_checksums(), manifest)
            )
            for _ in range(given.pairs)
        ]
        done = Verifying(
            commit=source_commit(),
            parameters=count_parameters(plan.model),
            tokens_per_step=plan.train.tokens_per_step,
            steps=given.steps,
            threads=1,
            plain_s=tuple(plain for plain, _ in pairs),
            verified_s=tuple(verified for _, verified in pairs),
            model_steps_s=tuple(model_step_s(plan) for _ in range(MODEL_STEPS)),
        )
    save(done, RESULTS)
    cost_s = done.verifying_s
    step_s = min(done.model_steps_s)
    print(
        f"{statistics.median(cost_s) * 1e6:.0f} us of {step_s:.3f} s a step "
        f"({min(cost_s) * 1e6:.0f} to {max(cost_s) * 1e6:.0f}), "
        f"{statistics.median(cost_s) / step_s:.4%}; commit {done.commit}"
    )


if __name__ == "__main__":
    main()
