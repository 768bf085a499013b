"""A teacher: somebody else's table of words, whose likenesses the vectors of an index begin at."""

import importlib
import importlib.util
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from farspan.domain.problems import Refusal
from farspan.retrieval.index import FitSettings
from farspan.retrieval.pairs import Pairs
from farspan.retrieval.teacher import digest, word_vectors
from farspan.retrieval.tuning import tune, vectors_of
from tests.retrieval import making

WORDS = ["[UNK]", "ship", "boat", "tree", "oak", "red", "blue"]


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """As model2vec writes a model: ship and boat are nearly alike, as are tree and oak."""
    folder = tmp_path / "static"
    folder.mkdir()
    table = torch.randn(len(WORDS), 16, generator=torch.Generator().manual_seed(0))
    table[2], table[4] = table[1] + 0.1 * table[2], table[3] + 0.1 * table[4]
    save_file({"embeddings": table}, folder / "model.safetensors")
    tokenizer = Tokenizer(
        WordLevel({word: row for row, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_static_teacher_gives_similar_words_similar_vectors(static):
    found = word_vectors(static, [" ship", "boat", "tree", "oak tree", "", "  "])
    assert found.shape == (6, 16) and not found[4:].any()
    torch.testing.assert_close(found[:4].norm(dim=1), torch.ones(4))
    assert found[0] @ found[1] > 0.9 and found[2] @ found[3] > 0.9 and found[0] @ found[2] < 0.5


def test_teacher_gives_likeness_that_pairs_lack():
    """Tokens 0 and 5 are in no pair, and never in one passage."""
    bags, asked = [[0, 1], [2, 3], [5, 6]] * 4, [[1], [3]]
    pooled = tuple(
        torch.randn(len(rows), 8, generator=torch.Generator().manual_seed(1))
        for rows in (bags, asked)
    )
    pairs = Pairs(
        asked=["", ""],
        texts=[0, 1],
        passages=[0, 1],
        negatives=[[], []],
        groups=torch.arange(12).numpy(),
    )
    taught = torch.eye(8)
    taught[5] = taught[0]

    def cosine(teacher):
        fit = FitSettings(size=64, steps=4)
        fitted = tune((bags, asked), pooled, torch.ones(8), pairs, 8, fit, taught_VT=teacher)
        fitted |= {f"{kind}_gate": torch.tensor(-9.0) for kind in ("passage", "query")}
        one, other = vectors_of(fitted, [[0], [5]], torch.zeros(2, 8), "query")
        return float(one @ other)

    assert cosine(taught) > cosine(None) + 0.2


def test_an_index_with_another_teacher_is_another_index(tmp_path, static):
    path, recipe = tmp_path / "index", {"evaluate": False, "teacher": digest(static)}
    _, alone = making.make(path, evaluate=False)
    work, taught = making.make(path, taught_by=static, **recipe)
    assert (
        work.embedded and taught.fit.id != alone.fit.id and taught.recipe.teacher == digest(static)
    )
    assert making.make(path, taught_by=static, **recipe)[1] == taught
    with closing(making.opened(path, making.model(5))) as index:
        assert index.embedder.queries(["school"]).shape == (1, taught.dim)
    (static / "model.safetensors").write_bytes(b"")
    assert digest(static) != taught.recipe.teacher


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"no tensors"),
            "model-unsupported",
        ),
        (
            lambda folder: save_file({"other": torch.ones(2, 2)}, folder / "model.safetensors"),
            "model-unsupported",
        ),
        (
            lambda folder: save_file(
                {"embeddings": torch.ones(2, 2)}, folder / "model.safetensors"
            ),
            "model-unsupported",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "model-unsupported"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "model-unsupported"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model-unsupported"),
        (lambda folder: folder.rename(folder.with_name("gone")), "path-missing"),
    ],
)
def test_malformed_or_missing_teacher_model_is_refused(static, spoil, code):
    spoil(static)
    with pytest.raises(Refusal) as refused:
        word_vectors(static, ["ship", "boat"])
    assert refused.value.problem.code == code


def test_a_model_of_sentence_transformers_needs_the_library(static):
    (static / "modules.json").write_text("[]")
    with pytest.raises(Refusal) as refused:
        word_vectors(static, ["ship"])
    installed = importlib.util.find_spec("sentence_transformers") is not None
    assert refused.value.problem.code == ("model-unsupported" if installed else "extra-missing")


def test_a_model_of_sentence_transformers_is_a_teacher(static, tmp_path):
    st = pytest.importorskip(
        "sentence_transformers", reason="waits for sentence-transformers (pip install '.[st]')"
    )
    tokenizer = Tokenizer.from_file(str(static / "tokenizer.json"))
    modules = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    embedding = modules.StaticEmbedding(tokenizer, embedding_dim=16)
    st.SentenceTransformer(modules=[embedding]).save_pretrained(str(tmp_path / "st"))
    found = word_vectors(tmp_path / "st", ["ship", "boat", " "])
    assert found.shape == (3, 16) and not found[2].any() and found[0] @ found[1] < 0.99
