"""Make the tokenizer and token files of a run, or find them made."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from farspan.cli.arguments import load_config, takes_config
from farspan.cli.console import Console
from farspan.domain.units import counted, format_bytes, format_count

HELP = "make tokenizer and token files"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app.corpora import refuse_other_text
    from farspan.app.resolving import prepare_run_corpus
    from farspan.cli.show_updates import Show

    with Show(console) as show:
        folder, manifest = prepare_run_corpus(load_config(given), show, verified=True)
    refuse_other_text(Path(given.config), manifest)
    for name, split in {"train": manifest.train, "val": manifest.val}.items():
        tokens = format_count(split.tokens)
        documents = counted(split.documents, "document")
        console.write_line(
            f"{name}: {tokens} tokens, {documents}, {format_bytes(split.text_bytes)}"
        )
    for part in manifest.parts or ():
        tokens = format_count(part.train.tokens)
        documents = counted(part.train.documents, "document")
        replayed = ", replayed" if part.replay else ""
        console.write_line(f"  {part.name}: {tokens} tokens, {documents} to train on{replayed}")
    console.write_line(f"in {folder}")
    readable = manifest.without_checksums()
    console.answer({"folder": str(folder), "manifest": msgspec.to_builtins(readable)})
