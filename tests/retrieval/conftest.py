"""A small real model, tokenizer and corpus; nothing is mocked."""

import numpy as np
import pytest
import torch

from farspan.corpus.tokenizer import Tokenizer, train_bpe_tokenizer
from farspan.domain.corpus import Document
from farspan.domain.model import ModelSpec
from farspan.retrieval.chunk import Chunk, chunk_document
from farspan.retrieval.embed import Embedder
from farspan.retrieval.index import FitSettings
from farspan.retrieval.pairs import Pairs
from farspan.retrieval.stores import Vectors
from farspan.runtime.model.decoder import Decoder, initialize_model

TOPICS = {
    "socket": "network connection server address port listen accept packet",
    "matrix": "tensor product row column multiply transpose inverse",
    "string": "letters upper lower replace join split prefix suffix",
    "thread": "lock wait queue daemon worker signal release acquire",
    "number": "integer float round divide remainder decimal digit",
}


def make_documents(count: int) -> list[Document]:
    """Titles such as `socket.listen_port7.ListenPort`; the first line names the title, the body its
    words."""
    documents = []
    for number in range(count):
        topic, words = list(TOPICS.items())[number % len(TOPICS)]
        first, second, third = (words.split()[(number // 5 + step) % 7] for step in (0, 2, 3))
        documents.append(
            Document(
                title=f"{topic}.{first}_{second}{number}.{third.title()}Base",
                text=f"{topic} {first} summary {number}.\n\nThe {topic} will {first} and {second} "
                f"its {third}"
                f" (see {words}). Case {number} of many.\n\nMore about how {topic} objects "
                f"{third}, and when.",
                origin=f"docs/{number}.txt",
            )
        )
    return documents


def chunk_documents(documents, size: int) -> list[Chunk]:
    """The chunks of several documents."""
    numbered = enumerate(documents)
    return [c for n, document in numbered for c in chunk_document(document, n, size)]


def paired(asked: list[str], owners: list[int], passages: int) -> Pairs:
    """Text i belongs to passage `owners[i]`, and every passage is of a document of its own."""
    numbers = list(range(len(asked)))
    return Pairs(list(asked), numbers, list(owners), [[] for _ in asked], np.arange(passages))


def fit(
    model: Decoder, tokenizer: Tokenizer, passages: list[str], pairs: Pairs, settings: FitSettings
) -> tuple[Embedder, Vectors]:
    """What embeds, fitted to passages and to what belongs to them; and the vectors of these."""
    start = Embedder.unfitted(model, tokenizer, passages)
    texts = start.read(passages)
    asked = start.read(pairs.asked)
    embedder = start.fitted(texts, asked, pairs, settings)
    return embedder, embedder.vectors(texts, "passage")


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """These models are too small to share out: with other work on the machine, threads would mostly
    wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    return make_documents(60)


@pytest.fixture(scope="session")
def tokenizer(documents):
    return train_bpe_tokenizer((document.text for document in documents), 512)


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def model(request, tokenizer) -> Decoder:
    gpt2 = request.param == "gpt2"
    spec = ModelSpec(
        family=request.param,
        layers=2,
        d_model=32,
        heads=2,
        kv_heads=2,
        d_ff=64,
        vocab_size=tokenizer.vocab_size,
        context=64,
        norm="layernorm" if gpt2 else "rmsnorm",
        activation="gelu_tanh" if gpt2 else "swiglu",
        positions="learned" if gpt2 else "rope",
        bias=gpt2,
        tied=True,
    )
    model = Decoder(spec).eval()
    initialize_model(model, 5)
    return model
