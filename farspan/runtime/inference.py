"""A trained run as a model to use: its best weights, its tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

import torch

from farspan.corpus import tokenizer as tokenizers
from farspan.corpus.find_prepared import CORPORA, find_corpus
from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.corpus import CorpusManifest
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord, cache_folder
from farspan.domain.struct_files import load as load_struct
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.manifest import Corrupt
from farspan.runtime.device import installed_torch, usable_gpus
from farspan.runtime.model.decoder import Decoder


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, fp32, with the step that its weights are from and their
    checksum."""

    model: Decoder
    tokenizer: Tokenizer
    step: int
    weights: str


def load(run: RunFolder) -> Trained:
    """Load the weights of the best validation loss; without a validation the newest whole
    checkpoint's. Raises Refusal (checkpoint-corrupt), also where the best are damaged and a
    checkpoint, which others may be in, is whole."""
    plan = run.load_plan()
    shapes = checkpoint_folder.shapes_of(plan, [checkpoint_folder.MODEL])
    faults = list[str]()
    best = [run.best] if os.path.lexists(run.best) else []
    paths = *best, *checkpoint_folder.newest_first(run.checkpoints)
    for path in paths:
        try:
            weights, progress, digest = checkpoint_folder.read_weights(path, shapes)
        except Corrupt as error:
            faults.append(checkpoint_folder.printable(f"{path}: {error}"))
            continue
        model = Decoder(plan.model, attention=plan.train.attention)
        model.load_state_dict(weights)
        trained = Trained(model.eval(), _load_tokenizer(run), progress.step, digest)
        if best and path != run.best:
            raise Refusal(
                "checkpoint-corrupt",
                what="the best weights of this run are damaged",
                where=run.best,
                fact=faults[0],
                remedy=f"use those of step {trained.step:d}: rm -r {shell_word(run.best)}",
            )
        return trained
    raise Refusal(
        "checkpoint-corrupt",
        what="this run has no weights to use",
        where=run.checkpoints,
        fact="; ".join(faults) or "no checkpoint was written yet",
        remedy=command("resume", run.path),
    )


def on_device(trained: Trained, device: Literal["auto", "cpu", "cuda", "mps"]) -> Trained:
    """Move the model to a device of this machine; `auto` is the fastest kind that it has. Raises
    Refusal (device-missing) for one that is not there."""
    gpus = usable_gpus()
    apple = torch.backends.mps.is_available()
    chosen: str = device
    if device == "auto":
        chosen = "cuda" if gpus else "mps" if apple else "cpu"
    if (chosen == "cuda" and not gpus) or (chosen == "mps" and not apple):
        raise Refusal(
            "device-missing",
            what=f"this machine has no {chosen} device that PyTorch can use",
            where=f"--device {chosen}",
            fact=str(installed_torch()),
            remedy="leave --device out, or look: farspan doctor",
        )
    place = torch.device(f"cuda:{gpus[0]}" if chosen == "cuda" else chosen)
    return replace(trained, model=trained.model.to(place))


def _load_tokenizer(run: RunFolder) -> Tokenizer:
    if run.tokenizer.exists():
        return tokenizers.load_tokenizer(run.tokenizer)
    recorded = load_struct(run.record, RunRecord).corpus_folder
    digest = load_struct(run.corpus, CorpusManifest).hash
    corpus = find_corpus(recorded, digest)
    # Where it is gone, `farspan prepare` makes it in the cache of today.
    folder = corpus or cache_folder() / CORPORA / digest
    fix = shell_line("cp", folder / run.tokenizer.name, run.path)
    raise Refusal(
        "path-missing",
        what="the run has lost its tokenizer",
        where=run.tokenizer,
        fact="without it no text becomes tokens",
        remedy=f"{fix}   (from its corpus)" if corpus else f"{run.prepare_command()} && {fix}",
    )
