"""A sentence-transformers folder gives the vectors of the embedder that it was written from,
through real files."""

from __future__ import annotations

import ast
import json
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from farspan import models
from farspan.domain.problems import Refusal
from farspan.retrieval.embed import Embedder
from farspan.retrieval.index import FitSettings
from farspan.retrieval.names import query_form
from farspan.retrieval.sentence_transformers import write_sentence_transformers
from farspan.runtime.inference import Trained
from farspan.runtime.model.decoder import Decoder, initialize_model
from tests.retrieval.conftest import fit, paired

pytestmark = pytest.mark.slow

st = pytest.importorskip(
    "sentence_transformers", reason="needs sentence-transformers: pip install 'farspan[st]'"
)

SHAPES = {
    "gpt2": ("gpt2", {"heads": 2}),
    "gpt2-untied": ("gpt2", {"heads": 4, "tied": False}),
    "llama": ("llama", {"heads": 2}),
    "llama-untied-gqa": ("llama", {"heads": 4, "kv_heads": 2, "tied": False}),
    "opt": ("opt", {"heads": 2}),
    "qwen2": ("qwen2", {"heads": 4, "kv_heads": 2}),
    "qwen3": ("qwen3", {"heads": 4, "kv_heads": 2, "head_size": 24}),
    "gpt_neox": ("gpt_neox", {"heads": 2}),
    "smollm3": ("smollm3", {"heads": 4, "kv_heads": 2}),
    "olmo2": ("olmo2", {"heads": 4, "kv_heads": 2, "tied": False}),
    "gemma3": ("gemma3", {"heads": 4, "kv_heads": 1, "head_size": 24}),
}
CONTEXT = 64
#: Empty, blank, longer than the context, outside ASCII, half of a surrogate pair, a special token,
#: names, line ends.
TEXTS = [
    "",
    " ",
    "listen",
    "listen " * 300,
    "👩‍🔬 naïve 字, emoji 🙂" * 9,
    "half \ud83d a pair",
    "<|endoftext|> is text",
    "torch.nn.CrossEntropyLoss",
    "HTTPServer_v2",
    "a\r\nb\0c",
    "query: what listens?",
]


@pytest.fixture(scope="module", autouse=True)
def fp32():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farspan.retrieval.pooling.bf16_is_fast", lambda device: False)
        yield


