"""Threads that decode a type for the first time side by side; and nobody decodes past it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading
import msgspec
from farspan.domain import decoding

sys.setswitchinterval(1e-6)
decode = {"json": decoding.decode_json, "value": decoding.convert_value}[sys.argv[1]]
content = {"json": b'{"inner": [{"x": 1}]}', "value": {"inner": [{"x": 1}]}}[sys.argv[1]]
for number in range(200):
    inner = msgspec.defstruct(f"Inner{number}", [("x", int), ("y", list[int], [])])
    fields = [("inner", list[inner])] + [(f"f{i}", dict[str, inner], {}) for i in range(30)]
    outer = msgspec.defstruct(f"Outer{number}", fields)
    barrier = threading.Barrier(4)

    def first() -> None:
        barrier.wait()
        assert decode(content, outer).inner[0].x == 1

    threads = [threading.Thread(target=first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize("form", ["json", "value"])
def test_threads_may_decode_a_type_for_the_first_time_together(form):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


RAW = re.compile(
    r"msgspec\.(convert\(|(json|msgpack|yaml)\.decode\([^\n]*type=|(json|msgpack)\.Decoder\()"
)


def test_only_one_module_decodes_types():
    root = Path(__file__).parents[2]
    found = []
    for package in ("farspan", "farspan_exports", "farspan_lab", "farspan_studies"):
        for path in (root / package).rglob("*.py"):
            if path.name != "decoding.py" and RAW.search(path.read_text()):
                found.append(str(path))
    assert not found
