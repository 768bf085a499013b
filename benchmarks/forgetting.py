"""Bits a byte that models have on texts which they were not trained on, as transformers loads them.

    python -m benchmarks.forgetting TEXT MODEL [MODEL ...]

TEXT is a folder of .txt files. Six excerpts of it are read, and six of Python's `help()`. A MODEL
is a folder as transformers or `farspan export` saves it. What a model has in addition to the one
that it continues, it has forgotten.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers

#: Characters of an excerpt; a file's first ones are its title and table of contents.
EXCERPT = 3000
SKIPPED = 2000
NUM_EXCERPTS = 6


def read_excerpts(folder: Path) -> dict[str, list[str]]:
    """Return excerpts of the folder's texts and of Python's, the same ones every time."""
    rng = random.Random(0)
    files = rng.sample(sorted(folder.glob("*.txt")), NUM_EXCERPTS)
    long = sorted(name for name, text in topics.items() if len(text) > EXCERPT)
    names = rng.sample(long, NUM_EXCERPTS)
    return {
        folder.name: [file.read_text()[SKIPPED : SKIPPED + EXCERPT] for file in files],
        "help()": [topics[name][:EXCERPT] for name in names],
    }


@torch.no_grad()
def bits_per_byte(model: Path, texts: list[str]) -> float:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    nats = 0.0
    num_bytes = 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        nats += loaded(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        num_bytes += len(text.encode())
    return nats / num_bytes / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    given = parser.parse_args()
    excerpts = read_excerpts(given.text)
    for model in given.models:
        figures = (f"{name} {bits_per_byte(model, texts):.3f}" for name, texts in excerpts.items())
        print(f"{model.name}: {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
