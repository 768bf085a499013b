"""Vectors are weighted means of the model's streams under maps that bring titles near their passages."""

import numpy as np
import torch
import torch.nn.functional as F

from farspan.retrieval.embed import Embedder, _contrast
from farspan.retrieval.index import FitSettings
from farspan.retrieval.pooling import Processes

TEXTS = ["short", "a text of several words, and some more", "listen " * 90, "", "the server's port is open\n\nnow"]
TITLES, OWNERS = [" open port", " server words", " some text"], [4, 4, 1]


def by_hand(model, tokenizer, texts, corpus) -> np.ndarray:
    """Every stream of every text averaged with inverse document frequencies, one text at a time, without padding."""
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
            streams = list(model.streams(torch.tensor([[tokenizer.end_of_text, *own]])))
            streams.append(model.norm(streams[-1]))
        rows.append(np.concatenate([weights @ x[0, 1:].double().numpy() / weights.sum() for x in streams]))
    return np.array(rows)


def test_features_are_weighted_means_of_every_stream(model, tokenizer, monkeypatch):
    monkeypatch.setattr("farspan.retrieval.pooling.bf16_is_fast", lambda device: False)
    embedder, _ = Embedder.fit(model, tokenizer, TEXTS, TITLES, OWNERS, FitSettings())
    for texts in (TEXTS, TITLES):
        np.testing.assert_allclose(embedder.pool(texts), by_hand(model, tokenizer, texts, TEXTS), atol=1e-5)


def test_without_pairs_vectors_keep_the_angles_of_whitened_features(model, tokenizer, documents, monkeypatch):
    monkeypatch.setattr("farspan.retrieval.pooling.bf16_is_fast", lambda device: False)
    texts = [document.text for document in documents]
    embedder, vectors = Embedder.fit(model, tokenizer, texts, [], [], FitSettings(size=10_000))
    features = embedder.pool(texts).double().numpy()
    parts = []
    for part in np.split(features - features.mean(0), model.spec.layers + 2, axis=1):
        variances, directions = np.linalg.eigh(part.T @ part / len(texts))
        kept = variances >= variances[-1] * 1e-6
        parts.append(part @ directions[:, kept] * variances[kept] ** -0.5)
    whitened = np.concatenate(parts, axis=1)
    whitened /= np.linalg.norm(whitened, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors @ vectors.T, whitened @ whitened.T, atol=2e-2)


def test_the_maps_turn_unseen_titles_towards_their_passages():
    """Titles share eight factors with their passages, among forty that they do not share."""
    generator = torch.Generator().manual_seed(0)
    shared, *noise = (torch.randn(20_500, size, generator=generator) for size in (8, 40, 40))
    passages, titles = (torch.cat([shared, part], 1) for part in noise)
    fitted = _contrast(passages[:20_000], titles[:20_000], FitSettings(size=48))
    before = _hit(passages[20_000:], titles[20_000:], (torch.eye(48), torch.eye(48)))
    after = _hit(passages[20_000:], titles[20_000:], fitted)
    assert before < 0.1
    assert after > 0.5


def _hit(passages, titles, maps) -> float:
    """How often a title finds its own passage first."""
    a, b = (F.normalize(x @ m, dim=1) for x, m in zip((passages, titles), maps, strict=True))
    return float(((b @ a.T).argmax(1) == torch.arange(len(a))).float().mean())


def test_a_vector_does_not_depend_on_the_rest_of_its_batch(model, tokenizer, documents):
    texts = [document.text for document in documents]
    embedder, _ = Embedder.fit(model, tokenizer, texts, TITLES, OWNERS, FitSettings())
    together = embedder.passages(TEXTS + texts)[: len(TEXTS)]
    alone = np.concatenate([embedder.passages([text]) for text in TEXTS])
    assert np.einsum("nd,nd->n", together, alone).min() > 0.999


def test_saved_and_loaded_gives_the_same_vectors(model, tokenizer, documents, tmp_path):
    texts = [document.text for document in documents]
    embedder, vectors = Embedder.fit(model, tokenizer, texts, TITLES, OWNERS, FitSettings())
    embedder.save(tmp_path / "fitted.safetensors")
    loaded = Embedder.load(model, tokenizer, tmp_path / "fitted.safetensors")
    np.testing.assert_allclose(loaded.passages(texts), vectors, atol=1e-6)
    np.testing.assert_allclose(loaded.queries(TITLES), embedder.queries(TITLES), atol=1e-6)


def test_equal_and_empty_texts_still_get_finite_vectors(model, tokenizer):
    embedder, vectors = Embedder.fit(model, tokenizer, ["same", "same"], ["same"], [0], FitSettings())
    assert np.isfinite(vectors).all()
    assert np.isfinite(embedder.passages(["", "same", "other"])).all()
    assert np.isfinite(embedder.queries(["", "same", "other"])).all()


def test_processes_give_what_one_gives(model, tokenizer, documents):
    texts = [f"{document.text} {n}" for n in range(6) for document in documents]
    embedder, _ = Embedder.fit(model, tokenizer, texts, TITLES, OWNERS, FitSettings())
    with Processes(2) as processes:
        shared = Embedder(model, tokenizer, embedder._fitted, processes=processes).passages(texts)
    np.testing.assert_allclose(shared, embedder.passages(texts), atol=1e-5)
