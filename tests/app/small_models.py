"""Small models as transformers saves them, for runs that continue one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as token_models

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(text: Path, special_tokens: Sequence[str] = (END_OF_TEXT,)) -> Tokenizer:
    """A byte-level BPE of 300 tokens, trained on the files of a folder."""
    words = Tokenizer(token_models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words.train_from_iterator([path.read_text() for path in text.iterdir()], trainer)
    return words


def write_model(folder: Path, config: transformers.PretrainedConfig, text: Path) -> Path:
    """Write a model of random weights, with a tokenizer of its own."""
    train_tokenizer(text).save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
