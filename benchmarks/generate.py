"""What keeping keys and values saves while text is written: 200 tokens with and without, in turn,
in one process.

    python benchmarks/generate.py [--threads 2]

Models are untrained Llamas; the likeliest token is taken, so that both ways must write the same.
Medians of five pairs are printed and written to results/generate.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.run import source_commit
from farspan.domain.struct_files import save
from farspan.runtime.model.decoder import Decoder, initialize_model
from farspan.runtime.model.kv_cache import KVCache

RESULTS = Path(__file__).parent / "results" / "generate.json"
TOKENS = 200
PAIRS = 5
#: Layers, width, heads, width of the MLP, vocabulary.
SHAPES = ((3, 192, 6, 512, 8192), (6, 384, 6, 1024, 8192), (8, 512, 8, 1365, 16384))
PROMPTS = (2, 100, 300)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    parameters: int
    prompt_tokens: int
    whole_s: float
    kept_s: float
    ratio: float
    equal: bool


@torch.no_grad()
def whole(model: Decoder, prompt: list[int]) -> list[int]:
    """Every state of every step computed again."""
    ids = list(prompt)
    for _ in range(TOKENS):
        ids.append(int((model.head_VD @ model.hidden_states(torch.tensor([ids]))[0, -1]).argmax()))
    return ids


@torch.no_grad()
def kept(model: Decoder, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    cache = KVCache(model)
    for _ in range(TOKENS):
        ids.append(
            int((model.head_VD @ cache.append_tokens(torch.tensor(ids[cache.length :]))).argmax())
        )
    return ids


def timed(write: Callable[[], list[int]]) -> tuple[float, list[int]]:
    start = time.perf_counter()
    ids = write()
    return time.perf_counter() - start, ids


def measure(model: Decoder, prompt_tokens: int) -> Row:
    prompt = torch.randint(
        2, 4000, (prompt_tokens,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    pairs = [
        (timed(lambda: whole(model, prompt)), timed(lambda: kept(model, prompt)))
        for _ in range(PAIRS)
    ]
    return Row(
        parameters=count_parameters(model.spec),
        prompt_tokens=prompt_tokens,
        whole_s=statistics.median(a for (a, _), _ in pairs),
        kept_s=statistics.median(b for _, (b, _) in pairs),
        ratio=statistics.median(a / b for (a, _), (b, _) in pairs),
        equal=all(x == y for (_, x), (_, y) in pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    rows = []
    for layers, width, heads, mlp, vocabulary in SHAPES:
        model = Decoder(
            ModelSpec(
                family="llama",
                layers=layers,
                d_model=width,
                heads=heads,
                kv_heads=heads,
                d_ff=mlp,
                vocab_size=vocabulary,
                context=512,
                norm="rmsnorm",
                activation="swiglu",
                positions="rope",
                bias=False,
                tied=True,
            )
        ).eval()
        initialize_model(model, 0)
        for prompt_tokens in PROMPTS:
            row = measure(model, prompt_tokens)
            rows.append(row)
            print(
                f"{row.parameters / 1e6:5.1f} M, {prompt_tokens:3} tokens before: "
                f"{row.whole_s:6.2f} s without, "
                f"{row.kept_s:5.2f} s with, {row.ratio:5.2f} times; equal: {row.equal}",
                flush=True,
            )
    save({"commit": source_commit(), "threads": threads, "tokens": TOKENS, "rows": rows}, RESULTS)


if __name__ == "__main__":
    main()