@pytest.fixture(scope="module", params=SHAPES)
def trained(request, tokenizer) -> Trained:
    """A model whose norms and biases are random too, so that no mistake hides behind ones and
    zeros."""
    family, knobs = SHAPES[request.param]
    vocab_size = tokenizer.vocab_size + 7
    spec = models.family(family).shape(
        d_model=32, layers=2, vocab_size=vocab_size, context=CONTEXT, **knobs
    )
    model = Decoder(spec).eval()
    generator = torch.Generator().manual_seed(3)
    initialize_model(model, 5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return Trained(model, tokenizer, 1, "weights")


@pytest.fixture(scope="module")
def fitted(trained, documents) -> Embedder:
    texts = [document.text for document in documents]
    titles = [query_form(document.title) for document in documents]
    return fit(
        trained.model,
        trained.tokenizer,
        texts,
        paired(titles, range(len(texts)), len(texts)),
        FitSettings(size=48),
    )[0]


def write(folder: Path, trained: Trained, embedder: Embedder) -> Path:
    folder.mkdir()
    embedder.save(folder / "fitted.safetensors")
    trained.tokenizer.save(folder / "tokenizer.json")
    files = {"tokenizer": folder / "tokenizer.json", "fitted": folder / "fitted.safetensors"}
    write_sentence_transformers(folder / "st", trained, **files)
    return folder / "st"


@pytest.fixture(scope="module")
def written(trained, fitted, tmp_path_factory):
    """An embedder and the folder that was written from it, with maps of passages and queries that
    differ at random."""
    generator = torch.Generator().manual_seed(7)
    maps = dict(fitted._fitted)
    for name in ("passage_map", "query_map"):
        maps[name] = torch.linalg.qr(torch.randn(maps[name].shape, generator=generator))[
            0
        ].contiguous()
    embedder = Embedder(trained.model, trained.tokenizer, maps)
    return embedder, write(tmp_path_factory.mktemp("written") / "made", trained, embedder)


def loaded(folder: Path):
    return st.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")


def same(found, expected, most: float = 1e-5) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert np.abs(found - expected).max() < most


def test_vectors_equal_the_embedders(written, documents):
    embedder, folder = written
    texts = TEXTS + [document.text for document in documents]
    model = loaded(folder)
    passages = embedder.passages(texts)
    queries = embedder.queries([query_form(text) for text in texts])
    assert np.abs(passages - queries).max() > 0.1
    for rows in (1, 5, 32):
        same(model.encode(texts, batch_size=rows), passages)
        same(model.encode_document(texts, batch_size=rows), passages)
        same(model.encode_query(texts, batch_size=rows), queries)
        # What programs call that know only of prompts.
        same(model.encode(texts, prompt_name="query", batch_size=rows), queries)
    same(model.encode_query("listen"), queries[2])
    assert float(model.similarity(queries[2], passages[2])) == pytest.approx(
        queries[2] @ passages[2], abs=1e-5
    )


def test_vectors_of_fitted_maps_equal_the_embedders(trained, fitted, documents, tmp_path):
    texts = TEXTS + [document.text for document in documents]
    model = loaded(write(tmp_path / "made", trained, fitted))
    # Whitening takes small directions up a thousand times, and with them the rounding that another
    # batch brings: of these LayerNorm models an embedder differs so much from itself.
    most = 2e-5 if trained.model.spec.norm == "layernorm" else 1e-5
    same(model.encode(texts), fitted.passages(texts), most)
    same(model.encode_query(texts), fitted.queries([query_form(text) for text in texts]), most)


def test_a_saved_copy_gives_the_same_vectors(written, tmp_path):
    embedder, folder = written
    loaded(folder).save(str(tmp_path / "copy"))
    assert not [*tmp_path.rglob("*.bin"), *tmp_path.rglob("*.pt")]
    same(loaded(tmp_path / "copy").encode(TEXTS), embedder.passages(TEXTS))


def test_less_of_a_text_counts_if_asked_and_another_prompt_is_embedded(written):
    embedder, folder = written
    model = loaded(folder)
    assert model.max_seq_length == CONTEXT and model.get_embedding_dimension() == 48
    same(model.encode(["listen"], prompt="to "), embedder.passages(["to listen"]))
    model.max_seq_length = 10_000
    same(model.encode(["listen " * 300]), embedder.passages(["listen " * 300]))
    model.max_seq_length = 3
    same(model.encode([" listen listen listen"]), embedder.passages([" listen listen"]))


def test_the_folder_is_whole_and_readable_like_its_siblings(written, tmp_path):
    folder = written[1]
    (tmp_path / "sibling").write_text("")
    modes = {
        stat.S_IMODE(file.stat().st_mode) for file in [tmp_path / "sibling", *folder.iterdir()]
    }
    assert len(modes) == 1
    assert {file.name for file in folder.iterdir()} >= {
        "modules.json",
        "farspan_embedding.py",
        "names.py",
        "fitted.safetensors",
    }
    prompts = json.loads((folder / "config_sentence_transformers.json").read_text())["prompts"]
    assert prompts == {"query": "query: ", "document": ""}


def test_the_modules_need_no_farspan(written):
    imported = set()
    for file in ("farspan_embedding.py", "names.py"):
        for node in ast.walk(ast.parse((written[1] / file).read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert (written[1] / f"{node.module}.py").exists()
    libraries = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    assert libraries == {"torch", "transformers", "safetensors", "sentence_transformers"}


def test_without_maps_nothing_is_written(tokenizer, tmp_path):
    spec = models.family("gpt2").shape(
        d_model=8, layers=1, heads=1, vocab_size=tokenizer.vocab_size, context=8
    )
    tokenizer.save(tmp_path / "tokenizer.json")
    with pytest.raises(Refusal) as refused:
        write_sentence_transformers(
            tmp_path / "st",
            Trained(Decoder(spec), tokenizer, 1, ""),
            tokenizer=tmp_path / "tokenizer.json",
            fitted=tmp_path / "fitted.safetensors",
        )
    assert refused.value.problem.code == "path-missing" and not (tmp_path / "st").exists()
