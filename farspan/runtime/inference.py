"""A trained run as a model to use: its best weights, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from farspan.corpus import tokenizer as tokenizers
from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.runtime import checkpoint
from farspan.runtime.model import Decoder


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, fp32, with the step that its weights are from and their checksum."""

    model: Decoder
    tokenizer: Tokenizer
    step: int
    weights: str


def load(run: RunFolder) -> Trained:
    """The weights of the best validation loss, or the newest whole checkpoint's where there was no validation."""
    plan = run.load_plan()
    candidates = [run.best, *checkpoint.newest_first(run.checkpoints)]
    faults: list[str] = []
    for path in candidates:
        if not path.exists():
            continue
        try:
            weights = checkpoint.read_weights(path)
            progress, digest = checkpoint.progress_of(path)
        except checkpoint.Corrupt as error:
            faults.append(f"{path}: {error}")
            continue
        model = Decoder(plan.model, attention=plan.train.attention)
        model.load_state_dict(weights)
        return Trained(model.eval(), tokenizers.load(run.tokenizer), progress.step, digest)
    raise Refusal(
        "checkpoint-corrupt",
        what="this run has no weights to use",
        where=run.checkpoints,
        fact="; ".join(faults) or "no checkpoint was written yet",
        remedy=f"farspan resume {run.path}",
    )
