"""Ready encoders make the vectors that transformers and torch make of the same files."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from farspan.retrieval.encoders.architecture import bind_weights, read_architecture
from farspan.retrieval.encoders.numpy_forward import compute_states
from farspan.retrieval.encoders.opening import open_encoder
from farspan.retrieval.encoders.tensors import read_tensors
from farspan.retrieval.encoders.torch_forward import TorchForward
from farspan.retrieval.index_work import IndexWork
from tests.retrieval.encoder_folders import (
    TEXTS,
    WORDS,
    linked_minilm,
    minilm,
    random_weights,
    write_bert,
    write_json,
    write_modules,
    write_static,
)

SIZES = {
    "vocab_size": 60,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 220,
}
CONFIGS = {
    "bert": transformers.BertConfig(**SIZES),
    "bert-relu": transformers.BertConfig(**SIZES, hidden_act="relu"),
    "bert-gelu_new": transformers.BertConfig(**SIZES, hidden_act="gelu_new"),
    "roberta": transformers.RobertaConfig(**SIZES),
    "xlm-roberta": transformers.XLMRobertaConfig(**SIZES),
    "camembert": transformers.CamembertConfig(**SIZES),
    "mpnet": transformers.MPNetConfig(**SIZES),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=60, dim=24, n_layers=3, n_heads=3, hidden_dim=40, max_position_embeddings=220
    ),
}
ENGLISH = [
    "How do I open a file for reading?",
    "x",
    "",
    "Sockets listen on a port; UTF-8 text such as Größe or 文件 may be sent. " * 9,
    "C++ and C# and .NET",
]


@pytest.mark.parametrize("name", CONFIGS)
def test_states_are_those_of_transformers(name, tmp_path):
    config = CONFIGS[name]
    model = random_weights(transformers.AutoModel.from_config(config))
    model.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path, tmp_path)
    weights = bind_weights(
        tmp_path, tmp_path, architecture, read_tensors(tmp_path / "model.safetensors")
    )
    rng = np.random.default_rng(3)
    lengths = np.array([1, 9, 40, 200])
    mask = np.arange(200) < lengths[:, None]
    ids = np.where(mask, rng.integers(5, 60, (4, 200)), config.pad_token_id)
    with torch.inference_mode():
        outputs = model(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask).long()
        )
    expected = outputs.last_hidden_state.numpy()[mask]

    by_numpy = compute_states(weights, architecture, ids, mask)[mask]
    np.testing.assert_allclose(by_numpy, expected, rtol=0, atol=1e-5)

    batch = [ids[row, :length] for row, length in enumerate(lengths)]
    (by_torch,) = TorchForward(weights, architecture, "cpu").states([batch])
    # With products in bf16, where the CPU has them.
    assert np.corrcoef(by_torch[mask].ravel(), expected.ravel())[0, 1] > 0.999


def test_minilm_embeds_as_transformers_does():
    encoder = open_encoder(minilm())
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(minilm()))
    model = transformers.AutoModel.from_pretrained(str(minilm())).eval()
    tokens = tokenizer(ENGLISH, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()

    np.testing.assert_allclose(encoder.queries(ENGLISH), expected, rtol=0, atol=1e-5)
    cosines = (encoder.passages(ENGLISH) * expected).sum(1)
    assert cosines.min() > 0.999
    assert encoder.name == "all-MiniLM-L6-v2"
    assert (encoder.dim, encoder.max_tokens, encoder.languages) == (384, 256, ("en",))


def test_a_folder_of_the_same_files_is_the_same_model(tmp_path):
    encoder = open_encoder(linked_minilm(tmp_path / "another name"))
    assert encoder.id == open_encoder(minilm()).id
    assert encoder.name == "all-MiniLM-L6-v2"


def test_queries_need_neither_torch_nor_transformers():
    program = (
        "import sys; from pathlib import Path\n"
        "from farspan.retrieval.encoders.finding import find_encoder\n"
        f"vectors = find_encoder({str(minilm())!r}).queries(['how do I open a file'])\n"
        "print(vectors.shape, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "(1, 384) []\n", result.stderr


def test_passages_are_embedded_by_numpy_where_torch_is_not_installed(monkeypatch, tmp_path):
    write_bert(tmp_path)
    encoder = open_encoder(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    find_spec = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    np.testing.assert_allclose(encoder.passages(TEXTS), encoder.queries(TEXTS), atol=1e-6)


@pytest.mark.parametrize(
    "modes",
    [
        ["cls"],
        ["mean"],
        ["max"],
        ["mean_sqrt_len_tokens"],
        ["weightedmean"],
        ["lasttoken"],
        ["cls", "max"],
    ],
    ids="+".join,
)
def test_pooling_is_done_as_its_file_has_it(modes, tmp_path):
    model = write_bert(tmp_path, pooling={"embedding_dimension": 24, "pooling_mode": modes})
    vectors = open_encoder(tmp_path).queries(["the socket"])
    ids = [2, WORDS.index("the"), WORDS.index("socket"), 3]
    with torch.inference_mode():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    weights = torch.arange(1.0, 5.0)[:, None]
    pooled = {
        "cls": states[0],
        "mean": states.mean(0),
        "max": states.max(0).values,
        "mean_sqrt_len_tokens": states.sum(0) / 2,
        "weightedmean": (states * weights).sum(0) / weights.sum(),
        "lasttoken": states[-1],
    }
    expected = torch.cat([pooled[mode] for mode in modes])
    expected /= expected.norm()
    np.testing.assert_allclose(vectors[0], expected.numpy(), rtol=0, atol=1e-5)


def test_prompts_are_put_before_texts_and_left_out_of_pooling_where_a_file_has_it_so(tmp_path):
    prompts = {"query": "query : ", "passage": "passage : "}
    write_bert(tmp_path / "with")
    write_json(tmp_path / "with/config_sentence_transformers.json", {"prompts": prompts})
    write_bert(tmp_path / "without")
    prompted = open_encoder(tmp_path / "with")
    plain = open_encoder(tmp_path / "without")
    np.testing.assert_array_equal(prompted.queries(["a"]), plain.queries(["query : a"]))
    np.testing.assert_array_equal(prompted.passages(["a"]), plain.passages(["passage : a"]))
    assert prompted.id != plain.id

    pooling = {"pooling_mode": "mean", "include_prompt": False}
    model = write_bert(tmp_path / "left out", pooling=pooling)
    write_json(tmp_path / "left out/config_sentence_transformers.json", {"prompts": prompts})
    vectors = open_encoder(tmp_path / "left out").queries(["a file"])
    ids = [2, *map(WORDS.index, ("query", ":", "a", "file")), 3]
    with torch.inference_mode():
        mean = model(torch.tensor([ids])).last_hidden_state[0, 3:].mean(0)
    np.testing.assert_allclose(vectors[0], (mean / mean.norm()).numpy(), rtol=0, atol=1e-5)


def test_a_dense_module_maps_what_is_pooled(tmp_path):
    from safetensors.numpy import save_file

    model = write_bert(tmp_path)
    write_modules(
        tmp_path,
        ("models.Transformer", ""),
        ("models.Pooling", "1_Pooling"),
        ("models.Dense", "2_Dense"),
        ("models.Normalize", "3_Normalize"),
    )
    config = {
        "in_features": 24,
        "out_features": 6,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write_json(tmp_path / "2_Dense/config.json", config)
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(6, 24)).astype(np.float32)
    bias = rng.normal(size=6).astype(np.float32)
    tensors = {"linear.weight": weight, "linear.bias": bias}
    save_file(tensors, tmp_path / "2_Dense/model.safetensors")
    encoder = open_encoder(tmp_path)
    with torch.inference_mode():
        mean = model(torch.tensor([[2, 4, 3]])).last_hidden_state[0].mean(0).numpy()
    expected = np.tanh(weight @ mean + bias)
    assert encoder.dim == 6
    vector = encoder.queries(["a"])[0]
    np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), rtol=0, atol=1e-5)


def test_texts_are_cut_at_the_models_limit(tmp_path):
    write_bert(tmp_path)
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 12})
    encoder = open_encoder(tmp_path)
    assert encoder.max_tokens == 12
    np.testing.assert_array_equal(
        encoder.queries(["port " * 10]), encoder.queries(["port " * 10 + "socket file"])
    )
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 512})
    assert open_encoder(tmp_path).max_tokens == 32, "it has no more positions"


def test_static_tables_of_both_libraries(tmp_path):
    rng = np.random.default_rng(2)
    table = rng.normal(size=(len(WORDS), 8)).astype(np.float32)
    ids = [WORDS.index("the"), WORDS.index("[UNK]"), WORDS.index("file")]
    text = "The nonesuch file"

    write_static(tmp_path / "st", {"embedding.weight": table})
    expected = table[ids].mean(0)
    vectors = open_encoder(tmp_path / "st").queries([text, ""])
    np.testing.assert_allclose(vectors[0], expected / np.linalg.norm(expected), atol=1e-6)
    assert not vectors[1].any(), "a text without tokens has no direction"

    mapping = rng.integers(0, 5, len(WORDS))
    weights = rng.random(len(WORDS)).astype(np.float32)
    tensors = {"embeddings": table[:5].astype(np.float16), "mapping": mapping, "weights": weights}
    write_static(tmp_path / "m2v", tensors)
    known = [ids[0], ids[2]]  # model2vec leaves unknown words out.
    rows = table[:5].astype(np.float16).astype(np.float32)[mapping[known]]
    expected = (rows * weights[known][:, None]).mean(0)
    for folder in (tmp_path / "m2v", _without_modules(tmp_path / "m2v")):
        vectors = open_encoder(folder).passages([text])
        np.testing.assert_allclose(vectors[0], expected / np.linalg.norm(expected), atol=1e-6)


def _without_modules(folder):
    """model2vec once wrote none; wordllama's table and tokenizer can lie so too."""
    (folder / "modules.json").unlink()
    return folder


def test_bf16_tensors_are_read(tmp_path):
    from safetensors.torch import save_file

    table = torch.randn(7, 5, dtype=torch.bfloat16)
    save_file({"t": table, "empty": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    tensors = read_tensors(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(tensors["t"].floats(), table.float().numpy())
    assert tensors["empty"].shape == (0, 3)


class Halted(Exception):
    pass


def test_embedding_that_was_stopped_resumes_with_the_same_vectors(tmp_path):
    write_bert(tmp_path / "encoder")
    encoder = open_encoder(tmp_path / "encoder")
    texts = [f"open file {'read ' * (number % 25)}" for number in range(600)]
    whole = encoder.passages(texts)

    def halt(work: IndexWork) -> None:
        if work.embedded > 200:
            raise Halted

    stopped = IndexWork(changed=halt)
    stopped.folder = tmp_path
    with pytest.raises(Halted):
        encoder.passages(texts, stopped)
    resumed = IndexWork()
    resumed.folder = tmp_path
    resumed.add_expected("embedding", sum(map(len, texts)))
    np.testing.assert_array_equal(encoder.passages(texts, resumed), whole)
    assert resumed.kept > 200
    assert resumed.kept + resumed.embedded == 600
    assert resumed.share == 1
