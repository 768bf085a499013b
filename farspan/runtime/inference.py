"""A trained run as a model to use: its best weights, its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from farspan.corpus import tokenizer as tokenizers
from farspan.corpus.find_prepared import CORPORA, find_corpus
from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.corpus import CorpusManifest
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord, cache_folder
from farspan.domain.struct_files import load as load_struct
from farspan.domain.train import Precision
from farspan.domain.units import format_bytes
from farspan.models._weight_files import require_weights
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.manifest import Corrupt
from farspan.runtime.device import installed_torch, require_openable, usable_gpus
from farspan.runtime.model import huggingface
from farspan.runtime.model.attention_policy import inference_policy
from farspan.runtime.model.compute_dtype import halve_matrices, inference_dtype
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.model.kernel_selection import set_attention
from farspan.runtime.model.linear import merge_adapters

#: What a GPU must have free beside a model's weights, for states and libraries. A choice: 32 texts
#: of 1,024 tokens through an MLP of 8,192 in 16 bits, once each way.
STATES_BYTES = 2**30


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, with the step that its weights are from, their checksum, and the
    precision that it was trained in. It is in fp32 until `on_device` moves it to a GPU."""

    model: Decoder
    tokenizer: Tokenizer
    step: int
    weights: str
    precision: Precision = "fp32"


def load(run: RunFolder) -> Trained:
    """Load the best weights (`read_best`), where adapters were trained merged into those of the
    model that they belong to."""
    plan = run.load_plan()
    best = read_best(run, plan)
    weights = best.weights
    if plan.model.lora:
        folder = base_folder(run)
        _, base = huggingface.read_model(folder)
        weights = merge_adapters(plan.model, base, weights)
    model = Decoder(plan.model.base, attention=plan.train.attention)
    model.load_state_dict(weights)
    tokenizer = _load_tokenizer(run)
    return Trained(model.eval(), tokenizer, best.step, best.digest, plan.train.precision)


def base_folder(run: RunFolder) -> Path:
    """Return the folder of the model whose adapters a run trains. Raises Refusal (path-missing, or
    plan-mismatch where it has other weights than before)."""
    record = load_struct(run.record, RunRecord)
    folder = Path(str(record.initial)).expanduser()
    require_weights(folder, record.initial_weights)
    return folder


class BestWeights(NamedTuple):
    """What a run has trained: weights by parameter name, their step, and their checksum."""

    weights: dict[str, torch.Tensor]
    step: int
    digest: str


def read_best(run: RunFolder, plan: Plan) -> BestWeights:
    """Read the weights of the best validation loss; without a validation the newest whole
    checkpoint's. Raises Refusal (checkpoint-corrupt), also where the best are damaged and a
    checkpoint, which others may be in, is whole."""
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
        if best and path != run.best:
            raise Refusal(
                "checkpoint-corrupt",
                what="the best weights of this run are damaged",
                where=run.best,
                fact=faults[0],
                remedy=f"use those of step {progress.step:d}: rm -r {shell_word(run.best)}",
            )
        return BestWeights(weights, progress.step, digest)
    raise Refusal(
        "checkpoint-corrupt",
        what="this run has no weights to use",
        where=run.checkpoints,
        fact="; ".join(faults) or "no checkpoint was written yet",
        remedy=run.resume_command(),
    )


def on_device(
    trained: Trained,
    device: Literal["auto", "cpu", "cuda", "mps"],
    report: Callable[[str], None] = lambda note: None,
) -> Trained:
    """Move the model to a device of this machine, where it computes as `inference_dtype` has it;
    `auto` is the fastest kind that it has. Raises Refusal (device-missing) for one that is not
    there.

    A GPU that cannot be opened, or has no memory for the model, is reported and left out by `auto`,
    and refused where it is asked for.
    """
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
    if chosen != "cuda":
        return replace(trained, model=trained.model.to(torch.device(chosen)))
    gpu = torch.device("cuda", gpus[0])
    dtype = inference_dtype(gpu, trained.precision).dtype
    try:
        _require_room(trained.model, gpu)
    except Refusal as refusal:
        if device != "auto":
            raise
        problem = refusal.problem
        report(f"{problem.what}: {problem.fact}; the model is used on the CPU")
        return trained
    model = trained.model.to(gpu)
    halve_matrices(model, dtype)
    set_attention(model, inference_policy(gpu, dtype))
    return replace(trained, model=model)


def on_gpu(trained: Trained, report: Callable[[str], None] = lambda note: None) -> Trained:
    """Move the model to the GPU of this machine; without one it stays where it is."""
    return on_device(trained, "auto", report) if usable_gpus() else trained


def _require_room(model: Decoder, gpu: torch.device) -> None:
    """Open a GPU. Raises Refusal (device-busy, or out-of-memory) where there is no room for a
    model."""
    name = torch.cuda.get_device_name(gpu)
    require_openable(gpu, name, "this machine")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    free = int(torch.cuda.mem_get_info(gpu)[0])
    if weights + STATES_BYTES > free:
        raise Refusal(
            "out-of-memory",
            what=f"{name} has no memory for the model",
            where=str(gpu),
            fact=f"it needs {format_bytes(weights + STATES_BYTES)}, {format_bytes(free)} are free",
            remedy="--device cpu, or end what else runs there: nvidia-smi",
        )


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
