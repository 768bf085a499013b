"""Embeddings with 16-bit products find what those in fp32 find. The CPU stands for a GPU: it rounds
the same numbers to the same bf16."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from farspan.corpus.sources.pydocs import PyDocs
from farspan.corpus.tokenizer import train_bpe_tokenizer
from farspan.planning.size import shape_for
from farspan.retrieval.choose import Bodies, LexicalChoice
from farspan.retrieval.chunk import chunk_document
from farspan.retrieval.embed import Embedder
from farspan.retrieval.evaluate import evaluate
from farspan.retrieval.evaluation_text import mine_evaluation
from farspan.retrieval.index import Origin, Recipe
from farspan.retrieval.index_task import Task
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.own_voice import OwnModel
from farspan.retrieval.words import WordRules
from farspan.runtime.model.compute_dtype import halve_matrices
from farspan.runtime.model.decoder import Decoder, initialize_model
from tests.retrieval.making import DOCUMENTS, TOKENIZER, model

#: By how much mean nDCG@10 may fall. Noise of 0.1 % in the features of fp32 moves it by 0.004.
NDCG_BOUND = 0.01


@pytest.fixture(autouse=True)
def _fp32_is_fp32(monkeypatch):
    """Some CPUs pool in bf16 by themselves."""
    monkeypatch.setattr("farspan.retrieval.pooling.bf16_is_fast", lambda device: False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_are_those_of_fp32_but_for_rounding(dtype):
    full = model(3)
    half = copy.deepcopy(full)
    halve_matrices(half, dtype)
    texts = [document.text for document in DOCUMENTS[:60]]
    pooled = []
    for used in (full, half):
        embedder = Embedder.unfitted(used, TOKENIZER, texts)
        pooled.append(embedder.pool(texts).numpy())
    cosines = (pooled[0] * pooled[1]).sum(1)
    cosines /= np.linalg.norm(pooled[0], axis=1) * np.linalg.norm(pooled[1], axis=1)
    assert cosines.min() > 0.9999
    assert not np.array_equal(*pooled)


def test_features_of_another_dtype_are_kept_under_another_name():
    full = model(3)
    half = copy.deepcopy(full)
    halve_matrices(half, torch.bfloat16)
    ids = [torch.tensor([1, 2, 3])]
    names = [Embedder.unfitted(used, TOKENIZER, ["a"])._features_id(ids) for used in (full, half)]
    assert names[0] != names[1]


@pytest.mark.slow
def test_search_of_a_trained_model_does_not_fall_in_bf16():
    """A model trained on the built-in corpus, fitted and judged in fp32 and in bf16."""
    documents = list(itertools.islice(PyDocs().documents(), 800))
    tokenizer = train_bpe_tokenizer((document.text for document in documents), 1024)
    spec = shape_for("llama", 200_000, vocab_size=tokenizer.vocab_size, context=64, knobs={})
    trained = Decoder(spec)
    initialize_model(trained, 0)
    train_model(trained, tokenizer, [document.text for document in documents], steps=300)
    chunks = []
    for number, document in enumerate(documents):
        chunks += chunk_document(document, number, 64)

    def mean_ndcg(used: Decoder, system: str) -> float:
        origin = Origin(model="m", tokenizer="t")
        voice = OwnModel(model=used, tokenizer=tokenizer, origin=origin)
        task = Task(
            path=Path("unused"),
            voices=[voice],
            documents=documents,
            train=720,
            origin=origin,
            recipe=Recipe(),
            write_line=lambda line: None,
            work=IndexWork(),
        )
        text = mine_evaluation(
            documents, chunks, train=720, copies=task.known_copies(), own=(), seed=0
        )
        sides = voice.fit(task, text, chunks, None).sides
        bodies = Bodies(text.bodies, ["en"] * len(documents))
        lexical = LexicalChoice(rules=WordRules(languages=("en",)))
        owners = text.owners(chunks)
        evaluation = evaluate(bodies, owners, text.queries, lexical, sides, seed=0)
        kinds = evaluation.kinds.values()
        assert sum(kind.reported for kind in kinds) > 200
        return float(np.mean([kind.systems[system].ndcg_at_10 for kind in kinds]))

    half = copy.deepcopy(trained)
    halve_matrices(half, torch.bfloat16)
    full_ndcg = mean_ndcg(trained, "model")
    half_ndcg = mean_ndcg(half, "model")
    assert full_ndcg > 0.2, "the model has learned too little to be judged"
    assert half_ndcg > full_ndcg - NDCG_BOUND


def train_model(model: Decoder, tokenizer, texts: list[str], *, steps: int) -> None:
    tokens = []
    for text in texts:
        tokens += [tokenizer.end_of_text, *tokenizer.encode(text)]
    ids = torch.tensor(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 65, (8, 1), generator=random)
        batch = ids[starts + torch.arange(65)]
        loss = model.loss(batch[:, :-1], batch[:, 1:]) / (8 * 64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
