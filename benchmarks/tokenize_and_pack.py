"""Tokenize and pack: farspan against `datasets.map` with the same tokenizer and number of
processes, in one run.

Both start from the same text on disk in their own form (farspan's shards, an Arrow data set) and
end with one file of uint16 tokens. Repetitions alternate; each reports megabytes of UTF-8 text a
second. Then the peak memory (PSS of all processes together, sampled) of the whole of `prepare` for
10 MB and 200 MB. The text is pydocs repeated, with the words of each line of a repetition rotated
by its number, so that no two documents are alike.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from farspan.corpus import shard_stages, tokenizer
from farspan.corpus.documents import read_lines
from farspan.corpus.prepare import prepare_corpus
from farspan.corpus.sources import open_source
from farspan.domain.config import DataConfig, TokenizerConfig
from farspan.domain.corpus import Document

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def rotated(text: str, by: int) -> str:
    """Every line with its words rotated: the same words, other word triples."""
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        words = line.split()
        turn = by % len(words) if words else 0
        lines.append(indent + " ".join(words[turn:] + words[:turn]))
    return "\n".join(lines)


def make_text(file: Path, size_bytes: int, documents: list[Document]) -> int:
    """Write about `size_bytes` of text as JSON lines; its true number of bytes."""
    written = by = 0
    with file.open("w") as out:
        while written < size_bytes:
            for document in documents:
                if written >= size_bytes:
                    break
                text = rotated(document.text, by)
                out.write(json.dumps({"text": text, "title": f"{document.title} {by}"}) + "\n")
                written += len(text.encode())
            by += 1
    return written


def farspan_route(work: Path, tokenizer_file: Path, workers: int) -> int:
    """Encode spooled shards and join them; tokens written."""
    stems = sorted(path.with_suffix("") for path in work.glob("*.shard"))
    for path in work.glob("*.encode_shard.done"):
        path.unlink()
    shard_stages.each_shard(
        shard_stages.encode_shard, [(stem, tokenizer_file) for stem in stems], workers
    )
    final = work / "final"
    final.mkdir(exist_ok=True)
    return shard_stages.join_shards(stems, final).splits["train"].tokens


def encode_rows(rows: dict[str, list[str]], tokenizer_file: str) -> dict[str, list[list[int]]]:
    words = plain_tokenizer(tokenizer_file)
    end = words.token_to_id(tokenizer.END_OF_TEXT)
    encodings = words.encode_batch_fast(rows["text"], add_special_tokens=False)
    return {"ids": [[*encoding.ids, end] for encoding in encodings]}


@functools.lru_cache(maxsize=1)
def plain_tokenizer(file: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(file)


def datasets_route(arrow: Path, tokenizer_file: Path, workers: int) -> int:
    """`datasets.map` over processes, then every row into one memory-mapped file, as nanoGPT's
    preparation does."""
    import datasets  # here: what this file imports, every spawned worker imports too

    rows = datasets.load_from_disk(str(arrow))
    mapped = rows.map(
        encode_rows,
        batched=True,
        num_proc=workers,
        remove_columns=rows.column_names,
        load_from_cache_file=False,
        fn_kwargs={"tokenizer_file": str(tokenizer_file)},
    )
    with (arrow / "train.bin").open("wb") as file:
        for batch in mapped.with_format("numpy").iter(batch_size=1000):
            file.write(np.concatenate(batch["ids"]).astype(np.uint16).tobytes())
    return (arrow / "train.bin").stat().st_size // 2


def compare(
    size_bytes: int, repetitions: int, workers: int, folder: Path, documents: list[Document]
) -> Row:
    """Interleaved repetitions of both routes over the same text."""
    import datasets

    datasets.disable_progress_bars()
    text_bytes = make_text(folder / "text.jsonl", size_bytes, documents)
    (folder / "work").mkdir()
    for number, shard in enumerate(
        shard_stages.spool_sources([open_source(str(folder / "text.jsonl"))], folder / "work")
    ):
        np.save(
            folder / "work" / f"{number:05}.fates.npy",
            np.full(shard.documents, shard_stages.TRAIN, np.uint8),
        )
    texts = [
        document.text
        for path in sorted((folder / "work").glob("*.docs"))
        for document in read_lines(path)
    ]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "arrow")
    words = folder / "tokenizer.json"
    tokenizer.train_bpe_tokenizer((document.text for document in documents), 8192).save(words)
    routes: dict[str, Callable[[], int]] = {
        "farspan": lambda: farspan_route(folder / "work", words, workers),
        "datasets.map": lambda: datasets_route(folder / "arrow", words, workers),
    }
    rates: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(repetitions):
        tokens = set()
        for name, route in routes.items():
            start = time.perf_counter()
            tokens.add(route())
            rates[name].append(text_bytes / 1e6 / (time.perf_counter() - start))
        assert len(tokens) == 1, "both routes write the same number of tokens"
    same = (folder / "work" / "final" / "train.bin").read_bytes() == (
        folder / "arrow" / "train.bin"
    ).read_bytes()
    assert same, "both routes write the same tokens"
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "figure": "tokenize",
        "text_bytes": text_bytes,
        "workers": workers,
        "mb_per_s": rates,
        "median": medians,
        "ratio": medians["farspan"] / medians["datasets.map"],
    }


def peak_memory(size_bytes: int, workers: int, folder: Path, documents: list[Document]) -> Row:
    """PSS of a fresh process that prepares a corpus, with all its children: the highest of samples
    20 ms apart."""
    folder.mkdir()
    text_bytes = make_text(folder / "text.jsonl", size_bytes, documents)
    command = [sys.executable, __file__, "--prepare", str(folder), "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    start = time.perf_counter()
    while process.poll() is None:
        peak = max(peak, tree_pss(process.pid))
        time.sleep(0.02)
    assert process.returncode == 0
    return {
        "figure": "memory",
        "text_bytes": text_bytes,
        "peak_bytes": peak,
        "seconds": time.perf_counter() - start,
    }


def tree_pss(pid: int) -> int:
    """Proportional set size of a process and its descendants, bytes; those that just ended count
    nothing."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = 1024 * int(line.split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return total
    return total + sum(tree_pss(int(child)) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="8 MB, two repetitions; memory for 10 MB and 40 MB"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        data = DataConfig(source=str(options.prepare / "text.jsonl"))
        prepare_corpus(
            data,
            TokenizerConfig(vocab=8192),
            options.prepare / "root",
            workers=options.workers,
            write_line=print,
        )
        return
    documents = list(open_source("pydocs").documents())
    size, repetitions, memory_sizes = (8, 2, (10, 40)) if options.quick else (100, 4, (10, 200))
    folder = Path(tempfile.mkdtemp(prefix="farspan-tokenize-"))
    try:
        rows = [compare(size * 10**6, repetitions, options.workers, folder, documents)]
        rows += [
            peak_memory(mb * 10**6, options.workers, folder / f"{mb}", documents)
            for mb in memory_sizes
        ]
    finally:
        shutil.rmtree(folder)
    report(rows)


def report(rows: list[Row]) -> None:
    """Print the figures and append them, with what they were measured on, to
    results/tokenize.jsonl."""
    speed, small, large = rows
    for name, rates in speed["mb_per_s"].items():
        print(
            f"{name:>14}: median {statistics.median(rates):.1f} MB/s of "
            f"{[round(rate, 1) for rate in rates]}"
        )
    print(f"{'ratio':>14}: {speed['ratio']:.2f}")
    for row in (small, large):
        print(
            f"{'peak memory':>14}: {row['peak_bytes'] / 1e6:.0f} MB for "
            f"{row['text_bytes'] / 1e6:.0f} MB of text"
        )
    environment = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **{
            name: importlib.metadata.version(name)
            for name in ("datasets", "tokenizers", "tiktoken")
        },
        "start": multiprocessing.get_start_method(),
        "commit": subprocess.check_output(
            ["git", "rev-parse", "--short", "HEAD"], text=True
        ).strip(),
    }
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "tokenize.jsonl").open("a") as file:
        for row in rows:
            file.write(json.dumps(row | {"environment": environment}) + "\n")


if __name__ == "__main__":
    main()
