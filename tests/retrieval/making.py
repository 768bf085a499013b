"""A process that makes an index, to be stopped: `python -m tests.retrieval.making FOLDER
[CHANGED]`. Prints what it embedded; with CHANGED so many documents are other ones than before."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from farspan.corpus.tokenizer import Tokenizer, train
from farspan.domain.corpus import Document
from farspan.domain.model import ModelSpec
from farspan.retrieval.build import Task, build
from farspan.retrieval.embed import Embedder
from farspan.retrieval.index import Index, IndexManifest, Origin, Recipe
from farspan.retrieval.queries import Query
from farspan.retrieval.work import IndexWork
from farspan.runtime.model.decoder import Decoder, initialise
from tests.retrieval.conftest import make_documents

ORIGIN = Origin(model="m", tokenizer="t")
DOCUMENTS = make_documents(200)
TOKENIZER = train((document.text for document in DOCUMENTS[:60]), 512)
SPEC = ModelSpec(
    family="llama",
    layers=2,
    d_model=32,
    heads=2,
    kv_heads=2,
    d_ff=64,
    vocab_size=TOKENIZER.vocab_size,
    context=64,
    norm="rmsnorm",
    activation="swiglu",
    positions="rope",
    bias=False,
    tied=True,
)


def model(seed: int) -> Decoder:
    made = Decoder(SPEC).eval()
    initialise(made, seed)
    return made


def opened(folder: Path, own: Decoder | None = None, tokenizer: Tokenizer = TOKENIZER) -> Index:
    """The index at `folder`, with the model that made it."""
    return Index.open(
        folder,
        lambda fitted, of: Embedder.load(own or model(5), tokenizer, fitted),
        command="embed",
    )


def changed(count: int) -> list[Document]:
    """The documents, the first `count` of them with other words, and as many new ones in place of
    the last."""
    some = [
        msgspec.structs.replace(d, text=f"{d.text}\n\nAnd words that are new.")
        for d in DOCUMENTS[:count]
    ]
    return [*some, *DOCUMENTS[count : len(DOCUMENTS) - count], *make_documents(200 + count)[200:]]


def make(
    folder: Path,
    seed: int = 5,
    stop_after: int | None = None,
    documents: Sequence[Document] = DOCUMENTS,
    refit: bool = False,
    source: str = "",
    own: Sequence[Query] = (),
    taught_by: Path | None = None,
    say=lambda line: None,
    **recipe,
) -> tuple[IndexWork, IndexManifest]:
    """Make the index of a model; Ctrl-C comes when so many texts are embedded."""

    def progress(work: IndexWork) -> None:
        if stop_after is not None and work.embedded >= stop_after:
            raise KeyboardInterrupt

    work = IndexWork(changed=progress)
    manifest = build(
        Task(
            path=folder,
            model=model(seed),
            tokenizer=TOKENIZER,
            documents=documents,
            train=170,
            origin=ORIGIN,
            recipe=Recipe(**recipe),
            say=say,
            work=work,
            refit=refit,
            source=source,
            own=own,
            teacher=taught_by,
        )
    )
    return work, manifest


if __name__ == "__main__":
    torch.set_num_threads(1)
    texts, streams = [], Decoder.streams

    def slowly(self: Decoder, tokens_BS: torch.Tensor):
        """Who stops the process must not come too late."""
        texts.append(len(tokens_BS))
        time.sleep(0.1)
        return streams(self, tokens_BS)

    Decoder.streams = slowly
    asked = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    work, _ = make(Path(sys.argv[1]), documents=changed(asked))
    assert sum(texts) == work.embedded
    print(work.embedded, work.kept)
