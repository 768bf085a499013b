"""A stand-in for `nvidia-smi` that prints what the real one was recorded to print of the fields
that are asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory.total": "81559",
    "driver_version": "550.90.07",
    "compute_cap": "9.0",
    "uuid": "GPU-3a0d9f0e-9e4b-7e0c-5b54-6f1d0f4d5a11",
    "mig.mode.current": "Disabled",
}
GTX1080 = {
    "name": "NVIDIA GeForce GTX 1080",
    "memory.total": "8192",
    "driver_version": "580.95.05",
    "compute_cap": "6.1",
    "uuid": "GPU-bd1f1d5e-34e0-4e3f-0d11-6a6a2a5f5c01",
    "mig.mode.current": "[N/A]",
}
SECOND = {**GTX1080, "uuid": "GPU-c7e2a6d4-88a1-9f61-9a3b-0b8c1e7d2f02"}
A100_MIG = {
    "name": "NVIDIA A100-SXM4-40GB",
    "memory.total": "40960",
    "driver_version": "580.82.07",
    "compute_cap": "8.0",
    "uuid": "GPU-5f2c2b2e-13a5-1f45-2c83-95d1a1f0c9aa",
    "mig.mode.current": "Enabled",
}
RTX4090 = {
    "name": "NVIDIA GeForce RTX 4090",
    "memory.total": "24564",
    "driver_version": "580.95.05",
    "compute_cap": "8.9",
    "uuid": "GPU-11c1b6ad-4f27-31a0-8a43-5e4d2ab9b9f3",
    "mig.mode.current": "[N/A]",
}
#: One driver whose kernel module is not loaded: exit code 9.
FAILED = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)
#: A driver and no GPU: exit code 6.
NONE = "No devices were found\n"
#: A GPU that has fallen off the bus: exit code 15.
FALLEN = "Unable to determine the device handle for GPU0000:01:00.0: Unknown Error\n"

SCRIPT = """\
#!{python} -S
import json, sys, time
cards, lacking, said, code, seconds = json.loads({content!r})
time.sleep(seconds)
if said:
    print(said, end="")
    raise SystemExit(code)
(asked,) = [word.split("=")[1].split(",") for word in sys.argv if word.startswith("--query-gpu=")]
for field in asked:
    if field in lacking:
        print(f'Field "{{field}}" is not a valid field to query.\\n')
        raise SystemExit(2)
for card in cards:
    print(", ".join(card[field] for field in asked))
"""


def install(
    folder: Path,
    *cards: dict[str, str],
    lacking: tuple[str, ...] = (),
    said: str = "",
    code: int = 0,
    seconds: float = 0,
) -> Path:
    """Write an `nvidia-smi` that lists these cards, or says something else; returns the folder for
    the path."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "nvidia-smi"
    content = json.dumps([cards, lacking, said, code, seconds])
    script.write_text(SCRIPT.format(python=sys.executable, content=content))
    script.chmod(0o755)
    return folder
