"""A process that makes an index, to be stopped: `python -m tests.retrieval.making FOLDER
[CHANGED [HALT]]`.

CHANGED documents are other ones than before. It prints BEGUN before it begins. Before it embeds
more than HALT texts it prints HALTED and waits for a line, or the end, of its input. At last it
prints how many texts it embedded and how many it found.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from farspan.corpus.distinct_texts import Copies
from farspan.corpus.tokenizer import Tokenizer, train_bpe_tokenizer
from farspan.domain.corpus import Document
from farspan.domain.model import ModelSpec
from farspan.retrieval.build import build
from farspan.retrieval.embed import Embedder
from farspan.retrieval.index import Index, IndexManifest, NoModels, Origin, Recipe
from farspan.retrieval.index_task import Task
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.own_voice import OwnModel
from farspan.retrieval.queries import Query
from farspan.runtime.model.decoder import Decoder, initialize_model
from tests.retrieval.conftest import make_documents

BEGUN = "begun"
HALTED = "halted"
ORIGIN = Origin(model="m", tokenizer="t")
DOCUMENTS = make_documents(200)
TOKENIZER = train_bpe_tokenizer((document.text for document in DOCUMENTS[:60]), 512)
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
    initialize_model(made, seed)
    return made


class OwnModels(NoModels):
    """A run's model, for an index that is opened."""

    def __init__(self, own: Decoder, tokenizer: Tokenizer) -> None:
        self._own = own
        self._tokenizer = tokenizer

    def own(self, fitted: Path, origin: Origin) -> Embedder:
        return Embedder.load(self._own, self._tokenizer, fitted)


def opened(folder: Path, own: Decoder | None = None, tokenizer: Tokenizer = TOKENIZER) -> Index:
    """The index at `folder`, with the model that made it."""
    return Index.open(folder, OwnModels(own or model(5), tokenizer), remedy="embed")


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
    say=lambda line: None,
    copies: Copies | None = None,
    origin: Origin = ORIGIN,
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
            voices=[OwnModel(model=model(seed), tokenizer=TOKENIZER, origin=origin)],
            documents=documents,
            train=170,
            origin=origin,
            recipe=Recipe(**recipe),
            write_line=say,
            work=work,
            refit=refit,
            source=source,
            own=own,
            copies=copies,
        )
    )
    return work, manifest


def start(folder: Path, *, change: int = 0, halt: int | None = None) -> subprocess.Popen[str]:
    """Start a making in a process of its own."""
    words = [sys.executable, "-m", "tests.retrieval.making", str(folder), str(change)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*words, *([] if halt is None else [str(halt)])],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def await_line(process: subprocess.Popen[str], line: str) -> None:
    """Read what a process prints up to this line."""
    assert process.stdout is not None
    for printed in process.stdout:
        if printed == f"{line}\n":
            return
    raise AssertionError(f"ended before {line!r}: {process.communicate()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    change = int(sys.argv[2])
    halt = [int(n) for n in sys.argv[3:]]
    texts = []
    streams = Decoder.residual_streams

    def watched(self: Decoder, tokens_BS: torch.Tensor):
        texts.append(len(tokens_BS))
        if halt and sum(texts) > halt[0]:
            halt.clear()
            print(HALTED, flush=True)
            sys.stdin.readline()
        return streams(self, tokens_BS)

    Decoder.residual_streams = watched
    print(BEGUN, flush=True)
    work, _ = make(place, documents=changed(change))
    assert sum(texts) == work.embedded and not halt
    print(work.embedded, work.kept)
