"""Measures farspan on one NVIDIA GPU: `make gpu`.

    python benchmarks/gpu.py                 every stage, at most seven minutes
    python benchmarks/gpu.py head small      these stages
    python benchmarks/gpu.py --list          the stages, their limits, and what each measures
    python benchmarks/gpu.py --dry           every stage at a tiny size on the CPU: tries it
    python benchmarks/gpu.py --wheels        download what a CUDA image of PyTorch lacks

It runs from the source tree, with any Python that has PyTorch: neither `.venv` nor a network is
needed. Packages that this Python lacks are unpacked from `benchmarks/gpu-wheels/`, where `--wheels`
puts them on a machine with a network.

Each stage is a process of its own with a limit; one that crashes or hangs costs that stage only. A
stage writes its rows as they come, and `gpu.json` is replaced as a whole with every row. Stages
that do not run keep what they had there. The folder is $OUT, else `benchmarks/results/`. Compiler
caches, logs and runs stay in `runs/gpu/`, which git ignores; `gpu.log` in $OUT has the logs.

Without a GPU it says so in one line and exits with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
WHEELS = BENCHMARKS / "gpu-wheels"
#: Seconds for all stages. Their limits add up to it.
TOTAL_S = 420.0
#: A stage is not started with less time left.
SHORTEST_STAGE_S = 5.0
POLL_S = 0.1
#: Characters of a failed stage's log that go into gpu.json, and of each log into gpu.log.
TAIL_CHARACTERS = 2_000
LOG_CHARACTERS = 400_000

#: Distribution of each package to import, where the names differ.
DISTRIBUTIONS = {"qdrant_edge": "qdrant-edge-py", "yaml": "pyyaml"}
#: What a CUDA image of PyTorch usually lacks.
CARRIED = ("msgspec", "zstandard", "highspy", "bm25s", "qdrant_edge")
CARRIED_PYTHON = "3.12"
KERNELS = ("torch", "numpy", "msgspec")
WORKER = (*KERNELS, "yaml", "psutil", "safetensors", "zstandard")
COMMANDS = ("highspy", "jinja2", "rich", "tiktoken", "tokenizers")
EVERYTHING = (*WORKER, *COMMANDS, "pyarrow", "bm25s", "qdrant_edge")


@dataclass(frozen=True)
class Stage:
    """One process: `module.measure(context)`, ended after `limit_s`."""

    name: str
    module: str
    limit_s: float
    needs: tuple[str, ...]
    measures: str
    #: What is expected of it, written before any card ran it.
    predicts: str = ""


STAGES = (
    Stage(
        "card",
        "gpu_card",
        12,
        ("torch",),
        "bandwidth, matrix products, time of a launch",
        "H200: copies 4.0 TB/s, bf16 products 640 TFLOP/s; H100: 2.9 TB/s, 620 TFLOP/s; "
        "an addition is launched in 4 us; pinned memory 50 GB/s, pageable a third of it",
    ),
    Stage(
        "head",
        "gpu_head",
        30,
        KERNELS,
        "HeadCrossEntropy alone: ms, bytes, error",
        "H200, d_model 1,024: 10.5 ms compiled in any chunks, 19 by operators, 50 unpadded; "
        "pytorch 22; errors below 1e-4",
    ),
    Stage(
        "contest",
        "gpu_contest",
        120,
        WORKER,
        "gpt2-medium, then gpt2, and a plain compiled loop, in turns",
        "gpt2-medium on an H200: 75 ms a step, 1.14x of the plain loop's 86, MFU 53 % (H100: "
        "48 %); gpt2 1.08x",
    ),
    Stage(
        "tests",
        "gpu_tests",
        45,
        WORKER,
        "gradients and updates against the CPU's; eager and recorded curves",
        "every check passes; 200 recorded steps have the losses of eager ones to the last bit; "
        "a step made twice has one gradient",
    ),
    Stage(
        "small",
        "gpu_small",
        45,
        WORKER,
        "2.9 M and 15 M parameters through the Trainer, eager and as a graph",
        "H200, 2.9 M, 8 x 256: eager 4.2 ms (Muon 6.0), graph 0.7 (0.9), of them reading 0.12; "
        "15 M, 32 x 256: graph 3.0 ms, eager 5",
    ),
    Stage(
        "predicted",
        "gpu_predicted",
        55,
        WORKER,
        "steps and memory, predicted and measured",
        "steps within 15 % and memory within 10 % in six of the first eight",
    ),
    Stage(
        "attention",
        "gpu_attention",
        18,
        WORKER,
        "attention by each of PyTorch's kernels, forward and backward",
        "H200, 1,024 tokens, bf16: PyTorch takes flash, 280 TFLOP/s, cuDNN 520; fp32 memory-"
        "efficient 30; grouped queries in fp32 refused by all, farspan as without groups",
    ),
    Stage(
        "workers",
        "gpu_workers",
        35,
        (*WORKER, "tokenizers"),
        "a GPU and a CPU, and two workers on one GPU, by gloo; NCCL with one rank",
        "losses within 1e-4 of one worker's in all six plans",
    ),
    Stage(
        "saving",
        "gpu_saving",
        15,
        WORKER,
        "steps beside checkpoints",
        "60 M parameters, 0.84 GB: the slowest step 30 ms longer than the median",
    ),
    Stage(
        "run",
        "gpu_run",
        45,
        EVERYTHING,
        "train, stop, resume, embed, search",
        "600 steps, the graph chosen by itself, validation loss below 6.6",
    ),
)


class Results:
    """gpu.json: what each stage has found so far. It is replaced as a whole, never half written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.stages = json.loads(path.read_text())["stages"]

    def put(self, name: str, found: Mapping[str, Any]) -> None:
        self.stages[name] = dict(found)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".json.tmp")
        new.write_text(json.dumps({"stages": self.stages}, indent=1) + "\n")
        os.replace(new, self.path)


