"""A process that makes an index, to be stopped: `python -m tests.retrieval.making FOLDER`. Prints what it embedded."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from farspan.corpus.tokenizer import train
from farspan.domain.model import ModelSpec
from farspan.retrieval.index import Origin, Recipe, build
from farspan.retrieval.work import IndexWork
from farspan.runtime.model.decoder import Decoder, initialise
from tests.retrieval.conftest import make_documents

ORIGIN = Origin(model="m", corpus="c")
DOCUMENTS = make_documents(200)
TOKENIZER = train((document.text for document in DOCUMENTS[:60]), 512)
SPEC = ModelSpec(
    family="llama", layers=2, d_model=32, heads=2, kv_heads=2, d_ff=64, vocab_size=TOKENIZER.vocab_size, context=64,
    norm="rmsnorm", activation="swiglu", positions="rope", bias=False, tied=True,
)  # fmt: skip


def model(seed: int) -> Decoder:
    made = Decoder(SPEC).eval()
    initialise(made, seed)
    return made


def make(folder: Path, seed: int = 5, stop_after: int | None = None, **recipe) -> IndexWork:
    """Make the index of a model; Ctrl-C comes when so many texts are embedded."""

    def changed(work: IndexWork) -> None:
        if stop_after is not None and work.embedded >= stop_after:
            raise KeyboardInterrupt

    work = IndexWork(changed=changed)
    build(
        folder, model(seed), TOKENIZER, DOCUMENTS, train=170, origin=ORIGIN, recipe=Recipe(**recipe),
        say=lambda line: None, work=work,
    )  # fmt: skip
    return work


if __name__ == "__main__":
    torch.set_num_threads(1)
    texts, streams = [], Decoder.streams
    Decoder.streams = lambda self, tokens_BS: (texts.append(len(tokens_BS)), streams(self, tokens_BS))[1]
    work = make(Path(sys.argv[1]))
    assert sum(texts) == work.embedded
    print(work.embedded, work.kept)
