"""The checks of tests/runtime/gpu_checks.py, without pytest: one row each, failed ones included."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gpu_stage import Context

from tests.runtime import gpu_checks


def measure(context: Context) -> None:
    checks: dict[str, Callable[[], dict[str, float]]] = {}
    for compiled in (False, True):
        for precision in gpu_checks.GRADIENT_BOUNDS:
            name = f"gradients in {precision}, {'compiled' if compiled else 'eager'}"
            checks[name] = lambda precision=precision, compiled=compiled: (  # type: ignore[misc]
                gpu_checks.check_gradients(context.device, precision, compiled)
            )
    for name, optimizer in gpu_checks.OPTIMIZERS.items():
        checks[f"three steps of {name}"] = lambda optimizer=optimizer: gpu_checks.check_updates(  # type: ignore[misc]
            context.device, optimizer
        )
    checks["one gradient, computed 20 times"] = lambda: gpu_checks.check_repeated_gradients(
        context.device
    )
    for name, optimizer in gpu_checks.OPTIMIZERS.items():
        steps = 10 if context.dry else 200
        checks[f"{steps} recorded steps of {name}"] = lambda optimizer=optimizer, steps=steps: (
            gpu_checks.check_recorded_steps(  # type: ignore[misc]
                context.device, optimizer, steps
            )
        )
    failed = [name for name, check in checks.items() if not passes(context, name, check)]
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


def passes(context: Context, name: str, check: Callable[[], dict[str, float]]) -> bool:
    """Run one check and keep its outcome, so that those after it run too."""
    try:
        found = check()
    except Exception as error:  # Whatever it is, the other checks say more about the card.
        message = f"{type(error).__name__}: {error}"
        context.row(
            {"check": name, "passed": False, "error": message}, f"{name}: FAILED, {message}"
        )
        return False
    figures = ", ".join(f"{key} {value:.2g}" for key, value in found.items())
    context.row({"check": name, "passed": True, **found}, f"{name}: passed, {figures}")
    return True
