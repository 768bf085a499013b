"""Vectors are surprisal-weighted means of embeddings, whatever else is in the batch."""

import numpy as np
import torch

from farspan.retrieval.embed import Embedder, Pooling, surprisal

TEXTS = ["short", "a text of several words, and some more", "listen " * 90, "", "the server's port is open\n\nnow"]


QUERIES = [" open port", " server words", " some text"]
POOLING = Pooling(power=1.5, whiten=0.5)


def by_hand(model, tokenizer, texts, power) -> np.ndarray:
    """Surprisal-weighted mean embeddings, one text at a time, in fp32 without padding."""
    rows = []
    for text in texts:
        ids = tokenizer.encode(text)[: model.spec.context - 1]
        if not ids:
            rows.append(np.zeros(model.spec.d_model))
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[tokenizer.end_of_text, *ids[:-1]]]))[0].double()
        weights = -torch.log_softmax(logits, -1)[torch.arange(len(ids)), ids].numpy()
        embeddings = model.tok.weight[ids].detach().double().numpy()
        rows.append((weights[:, None] ** power * embeddings).sum(0) / (weights**power).sum())
    return np.array(rows)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_vectors_are_surprisal_weighted_means_centred_and_whitened(model, tokenizer, monkeypatch):
    monkeypatch.setattr("farspan.retrieval.embed._bf16_is_fast", lambda device: False)
    pooled = by_hand(model, tokenizer, TEXTS, 1.5)
    centred = pooled - pooled.mean(0)
    variances, directions = np.linalg.eigh(centred.T @ centred / len(TEXTS))
    whitening = directions * np.clip(variances, variances[-1] * 1e-6, None) ** -0.25
    asked = by_hand(model, tokenizer, QUERIES, 1.5)
    expected_queries = unit((asked - asked.mean(0)) @ whitening)
    embedder, vectors = Embedder.fit(model, tokenizer, TEXTS, QUERIES, POOLING)
    # An eigenvector's sign is free: compare what a search sees, the inner products.
    np.testing.assert_allclose(vectors @ vectors.T, unit(centred @ whitening) @ unit(centred @ whitening).T, atol=1e-3)
    np.testing.assert_allclose(
        vectors @ embedder.queries(QUERIES).T, unit(centred @ whitening) @ expected_queries.T, atol=1e-3
    )  # fmt: skip
    np.testing.assert_allclose(embedder.passages(TEXTS), vectors, atol=1e-5)


def test_surprisal_in_parts_and_padded_is_the_models_loss(model, tokenizer, monkeypatch):
    monkeypatch.setattr("farspan.retrieval.embed._bf16_is_fast", lambda device: False)
    monkeypatch.setattr("farspan.retrieval.embed._LOGITS", 3 * model.spec.vocab_size)
    tokens = torch.randint(0, model.spec.vocab_size, (4, 11), generator=torch.Generator().manual_seed(0))
    inside = torch.arange(10) < torch.tensor([[10], [1], [7], [3]])
    with torch.no_grad():
        log_p = torch.log_softmax(model(tokens[:, :-1]), -1)
        expected = -log_p.gather(2, tokens[:, 1:, None])[..., 0][inside]
        torch.testing.assert_close(surprisal(model, tokens, inside), expected, atol=1e-5, rtol=1e-5)


def test_a_vector_does_not_depend_on_the_rest_of_its_batch(model, tokenizer, documents):
    texts = [document.text for document in documents]
    embedder, _ = Embedder.fit(model, tokenizer, texts, QUERIES, Pooling())
    together = embedder.passages(TEXTS + texts)[: len(TEXTS)]
    alone = np.concatenate([embedder.passages([text]) for text in TEXTS])
    assert np.einsum("nd,nd->n", together, alone).min() > 0.999


def test_saved_and_loaded_gives_the_same_vectors(model, tokenizer, documents, tmp_path):
    texts = [document.text for document in documents]
    embedder, vectors = Embedder.fit(model, tokenizer, texts, QUERIES, Pooling())
    embedder.save(tmp_path / "fitted.safetensors")
    loaded = Embedder.load(model, tokenizer, Pooling(), tmp_path / "fitted.safetensors")
    np.testing.assert_allclose(loaded.passages(texts), vectors, atol=1e-6)
    np.testing.assert_allclose(loaded.queries(QUERIES), embedder.queries(QUERIES), atol=1e-6)


def test_full_whitening_gives_every_direction_the_same_variance(model, tokenizer, documents):
    texts = [document.text for document in documents]
    embedder, _ = Embedder.fit(model, tokenizer, texts, QUERIES, Pooling(whiten=1.0))
    pooled = embedder.pool(texts)
    whitened = (pooled - embedder._fitted["passage_mean"]) @ embedder._fitted["whitening"]
    covariance = np.cov(whitened.numpy().T, bias=True)
    kept = np.diag(covariance) > 0.9
    assert kept.sum() > 20
    np.testing.assert_allclose(covariance[np.ix_(kept, kept)], np.eye(kept.sum()), atol=0.02)


def test_equal_and_empty_texts_still_get_finite_vectors(model, tokenizer):
    embedder, vectors = Embedder.fit(model, tokenizer, ["same", "same"], ["same"], Pooling())
    assert np.isfinite(vectors).all()
    assert np.isfinite(embedder.passages(["", "same", "other"])).all()
    assert np.isfinite(embedder.queries(["", "same", "other"])).all()
