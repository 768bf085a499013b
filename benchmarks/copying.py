"""What copies of checkpoints cost the steps: the same run with a save every 50 steps, each copied
to another folder, and with the saves alone.

    python -m benchmarks.copying [--pairs 4] [--steps 100]

As benchmarks/saving.py: 13.9 M parameters on this machine, two workers by data parallelism, pairs
in fresh processes. The figure is the ratio of the mean step of a pair. Its median is printed and
written to results/copying.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from msgspec.structs import replace

from benchmarks.saving import EVERY, NEVER_S, Saving, make_first_run, mean_step
from farspan.app.configs import as_yaml
from farspan.domain.config import CheckpointConfig, RunConfig
from farspan.domain.model import count_parameters
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder, source_commit
from farspan.domain.struct_files import load, load_yaml, save
from farspan_lab.chaos import twin

RESULTS = Path(__file__).parent / "results" / "copying.json"


def copied_twin(first: RunFolder, path: Path, place: Path, every_s: float) -> RunFolder:
    """Make a twin of the run that is copied to a folder."""
    run = twin(first, path)
    place.mkdir()
    checkpoint = CheckpointConfig(every=f"{every_s}s", copy=str(place))
    run.config.write_bytes(
        as_yaml(replace(load_yaml(run.config, RunConfig), checkpoint=checkpoint))
    )
    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first = make_first_run(Path(folder, "first"), given.steps)
        step_s, _ = mean_step(twin(first, Path(folder, "plain")), NEVER_S)
        every_s = EVERY * step_s
        ratios = list[float]()
        saves = list[int]()
        for pair in range(given.pairs):
            alone_s, _ = mean_step(twin(first, Path(folder, f"alone-{pair}")), every_s)
            run = copied_twin(
                first, Path(folder, f"copied-{pair}"), Path(folder, f"place-{pair}"), every_s
            )
            with_s, written = mean_step(run, every_s)
            ratios.append(with_s / alone_s)
            saves.append(written)
            print(f"pair {pair + 1}: {ratios[-1]:.4f} times, {written} saves", flush=True)
        done = Saving(
            commit=source_commit(),
            parameters=count_parameters(load(first.plan, Plan).model),
            steps=given.steps,
            step_s=step_s,
            ratios=tuple(ratios),
            saves=tuple(saves),
        )
    save(done, RESULTS)
    print(f"median {statistics.median(ratios):.4f}, commit {done.commit}")


if __name__ == "__main__":
    main()
