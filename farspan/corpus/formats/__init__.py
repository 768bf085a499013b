"""Formats that a folder of text may hold. One file a family, and the file's name is its
registration.

A module offers `FORMATS`, a tuple of `Format`. Importing one loads no library that the format
needs.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path
from types import MappingProxyType

from farspan.corpus.formats._format import PACKED, Format


def list_formats() -> list[str]:
    """List the families' names without importing them."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(module for module in modules if not module.startswith("_"))


@functools.cache
def load_formats() -> MappingProxyType[str, Format]:
    """Return the format of each ending of a file's name, such as `.txt` or `.jsonl.gz`."""
    formats: dict[str, Format] = {}
    for name in list_formats():
        module = importlib.import_module(f"{__name__}.{name}")
        for known in module.FORMATS:
            for ending in known.endings:
                formats[ending] = known
                if known.packed:
                    formats.update((f"{ending}{packed}", known) for packed in PACKED)
    return MappingProxyType(formats)


def find_ending(file: Path) -> str:
    """Return the end of the name that decides the format; of an unknown one its last suffix."""
    formats = load_formats()
    name = file.name.lower()
    # The longest ending decides, such as `.jsonl.gz`.
    at = name.find(".")
    while at >= 0:
        if name[at:] in formats:
            return name[at:]
        at = name.find(".", at + 1)
    return file.suffix.lower()
