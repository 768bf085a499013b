"""farspan: pretrain small language models on your own text with whatever GPUs you have."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from farspan._version import __version__

if TYPE_CHECKING:
    from farspan.app.api import (
        Run,
        SearchIndex,
        compare,
        doctor,
        find_cluster,
        index,
        plan,
        prepare,
        price,
        probe,
        select,
        train,
    )
    from farspan.domain.problems import Refusal

__all__ = [
    "Refusal",
    "Run",
    "SearchIndex",
    "__version__",
    "compare",
    "doctor",
    "find_cluster",
    "index",
    "plan",
    "prepare",
    "price",
    "probe",
    "select",
    "train",
]


def __getattr__(name: str) -> Any:
    """Return the API, loaded when a name of it is first used: `import farspan` alone is to take no
    time."""
    if name not in __all__:
        raise AttributeError(f"module 'farspan' has no attribute {name!r}")
    module = "farspan.domain.problems" if name == "Refusal" else "farspan.app.api"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