def run_stages(
    stages: Sequence[Stage],
    command: Callable[[Stage, Path, float], list[str]],
    environment: Callable[[Stage], dict[str, str]],
    about: Mapping[str, Any],
    results: Results,
    folder: Path,
    total_s: float = TOTAL_S,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run each stage until its limit or the end of `total_s`; returns whether all succeeded.

    `command(stage, rows, limit_s)` is what writes the rows of a stage to the file `rows`.
    """
    ends = clock() + total_s
    succeeded = True
    for stage in stages:
        found = {"outcome": "skipped", **about, "at": now(), "rows": []}
        if stage.predicts:
            found["predicted"] = stage.predicts
            print(f"{stage.name}: predicted: {stage.predicts}", flush=True)
        limit_s = min(stage.limit_s, ends - clock())
        if absent := [name for name in missing(stage.needs) if wheel_of(name) is None]:
            found["why"] = f"missing: {', '.join(absent)}; make gpu-wheels fetches what it can"
        elif limit_s < min(stage.limit_s, SHORTEST_STAGE_S):
            found["why"] = f"{max(0.0, limit_s):.0f} s were left of {total_s:.0f}"
        else:
            rows = folder / f"{stage.name}.jsonl"
            rows.unlink(missing_ok=True)
            run_stage(
                stage.name,
                command(stage, rows, limit_s),
                environment(stage),
                rows,
                limit_s,
                lambda found, name=stage.name: results.put(name, found),  # type: ignore[misc]
                found,
                clock,
            )
        results.put(stage.name, found)
        succeeded &= found["outcome"] == "done"
        print(f"{stage.name}: {outcome_line(found)}", flush=True)
    return succeeded


def run_stage(
    name: str,
    command: list[str],
    environment: Mapping[str, str],
    rows: Path,
    limit_s: float,
    put: Callable[[Mapping[str, Any]], None],
    found: dict[str, Any],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run one process, with all that it starts, for at most `limit_s`; `found` gets its outcome."""
    log = rows.with_suffix(".log")
    began = clock()
    found |= {"outcome": "running", "limit_s": round(limit_s, 1)}
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=dict(environment),
            # Not a session of its own: where this script is killed as a group's member, so is it.
            process_group=0,
        )
        try:
            while process.poll() is None and clock() - began < limit_s:
                add_new_rows(name, rows, found, put)
                time.sleep(POLL_S)
            in_time = process.poll() is not None
        finally:
            kill_group(process)
    add_new_rows(name, rows, found, put)
    found["outcome"] = "done" if process.returncode == 0 else "failed" if in_time else "limit"
    found["rc"] = process.returncode if in_time else None
    found["s"] = round(clock() - began, 1)
    if found["outcome"] != "done":
        found["tail"] = log.read_text(errors="replace")[-TAIL_CHARACTERS:]


