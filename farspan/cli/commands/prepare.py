"""Make the tokenizer and token files of a run, or find them made."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from farspan.cli import job
from farspan.cli.console import Console
from farspan.cli.runs import load_config
from farspan.domain.units import format_bytes, format_count

HELP = "make tokenizer and token files"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="RUN.YAML", nargs="?", default="run.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of run.yaml")


def run(given: argparse.Namespace, console: Console) -> None:
    folder, manifest = job.prepare(load_config(Path(given.config), given.set), console)
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        size = format_bytes(split.text_bytes)
        console.say(f"{name}: {format_count(split.tokens)} tokens, {split.documents:,} documents, {size}")
    console.say(f"in {folder}")
    console.answer({"folder": str(folder), "manifest": msgspec.to_builtins(manifest)})
