"""Write a run's model as a folder that transformers loads or a file that llama.cpp loads, its
embedder for sentence-transformers, or its adapters for PEFT."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli.arguments import find_run, takes_run
from farspan.cli.console import Console

HELP = "write the model as a Hugging Face folder or a GGUF file"

#: What loads each format, and how.
_LOADS = {
    "huggingface": "transformers.AutoModelForCausalLM.from_pretrained({!r})",
    "sentence-transformers": (
        "sentence_transformers.SentenceTransformer({!r}, trust_remote_code=True)"
    ),
    "gguf": "llama-cli -m {!r}",
    "peft": "peft.AutoPeftModelForCausalLM.from_pretrained({!r})",
}


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="folder to write, or file for gguf (default: RUN/export,\n"
        "RUN/sentence-transformers, RUN/model.gguf or RUN/adapters)",
    )
    parser.add_argument(
        "--format",
        choices=tuple(_LOADS),
        default="huggingface",
        help=(
            "what shall load it; sentence-transformers gets the embedder of the run's index,\n"
            "peft the adapters of a run with train.lora, which all others get merged\n"
            "(default: huggingface)"
        ),
    )
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help=(
            "of the weights: fp32, bf16, fp16, or q8_0 for gguf alone (default: that of the model\n"
            "which the run continues, else fp32)"
        ),
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help=(
            "upload the folder to this repository of the Hugging Face hub, which is private; the\n"
            "token is HF_TOKEN, or that of `hf auth login`"
        ),
    )
    parser.add_argument(
        "--public", action="store_true", help="with --push: everybody may read the repository"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_run(given, console)
    from farspan.app.model_use import export_model

    target = Path(given.out) if given.out else None
    exported = export_model(
        folder,
        target,
        dtype=given.dtype,
        format=given.format,
        push=given.push,
        public=given.public,
    )
    out = str(exported.path)
    load = _LOADS[given.format].format(out)
    answer = {"run": str(folder.path), "folder": out, "step": exported.step}
    kind = ""
    if exported.dtype != "fp32":
        kind = f" in {exported.dtype}"
        answer["dtype"] = exported.dtype
    console.write_line(f"wrote {out}{kind}; load it with {load}")
    if exported.url is not None:
        console.write_line(f"uploaded it to {exported.url}")
        answer["url"] = exported.url
    console.answer(answer)