def add_new_rows(
    name: str, rows: Path, found: dict[str, Any], put: Callable[[Mapping[str, Any]], None]
) -> None:
    """Take whole lines that the stage has written since, print their text, and keep them."""
    if not rows.exists():
        return
    lines = rows.read_bytes().split(b"\n")[:-1]
    if len(lines) == len(found["rows"]):
        return
    for line in lines[len(found["rows"]) :]:
        row = json.loads(line)
        print(f"  {name}: {row.get('text', '')}", flush=True)
        found["rows"].append(row)
    put(found)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a stage and whatever it has started and left running."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcome_line(found: Mapping[str, Any]) -> str:
    if found["outcome"] == "skipped":
        return f"skipped, {found['why']}"
    words = {
        "done": "done",
        "failed": f"FAILED with {found['rc']}",
        "limit": f"ENDED at its limit of {found['limit_s']:.0f} s",
    }[found["outcome"]]
    tail = f"\n{found['tail'].rstrip()}" if found["outcome"] == "failed" else ""
    return f"{words} in {found['s']:.0f} s, {len(found['rows'])} rows{tail}"


# -- packages
#   ------------------------------------------------------------------------------------------------


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def wheel_of(name: str) -> Path | None:
    """Return the wheel in benchmarks/gpu-wheels/ that has a package for this Python."""
    prefix = DISTRIBUTIONS.get(name, name).replace("-", "_")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-"
    for path in sorted(WHEELS.glob(f"{prefix}-*.whl")):
        if any(part in path.name for part in (tag, "abi3", "py3-none-any", "py2.py3-none-any")):
            return path
    return None


def unpacked(names: Sequence[str], folder: Path) -> list[Path]:
    """Folders for PYTHONPATH with the wheels of those packages that this Python lacks."""
    paths = []
    for name in missing(names):
        wheel = wheel_of(name)
        if wheel is None:
            continue
        target = folder / "site" / wheel.stem
        if not target.exists():
            partial = target.with_suffix(".partial")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial)
            os.replace(partial, target)
        paths.append(target)
    return paths


def download_wheels() -> None:
    """Fetch the wheels of CARRIED for Linux on x86-64, in the versions of constraints.txt."""
    pinned = dict(
        line.strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    names = [DISTRIBUTIONS.get(name, name) for name in CARRIED]
    platforms = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", CARRIED_PYTHON, "-d", str(WHEELS)]
    for name in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64"):
        command += ["--platform", name]
    WHEELS.mkdir(exist_ok=True)
    (WHEELS / ".gitignore").write_text("*\n")
    for path in WHEELS.glob("*.whl"):
        path.unlink()
    subprocess.run([*command, *(f"{name}=={pinned[name]}" for name in names)], check=True)
    size = sum(path.stat().st_size for path in WHEELS.glob("*.whl"))
    print(f"{WHEELS.relative_to(ROOT)}: {', '.join(names)}, {size / 1e6:.0f} MB")


# -- what a result says of this machine and this source
#   ------------------------------------------------------------------------------------------------

PROBE = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda,
                  "device": torch.cuda.get_device_name() if gpu else None}))
