"""Vectors are weighted means of hidden states, whatever else is in the batch."""

import math

import numpy as np
import pytest
import torch

from farspan.retrieval.embed import Embedder, Pooling

TEXTS = ["short", "a text of several words, and some more", "listen " * 90, "", "the server's port is open\n\nnow"]


@pytest.fixture(params=[None, 0, 1])
def pooling(request):
    return Pooling(layers=request.param, whiten=0.5)


def by_hand(model, tokenizer, texts, layers) -> np.ndarray:
    """Pooled states, one text at a time in fp32 without padding."""
    ids = [tokenizer.encode(text)[: model.spec.context - 1] for text in texts]
    everything = [set(tokenizer.encode(text)) for text in texts]
    rows = []
    for text in ids:
        if not text:
            rows.append(np.zeros(model.spec.d_model))
            continue
        with torch.no_grad():
            states = model.hidden(torch.tensor([[tokenizer.end_of_text, *text]]), layers)[0, 1:].double().numpy()
        weights = np.array([math.log(len(texts) / sum(token in other for other in everything)) for token in text])
        rows.append((weights[:, None] * states).sum(0) / weights.sum())
    return np.array(rows)


def test_vectors_are_centred_whitened_weighted_means(model, tokenizer, pooling, monkeypatch):
    monkeypatch.setattr("farspan.retrieval.embed._bf16_is_fast", lambda device: False)
    pooled = by_hand(model, tokenizer, TEXTS, pooling.layers)
    centred = pooled - pooled.mean(0)
    variances, directions = np.linalg.eigh(centred.T @ centred / len(TEXTS))
    whitened = centred @ directions * np.clip(variances, variances[-1] * 1e-5, None) ** -0.25
    expected = whitened / np.linalg.norm(whitened, axis=1, keepdims=True)
    _, vectors = Embedder.fit(model, tokenizer, TEXTS, pooling)
    # Directions of an eigenvector may flip: compare what search sees, the inner products.
    np.testing.assert_allclose(vectors @ vectors.T, expected @ expected.T, atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_a_vector_does_not_depend_on_the_rest_of_its_batch(model, tokenizer, documents, pooling):
    embedder, _ = Embedder.fit(model, tokenizer, [d.text for d in documents], pooling)
    together = embedder.embed(TEXTS + [d.text for d in documents])[: len(TEXTS)]
    alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
    assert np.einsum("nd,nd->n", together, alone).min() > 0.999


def test_saved_and_loaded_gives_the_same_vectors(model, tokenizer, documents, tmp_path):
    pooling = Pooling(layers=1)
    embedder, vectors = Embedder.fit(model, tokenizer, [d.text for d in documents], pooling)
    embedder.save(tmp_path / "fitted.safetensors")
    loaded = Embedder.load(model, tokenizer, pooling, tmp_path / "fitted.safetensors")
    np.testing.assert_array_equal(loaded.embed([d.text for d in documents]), vectors)


def test_whitened_vectors_have_equal_variance_in_every_direction(model, tokenizer, documents):
    embedder, _ = Embedder.fit(model, tokenizer, [d.text for d in documents], Pooling(layers=1, whiten=1.0))
    pooled = embedder._pool(tokenizer.encode_batch([d.text for d in documents]))
    whitened = (pooled - embedder._fitted["mean"]) @ embedder._fitted["whitening"]
    covariance = np.cov(whitened.numpy().T, bias=True)
    kept = np.diag(covariance) > 0.9
    assert kept.sum() > 20
    np.testing.assert_allclose(covariance[np.ix_(kept, kept)], np.eye(kept.sum()), atol=0.02)


def test_texts_without_any_weight_or_token_still_get_a_finite_vector(model, tokenizer):
    embedder, vectors = Embedder.fit(model, tokenizer, ["same", "same"], Pooling())
    assert np.isfinite(vectors).all()
    assert np.isfinite(embedder.embed(["", "same", "other"])).all()
