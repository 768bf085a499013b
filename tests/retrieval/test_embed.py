"""Vectors are of a text's tokens and of the model's states, fitted so that what belongs together
lies near."""

import random
import re

import numpy as np
import torch

from farspan.retrieval.contrastive_fit import embed_texts, fit_embedder
from farspan.retrieval.embed import Embedder
from farspan.retrieval.index import FitSettings
from farspan.retrieval.pairs import Pairs
from farspan.retrieval.pooling import Processes
from tests.retrieval.conftest import fit, paired

TEXTS = [
    "short",
    "a text of several words, and some more",
    "listen " * 90,
    "",
    "the server's port is open\n\nnow",
]
TITLES = [" open port", " server words", " some text"]
OWNERS = [4, 4, 1]


def by_hand(model, tokenizer, texts, corpus) -> np.ndarray:
    """Every stream of every text averaged with inverse document frequencies, one text at a time,
    without padding."""
    ids = [tokenizer.encode(text) for text in corpus]
    rows = []
    for text in texts:
        own = tokenizer.encode(text)[: model.spec.context - 1]
        if not own:
            rows.append(np.zeros((model.spec.layers + 2) * model.spec.d_model))
            continue
        found = [max(1, sum(token in other for other in ids)) for token in own]
        weights = np.clip(np.log(len(corpus) / np.array(found)), 1e-3, None)
        with torch.no_grad():
            streams = list(model.residual_streams(torch.tensor([[tokenizer.end_of_text, *own]])))
            streams.append(model.norm(streams[-1]))
        rows.append(
            np.concatenate([weights @ x[0, 1:].double().numpy() / weights.sum() for x in streams])
        )
    return np.array(rows)


def test_features_are_weighted_means_of_every_stream(model, tokenizer, monkeypatch):
    monkeypatch.setattr("farspan.retrieval.pooling.bf16_is_fast", lambda device: False)
    embedder, _ = fit(model, tokenizer, TEXTS, paired(TITLES, OWNERS, 5), FitSettings())
    for texts in (TEXTS, TITLES):
        np.testing.assert_allclose(
            embedder.pool(texts), by_hand(model, tokenizer, texts, TEXTS), atol=1e-5
        )


def test_vectors_equal_the_formula_computed_in_float64(model, tokenizer, documents):
    texts = [document.text for document in documents]
    embedder, vectors = fit(
        model, tokenizer, texts, paired(TITLES, [0, 7, 3], len(texts)), FitSettings()
    )
    fitted = {name: tensor.double().numpy() for name, tensor in embedder._fitted.items()}
    for kind, found, asked in (
        ("passage", vectors, texts),
        ("query", embedder.queries(TEXTS), TEXTS),
    ):
        features = embedder.pool(asked).double().numpy()
        for row, text in enumerate(asked):
            tokens = set(
                tokenizer.encode(
                    "".join(f" {part}" for part in re.findall(r"[a-z0-9]+", text.lower()))
                )
            )
            own = sum(
                (
                    np.exp(fitted["token_weights"][token]) * fitted["table"][token]
                    for token in tokens
                ),
                np.zeros(512),
            )
            states = (features[row] - fitted[f"{kind}_mean"]) @ fitted[f"{kind}_map"]
            gated = np.exp(fitted[f"{kind}_gate"]) * states / np.linalg.norm(states)
            wanted = own / max(np.linalg.norm(own), 1e-12) + gated
            np.testing.assert_allclose(found[row], wanted / np.linalg.norm(wanted), atol=1e-4)


def test_without_pairs_nothing_is_fitted_and_texts_of_the_same_words_are_near(model, tokenizer):
    texts = ["the port of a socket", "a socket of the port", "rows and columns of a matrix"]
    _, vectors = fit(model, tokenizer, texts, paired([], [], 3), FitSettings())
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.05


def test_states_of_unseen_texts_come_near_those_of_their_passages():
    """Texts share eight factors with their passages, among forty that they do not share."""
    generator = torch.Generator().manual_seed(0)
    shared, *noise = (torch.randn(20_500, size, generator=generator) for size in (8, 40, 40))
    passages, texts = (torch.cat([shared, part], 1) for part in noise)
    assert _hit(passages, texts, [[]] * 20_500, [[]] * 20_500, FitSettings(size=48, steps=0)) < 0.1
    assert _hit(passages, texts, [[]] * 20_500, [[]] * 20_500, FitSettings(size=48)) > 0.5