"""


def probe() -> dict[str, Any] | None:
    """PyTorch's version and the GPU's name, asked in another process: this one holds no GPU."""
    asked = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    return json.loads(asked.stdout) if asked.returncode == 0 else None


def describe(torch: Mapping[str, Any], dry: bool) -> dict[str, Any]:
    return {
        "device": "cpu" if dry else torch["device"],
        "dry": dry,
        "commit": commit(),
        "source": source_digest(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch["torch"],
            "cuda": torch["cuda"],
        },
        "cpu": cpu_name(),
    }


def commit() -> str | None:
    """Return the commit; None where the tree came without its history."""
    with contextlib.suppress(OSError):
        words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or None
    return None


def source_digest() -> str:
    """Digest of farspan's source files, by which two results of one tree are recognized."""
    digest = blake2b(digest_size=6)
    for path in sorted((ROOT / "farspan").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(": ")[1]
    return platform.machine()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# -- the command
#   ------------------------------------------------------------------------------------------------


def environment_of(stage: Stage, folder: Path, dry: bool) -> dict[str, str]:
    """Return the environment of a stage: the source tree, missing packages, and compiler caches."""
    paths = [ROOT, BENCHMARKS, *unpacked(stage.needs, folder)]
    before = os.environ.get("PYTHONPATH")
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([before] if before else [])]),
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    # On a CPU compiling takes minutes and needs a C++ compiler: the calls are tried, not the code.
    return found | ({"TORCH_COMPILE_DISABLE": "1"} if dry else {})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", help="all, if none is named")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--wheels", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of gpu.json; $OUT, else results/")
    parser.add_argument("--folder", type=Path, help="caches, logs and runs; runs/gpu/")
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds for all stages")
    parser.add_argument("--limit", type=float, help="seconds for each stage, not its own limit")
    given = parser.parse_args()
    if unknown := set(given.stages) - {stage.name for stage in STAGES}:
        parser.error(f"no stage {', '.join(sorted(unknown))}; --list names them")
    return given


def main() -> None:
    given = arguments()
    if given.list:
        for stage in STAGES:
            print(f"{stage.name:10} {stage.limit_s:4.0f} s  {stage.measures}")
            print(f"{'':17}predicted: {stage.predicts}")
        return
    if given.wheels:
        download_wheels()
        return
    torch = probe()
    if torch is None:
        print(f"skipped: {sys.executable} has no PyTorch that can be imported")
        return
    if torch["device"] is None and not given.dry:
        print("skipped: this waits for a machine with an NVIDIA GPU (--dry tries it on the CPU)")
        return
    folder = given.folder or ROOT / "runs" / "gpu" / ("dry" if given.dry else "")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    asked_for = given.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    out = asked_for or (folder if given.dry else BENCHMARKS / "results")

    def command(stage: Stage, rows: Path, limit_s: float) -> list[str]:
        words = [sys.executable, str(BENCHMARKS / "gpu_stage.py"), stage.module]
        words += ["--rows", str(rows), "--folder", str(folder), "--limit", str(limit_s)]
        return [*words, "--dry"] if given.dry else [*words, "--name", torch["device"]]

    stages = [stage for stage in STAGES if not given.stages or stage.name in given.stages]
    if given.limit is not None:
        stages = [replace(stage, limit_s=given.limit) for stage in stages]
    try:
        succeeded = run_stages(
            stages,
            command,
            lambda stage: environment_of(stage, folder, given.dry),
            describe(torch, given.dry),
            Results(out / "gpu.json"),
            folder,
            given.total,
        )
    finally:
        if asked_for is not None:
            join_logs(stages, folder, out / "gpu.log")
    print(f"results: {out / 'gpu.json'}")
    sys.exit(not succeeded)


def join_logs(stages: Sequence[Stage], folder: Path, path: Path) -> None:
    """One file of all logs: a device machine sends few files back."""
    with open(path, "w") as joined:
        for stage in stages:
            log = folder / f"{stage.name}.log"
            if log.exists():
                text = log.read_text(errors="replace")[-LOG_CHARACTERS:]
                joined.write(f"==== {stage.name}\n{text}\n")


if __name__ == "__main__":
    main()
