"""What saving in the background costs the steps beside it: the same run with a save every 50 steps
and without any.

    python benchmarks/saving.py [--pairs 4] [--steps 100]

13.9 M parameters on this machine, two workers by data parallelism. Runs alternate, each in fresh
  processes. The figure is the ratio of the mean step of a pair, with saves over without. Its median
  is printed and written to results/saving.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import msgspec

from farspan.app import training
from farspan.app.plans import best_plan
from farspan.app.resolving import resolve_run
from farspan.app.supervisor import Supervisor
from farspan.app.updates import ignore_update
from farspan.domain.config import BatchConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from farspan.domain.model import count_parameters
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder, source_commit
from farspan.domain.run_events import Event, Saved, Step
from farspan.domain.struct_files import load, save
from farspan_lab.chaos import twin

RESULTS = Path(__file__).parent / "results" / "saving.json"
#: A save each so many steps, and steps that warm up.
EVERY = 50
WARMUP = 10
NEVER_S = 1e6


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    commit: str | None
    parameters: int
    steps: int
    step_s: float
    #: Of each pair: the mean step with saves over that without, and the saves that were written.
    ratios: tuple[float, ...]
    saves: tuple[int, ...]


def mean_step(run: RunFolder, every_s: float) -> tuple[float, int]:
    """Seconds of a step in the mean, and checkpoints written before the last step."""
    plan = run.load_plan()
    train = msgspec.structs.replace(plan.train, checkpoint_every_s=every_s)
    save(msgspec.structs.replace(plan, train=train), run.plan)
    events = list[Event]()
    Supervisor(run, ignore_update, events.append).train_run()
    steps = [event for event in events if isinstance(event, Step)]
    saves = sum(isinstance(event, Saved) and event.step < steps[-1].step for event in events)
    return (steps[-1].at - steps[WARMUP - 1].at) / (len(steps) - WARMUP), saves


def make_first_run(path: Path, steps: int) -> RunFolder:
    """Make the run that all others are twins of."""
    config = RunConfig(
        data="pydocs",
        size="14m",
        model=ModelConfig(context=256),
        train=TrainConfig(
            steps=steps,
            batch=BatchConfig(global_=8),
            precision="fp32",
            validate_every=steps,
        ),
        parallel=ParallelConfig(technique="data", workers=2),
    )
    resolved = resolve_run(config, ignore_update, trial=False)
    return training.make_run(path, config, best_plan(resolved, config.parallel))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first = make_first_run(Path(folder, "first"), given.steps)
        ratios = list[float]()
        saves = list[int]()
        plain_s = 0.0
        for pair in range(given.pairs):
            plain_s, _ = mean_step(twin(first, Path(folder, f"plain-{pair}")), NEVER_S)
            with_s, written = mean_step(twin(first, Path(folder, f"saved-{pair}")), EVERY * plain_s)
            ratios.append(with_s / plain_s)
            saves.append(written)
            print(
                f"pair {pair + 1}: {plain_s:.3f} s a step, {ratios[-1]:.4f} times that with "
                f"{written} saves",
                flush=True,
            )
        done = Saving(
            commit=source_commit(),
            parameters=count_parameters(load(first.plan, Plan).model),
            steps=given.steps,
            step_s=plain_s,
            ratios=tuple(ratios),
            saves=tuple(saves),
        )
    save(done, RESULTS)
    print(f"median {statistics.median(ratios):.4f}, commit {done.commit}")


if __name__ == "__main__":
    main()
