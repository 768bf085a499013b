"""Commands whose answer is the same on every machine, and the folder that they are given in."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ASKED = ("plan", "--model", "gpt2m", "--cluster", "fabric/gat-amst")
CLUSTER = """\
sites:
  a: {hosts: {one: {devices: [{kind: cpu-avx2, memory: 4GB, count: 2}], cpus: 2, memory: 8GB}}}
  b: {price: 0.4, hosts: {two: {devices: [{kind: cpu-avx2, memory: 4GB}], cpus: 2, memory: 8GB}}}
links: [{between: [a, b], rtt: 20ms, bandwidth: 1Gbit/s}]
"""
RUN = """\
data: docs
tokenizer: {vocab: 300}
model: {layers: 1, d_model: 16, heads: 2, context: 32}
train: {steps: 4, precision: fp32, batch: {global: 4 sequences}}
parallel: {cluster: cluster.yaml}
index: {encoder: own}
"""
BAD_KEYS = (
    "train.step=3",
    "train.steps={",
    "steps",
    "train.optimizer.lr=0",
    "train.precision=fp8",
    "model.family=lama",
    "parallel.workers=all",
    "train.epochs=.inf",
    "train.batch.global=0",
    "data.val=120%",
    "budget.time=5 parsecs",
    "checkpoint.every=never",
    "size=tinny",
    "name=../elsewhere",
    "parallel.technique=magic",
    "parallel.cluster=none.yaml",
    "parallel.workers=9",
    "index.store=magic",
    "tokenizer.vocab=3",
    "data.source=dosc",
)

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("--version",),
    ("--help",),
    ("trian",),
    ("train", "--bogus"),
    ("init",),
    ASKED,
    (*ASKED, "--why", "--diff", "data", "1", "--show"),
    (
        *ASKED,
        "--tokens",
        "16M",
        "--technique",
        "data",
        "--technique",
        "zero2",
        "--technique",
        "diloco",
        "--all",
    ),
    (*ASKED, "--objective", "fewest_devices", "--tolerance", "0.5"),
    (
        *ASKED,
        "--batch",
        "256k tokens",
        "--seq-len",
        "512",
        "--precision",
        "fp16",
        "--attention",
        "vanilla",
        "--recompute",
    ),
    (
        "plan",
        "--model",
        "gpt2",
        "--cluster",
        "fabric/utah-mass",
        "--technique",
        "fsdp",
        "--export",
        "torchtitan",
        "--export-to",
        "t.toml",
    ),
    (
        "plan",
        "--model",
        "gpt2",
        "--cluster",
        "cluster.yaml",
        "--wan-bits",
        "8",
        "-o",
        "p.json",
        "--html",
        "p.html",
    ),
    ("plan", "--model", "124M", "--cluster", "slm-cost/a100-80"),
    ("fit", "model", "--cluster", "fabric/tacc-tacc"),
    ("fit", "batch", "--model", "gpt2", "--cluster", "fabric/bris-star"),
    ("fit", "memory", "--model", "gpt2", "--cluster", "fabric/utah-gpn"),
    (
        "rent",
        "--model",
        "30M",
        "--tokens",
        "1B",
        "--usd",
        "50",
        "--technique",
        "data",
        "--device",
        "a100-80",
        "--device",
        "t4",
    ),
    ("plan", "run.yaml", "--resolved"),
    ("plan", "run.yaml", "--set", "parallel.technique=pipeshard", "--why"),
    ("plan", "--model", "70B", "--cluster", "fabric/gat-amst"),
    ("plan", "--model", "nope", "--cluster", "fabric/gat-amst"),
    ("plan", "--model", "gpt2"),
    ("plan", "--model", "gpt2", "--cluster", "nowhere"),
    (*ASKED, "--tolerance", "99"),
    (*ASKED, "--technique", "dta"),
    (*ASKED, "--pick", "99"),
    (*ASKED, "--diff", "data", "magic"),
    (*ASKED, "--precision", "fp9"),
    (*ASKED, "--seq-len", "0"),
    (*ASKED, "--tokens", "none"),
    (*ASKED, "--export", "none"),
    ("price", "p.json", "--cluster", "cluster.yaml"),
    ("fit", "model"),
    ("rent",),
    (*ASKED, "--objective", "cost"),
    ("cluster", "list"),
    ("cluster", "show", "cluster.yaml"),
    ("cluster", "check", "cluster.yaml"),
    ("cluster", "show", "fabric/gat-amst"),
    ("cluster", "check", "nowhere.yaml"),
    ("cluster",),
    ("reproduce", "fabric"),
    ("reproduce", "slm-cost"),
    ("reproduce", "nothing"),
    ("prepare", "run.yaml"),
    ("prepare", "rum.yaml"),
    ("prepare", "docs"),
    ("init", "docs", "--out", "b.yaml"),
    ("init", "docs", "--out", "run.yaml"),
    ("init", "dosc", "--out", "c.yaml"),
    ("init", "docs", "--out", "c.yaml", "--time", "soon"),
    ("probe", "--cluster", "nowhere", "-o", "m.yaml"),
    ("probe", "--cluster", "fabric/gat-amst", "-o", "none/m.yaml"),
    ("select", "-o", "none/plan.json"),
    ("select", "run.yaml", "--delta", "7"),
    ("select", "run.yaml", "--budget", "soon"),
    ("select", "run.yaml", "--epsilon", "many"),
    ("resume", "docs"),
    ("resume",),
    ("report", "runs/none"),
    ("report",),
    ("compare", "runs/a"),
    ("compare", "runs/a", "runs/b"),
    ("export", "docs"),
    ("generate", "hi", "--run", "none"),
    ("generate", "--tokens", "0"),
    ("embed", "none"),
    ("search", "  "),
    ("search", "x", "--run", "none"),
    ("search", "x", "-k", "0"),
    ("bench", "none"),
    ("lab", "up", "none.yaml"),
    ("doctor", "--cluster", "nowhere"),
    ("train", "rum.yaml"),
    ("train", "run.yaml", "--plan", "none.json"),
    ("train", "run.yaml", "--plan", "cluster.yaml"),
    ("train", "run.yaml", "--run", "docs"),
    *(("prepare", "run.yaml", "--set", override) for override in BAD_KEYS),
    *(("plan", "run.yaml", "--set", override) for override in BAD_KEYS),
)


@contextmanager
def desk() -> Iterator[Path]:
    """A folder with some text, a run.yaml and a cluster file, as the working folder; all caches are
    in it too."""
    rng = random.Random(7)
    before = Path.cwd()
    cache = os.environ.get("FARSPAN_CACHE")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "docs").mkdir()
        words = [
            "time",
            "year",
            "people",
            "way",
            "day",
            "thing",
            "life",
            "world",
            "school",
            "state",
            "family",
            "group",
        ]
        for number in range(40):
            text = " ".join(rng.choice(words) for _ in range(200))
            (folder / "docs" / f"{number:02}.txt").write_text(f"Document {number}\n\n{text}.\n")
        (folder / "cluster.yaml").write_text(CLUSTER)
        (folder / "run.yaml").write_text(RUN)
        os.environ["FARSPAN_CACHE"] = str(folder / "cache")
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
            if cache is None:
                del os.environ["FARSPAN_CACHE"]
            else:
                os.environ["FARSPAN_CACHE"] = cache