def test_tokens_come_near_others_that_mean_the_same():
    """Passages say in tokens from 40 on what is asked in those below."""
    rng = random.Random(0)
    nothing = torch.zeros(4_500, 4)
    asked = [rng.sample(range(40), 4) for _ in range(4_500)]
    said = [[token + 40 for token in bag] for bag in asked]
    assert _hit(nothing, nothing, said, asked, FitSettings(size=64, steps=0)) < 0.1
    assert _hit(nothing, nothing, said, asked, FitSettings(size=64)) > 0.5


def _hit(passages, texts, said, asked, fit) -> float:
    """How often one of the last 500 texts finds its own passage first among theirs, fitted to the
    others."""
    known = len(said) - 500
    pairs = paired([""] * known, range(known), known)
    bags = (said[:known], asked[:known])
    features = (passages[:known], texts[:known])
    fitted = fit_embedder(bags, features, torch.ones(80), pairs, passages.shape[1], fit)
    a = embed_texts(fitted, said[known:], passages[known:], "passage")
    b = embed_texts(fitted, asked[known:], texts[known:], "query")
    return float(((b @ a.T).argmax(1) == np.arange(500)).mean())


def test_hard_negatives_are_moved_apart_from_texts_like_them():
    """Asked for token 0, passages that have it and token 1 are right, those that have it and token
    2 are not."""
    rng = random.Random(0)
    said = [[0, 1 + row % 2, *rng.sample(range(3, 60), 6)] for row in range(400)]
    features = torch.zeros(400, 4)
    right = [row for row in range(400) if not row % 2]
    for given in (False, True):
        negatives = [[row + 1] * given for row in right]
        pairs = Pairs([""] * 200, list(range(200)), right, negatives, np.arange(400))
        fitted = fit_embedder(
            (said, [[0]] * 200),
            (features, features[:200]),
            torch.ones(60),
            pairs,
            4,
            FitSettings(batch=32),
        )
        asked = embed_texts(fitted, [[0]], features[:1], "query")[0]
        apart = embed_texts(fitted, said, features, "passage") @ asked
        assert (apart[::2].mean() - apart[1::2].mean() > 0.2) == given


def test_a_vector_does_not_depend_on_the_rest_of_its_batch(model, tokenizer, documents):
    texts = [document.text for document in documents]
    embedder, _ = fit(model, tokenizer, texts, paired(TITLES, OWNERS, len(texts)), FitSettings())
    together = embedder.passages(TEXTS + texts)[: len(TEXTS)]
    alone = np.concatenate([embedder.passages([text]) for text in TEXTS])
    assert np.einsum("nd,nd->n", together, alone).min() > 0.999


def test_saved_and_loaded_gives_the_same_vectors(model, tokenizer, documents, tmp_path):
    texts = [document.text for document in documents]
    embedder, vectors = fit(
        model, tokenizer, texts, paired(TITLES, OWNERS, len(texts)), FitSettings()
    )
    embedder.save(tmp_path / "fitted.safetensors")
    loaded = Embedder.load(model, tokenizer, tmp_path / "fitted.safetensors")
    np.testing.assert_allclose(loaded.passages(texts), vectors, atol=1e-6)
    np.testing.assert_allclose(loaded.queries(TITLES), embedder.queries(TITLES), atol=1e-6)


def test_equal_and_empty_texts_still_get_finite_vectors(model, tokenizer):
    embedder, vectors = fit(
        model, tokenizer, ["same", "same"], paired(["same"], [0], 2), FitSettings()
    )
    assert np.isfinite(vectors).all()
    assert np.isfinite(embedder.passages(["", "same", "other"])).all()
    assert np.isfinite(embedder.queries(["", "same", "other"])).all()


def test_several_processes_give_the_vectors_of_one(model, tokenizer, documents):
    texts = [f"{document.text} {n}" for n in range(6) for document in documents]
    embedder, _ = fit(model, tokenizer, texts, paired(TITLES, OWNERS, len(texts)), FitSettings())
    with Processes(2) as processes:
        shared = Embedder(model, tokenizer, embedder._fitted, processes=processes).passages(texts)
    np.testing.assert_allclose(shared, embedder.passages(texts), atol=1e-5)
