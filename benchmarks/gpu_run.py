"""A whole run by the command line on the card: train, stop, resume, embed and search."""

from __future__ import annotations

import shutil

from gpu_stage import Context

from tests.runtime import gpu_checks


def measure(context: Context) -> None:
    folder = context.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    whole = gpu_checks.QUICK_RUN if context.dry else gpu_checks.WholeRun()
    found = gpu_checks.check_whole_run(folder, context.device.type, whole)
    context.row(
        found,
        f"stopped after {found['stopped']:.0f} of {found['steps']:.0f} steps, resumed, embedded "
        f"and searched: {found['step_s'] * 1e3:.2f} ms a step, validation loss {found['loss']:.2f}",
    )
