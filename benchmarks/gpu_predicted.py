"""Steps and memory of many shapes: predicted from the catalogue's data sheet alone, then measured.

All predictions are written before anything is measured. Each shape is measured in a process of its
own, so that its memory holds nothing of another. The next process starts while one measures, and
touches the GPU only when that one has ended.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from typing import Any

import torch
from gpu_stage import Context, seconds
from gpu_step import TINY, farspan_step, plan_of

from farspan import models
from farspan.domain import catalog
from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.train import Muon, Optimizer, TrainSpec
from farspan.estimate.estimate_plan import estimate
from farspan.planning.size import shape_for

#: Seconds that one shape may take, and that are left when no further one is begun.
CASE_LIMIT_S = 60.0
SHORTEST_CASE_S = 6.0
#: What the estimate of a CPU is made for in a dry run.
DRY_KIND = "cpu-avx2"

#: Model, sequences, and what differs from bf16 with AdamW; in order of worth.
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("3m", 8, {}),
    ("gpt2", 16, {}),
    ("gpt2-medium", 16, {}),
    ("15m", 32, {}),
    ("gpt2", 16, {"precision": "fp32"}),
    ("gpt2-large", 8, {}),
    ("3m", 8, {"optimizer": Optimizer(muon=Muon())}),
    ("gpt2-medium", 16, {"recompute": True}),
    # Those before are read first; these if there is time.
    ("gpt2-medium", 16, {"compile": True}),
    ("60m", 64, {}),
    ("gpt2", 4, {}),
    ("gpt2", 32, {}),
    ("gpt2", 16, {"precision": "tf32"}),
    ("gpt2", 16, {"optimizer": Optimizer(muon=Muon())}),
    ("gpt2", 16, {"attention": "vanilla"}),
    ("3m", 64, {}),
    ("15m", 32, {"optimizer": Optimizer(muon=Muon())}),
    ("60m", 64, {"precision": "fp32"}),
)
SMALL = {"3m": 3_000_000, "15m": 15_000_000, "60m": 60_000_000}


def measure(context: Context) -> None:
    numbers = range(2) if context.dry else range(len(CASES))
    device = priced_device(context)
    if device is None:
        context.row(
            {"unknown": context.device_name}, f"not in the catalogue: {context.device_name}"
        )
    else:
        for number in numbers:
            predict(context, number, device)
    waiting = start_case(context, 0)
    for number in numbers:
        current = waiting
        following = number + 1 in numbers and context.left_s > SHORTEST_CASE_S
        waiting = start_case(context, number + 1) if following else None
        try:
            limit_s = context.left_s if context.dry else min(CASE_LIMIT_S, context.left_s)
            current.communicate("go\n", timeout=max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            current.kill()
            current.communicate()
        if current.returncode:
            context.row(
                {"case": number, "rc": current.returncode},
                f"{case_name(context, number)}: failed with {current.returncode}",
            )
        if waiting is None:
            break


def start_case(context: Context, number: int) -> subprocess.Popen[str]:
    """Return a process that imports what it needs and waits for a line before it touches the
    GPU."""
    words = [sys.executable, __file__.replace("gpu_predicted", "gpu_stage"), "gpu_predicted"]
    words += ["--rows", str(context.rows), "--folder", str(context.folder)]
    words += ["--limit", str(context.left_s), "--case", str(number)]
    words += ["--dry"] if context.dry else ["--name", context.device_name]
    return subprocess.Popen(words, stdin=subprocess.PIPE, text=True)


def case(context: Context, number: int) -> tuple[ModelSpec, TrainSpec]:
    model, sequences, knobs = CASES[number]
    if context.dry:
        spec = TINY
        sequences = 2
    elif model in SMALL:
        spec = shape_for("llama", SMALL[model], vocab_size=8192, context=256, knobs={})
    else:
        spec = models.presets()[model].spec
    words = {"steps": 1, "batch": sequences, "seq_len": spec.context, "precision": "bf16"}
    return spec, TrainSpec(**(words | knobs))


def case_name(context: Context, number: int) -> str:
    spec, train = case(context, number)
    return f"{CASES[number][0]}, {train.batch} x {spec.context}, {' '.join(knobs_of(train))}"


def knobs_of(train: TrainSpec) -> list[str]:
    return [
        train.precision,
        *(["muon"] if train.optimizer.muon else []),
        *(["recompute"] if train.recompute else []),
        *([train.attention] if train.attention != "sdpa" else []),
        *(["compile"] if train.compile else []),
    ]


def priced_device(context: Context) -> Device | None:
    if context.dry:
        return Device(kind=DRY_KIND, backend="cpu", memory=2**34)
    kind = catalog.find_kind(context.device_name)
    return catalog.load_devices()[kind].device(context.device_name) if kind else None


def predict(context: Context, number: int, device: Device) -> None:
    spec, train = case(context, number)
    cluster = Cluster(sites=(Site(name="here", hosts=(Host(name="here", devices=(device,)),)),))
    plan = plan_of(spec, train, device.backend)
    predicted = estimate(plan, models.graph(spec), cluster, load_engine("farspan"))
    memory = predicted.memory[0]
    found = {
        "case": number,
        "model": CASES[number][0],
        "rows": train.batch,
        "seq_len": train.seq_len,
        "knobs": knobs_of(train),
        "predicted_s": predicted.step_s,
        "interval": predicted.interval,
        "predicted_bytes": predicted.memory_bytes,
        "memory": {name: getattr(memory, name) for name in memory.__struct_fields__},
    }
    context.row(
        found,
        f"{case_name(context, number)}: predicted {predicted.step_s * 1e3:.2f} ms, "
        f"{predicted.memory_bytes / 1e9:.2f} GB",
    )


def measure_case(context: Context, number: int) -> None:
    spec, train = case(context, number)
    sys.stdin.readline()
    device = context.device
    on_gpu = context.device.type == "cuda"
    before = card_bytes(device) if on_gpu else None
    step = farspan_step(spec, train, device)
    seconds(step, 3, device)
    step_s = statistics.median(seconds(step, 3, device) for _ in range(5))
    found = {"case": number, "measured_s": step_s}
    text = f"{case_name(context, number)}: measured {step_s * 1e3:.2f} ms"
    if on_gpu:
        found |= {
            "bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
            # Of the allocator and the libraries; the CUDA context is in both readings.
            "card_bytes": card_bytes(device) - before,
            "card_bytes_before": before,
        }
        text += f", {found['bytes'] / 1e9:.2f} GB ({found['reserved_bytes'] / 1e9:.2f} reserved)"
    context.row(found, text)


def card_bytes(device: torch.device) -> int:
    """Bytes in use on the card, by whatever process."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free
