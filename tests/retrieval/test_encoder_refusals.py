"""What is wrong with an encoder's folder is refused before anything is embedded."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from farspan.domain.problems import Refusal
from farspan.retrieval.encoders.opening import open_encoder
from tests.retrieval.encoder_folders import WORDS, write_bert, write_json, write_static


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def put(name: str, value: object):
    return lambda folder: write_json(folder / name, value)


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lie_in_the_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])


def write_nan(folder: Path) -> None:
    def change(tensors):
        tensors["encoder.layer.1.output.dense.weight"][3, 5] = torch.nan

    change_weights(folder, change)


def widen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "hidden_size": 48})


def drop_a_tensor(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("encoder.layer.0.attention.self.key.bias"))


def drop_rows(folder: Path) -> None:
    name = "embeddings.word_embeddings.weight"

    def change(tensors):
        tensors[name] = tensors[name][: len(WORDS) - 2].clone()

    change_weights(folder, change)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "vocab_size": len(WORDS) - 2})


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


CASES = {
    "no pooling": (remove("modules.json"), "model-unsupported", "no pooling"),
    "pooling left out of modules.json": (
        put("modules.json", [{"type": "sentence_transformers.models.Transformer", "path": ""}]),
        "model-unsupported",
        "no pooling",
    ),
    "no file of the pooling": (remove("1_Pooling/config.json"), "path-missing", "does not exist"),
    "unknown pooling": (
        put("1_Pooling/config.json", {"pooling_mode": "median"}),
        "file-unreadable",
        "median",
    ),
    "pooling of another dimension": (
        put("1_Pooling/config.json", {"word_embedding_dimension": 768}),
        "model-unsupported",
        "768",
    ),
    "weights of another dimension": (widen, "model-unsupported", "24"),
    "weights without a tensor": (drop_a_tensor, "model-unsupported", "key.bias"),
    "weights cut off": (cut_weights, "file-unreadable", "ends at byte"),
    "weights with a wrong header": (lie_in_the_header, "file-unreadable", "its header has"),
    "weights with a NaN": (write_nan, "non-finite", "vectors"),
    "weights as a pickle": (pickle_only, "path-missing", "can run any code"),
    "no tokenizer": (remove("tokenizer.json"), "path-missing", "does not exist"),
    "tokenizer that is none": (put("tokenizer.json", {}), "file-unreadable", ""),
    "tokenizer with more ids than rows": (drop_rows, "tokenizer-mismatch", "17"),
    "another architecture": (
        put("config.json", {"model_type": "modernbert"}),
        "model-unsupported",
        "modernbert; those that are run here are bert, distilbert, roberta",
    ),
    "unknown module": (
        put(
            "modules.json",
            [
                {"type": "sentence_transformers.models.Transformer", "path": ""},
                {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
                {"type": "custom.Whitening", "path": "2"},
            ],
        ),
        "model-unsupported",
        "custom.Whitening",
    ),
    "module outside": (
        put("modules.json", [{"type": "models.Transformer", "path": "../other"}]),
        "file-unreadable",
        "outside",
    ),
    "modules.json that is none": (put("modules.json", {"a": 1}), "file-unreadable", "array"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_folder_is_refused(name, tmp_path):
    spoil, code, fact = CASES[name]
    write_bert(tmp_path)
    open_encoder(tmp_path)
    spoil(tmp_path)
    with pytest.raises(Refusal) as refused:
        open_encoder(tmp_path)
    problem = refused.value.problem
    assert problem.code == code, problem
    assert fact in problem.fact
    assert problem.remedy
    assert str(tmp_path) in problem.where


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(Refusal) as refused:
        open_encoder(tmp_path / "none")
    assert refused.value.problem.code == "path-missing"


def test_a_table_that_does_not_fit_its_tokenizer_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    write_static(tmp_path, {"embedding.weight": rng.random((5, 4), np.float32)})
    with pytest.raises(Refusal) as refused:
        open_encoder(tmp_path)
    assert refused.value.problem.code == "tokenizer-mismatch"
    mapping = np.full(len(WORDS), 5)
    tensors = {"embeddings": rng.random((5, 4), np.float32), "mapping": mapping}
    write_static(tmp_path, tensors)
    with pytest.raises(Refusal, match="points beyond the table"):
        open_encoder(tmp_path)


def test_an_encoder_that_was_changed_under_an_index_is_refused(tmp_path):
    write_bert(tmp_path)
    made_with = open_encoder(tmp_path).id
    assert open_encoder(tmp_path, made_with).id == made_with

    def change(tensors):
        tensors["encoder.layer.0.output.dense.bias"][0] += 1

    change_weights(tmp_path, change)
    with pytest.raises(Refusal) as refused:
        open_encoder(tmp_path, made_with)
    assert refused.value.problem.code == "version-mismatch"
    assert made_with in refused.value.problem.fact


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "cls"}),
        ("config_sentence_transformers.json", {"prompts": {"query": "query: "}}),
        ("sentence_bert_config.json", {"max_seq_length": 9}),
        ("sentence_bert_config.json", {"do_lower_case": True}),
    ],
)
def test_settings_that_change_vectors_change_the_id(file, value, tmp_path):
    write_bert(tmp_path)
    before = open_encoder(tmp_path).id
    write_json(tmp_path / file, value)
    assert open_encoder(tmp_path).id != before
