"""A run that continues a small model with a chat template, a licence and weights in bf16."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from farspan.cli.main import main
from farspan.domain.run import RunFolder
from tests.app.small_models import END_OF_TEXT, train_tokenizer
from tests.faults.running import write_text

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CARD = """---
license: other
license_name: small-licence
license_link: https://example.org/licence
language: [en, no]
base_model: somebody/larger
---
# A model
"""


def make_instructed_model(folder: Path, text: Path) -> Path:
    """A small Llama as transformers saves it, whose two chat templates begin and end turns by
    special tokens."""
    folder.mkdir(parents=True)
    words = train_tokenizer(text, (END_OF_TEXT, "<|im_start|>", "<|im_end|>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = {"default": CHAT, "tool_use": "tools" + CHAT}
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        vocab_size=320,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = [2, 0]
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE.txt").write_text("The terms.\n")
    (folder / "Notice").write_text("A notice.\n")
    return folder


def continue_model(folder: Path, text: Path, model: Path, *settings: str) -> RunFolder:
    """Train two steps from a model."""
    config = folder / "run.yaml"
    config.write_text(f"data: {{source: '{text}', val: 20%}}\nparallel: {{technique: data}}\n")
    words = ["train", str(config), "--from", str(model), "--run", str(folder / "run")]
    small = ("parallel.workers=1", "train.precision=fp32", "train.steps=2")
    for setting in (*small, "train.batch.global=4 sequences", *settings):
        words += ["--set", setting]
    assert main(words) == 0
    return RunFolder(folder / "run")


def make_instructed_run(folder: Path) -> tuple[RunFolder, Path]:
    """Return a run, and the model that it continues."""
    text = folder / "text"
    write_text(text)
    model = make_instructed_model(folder / "small-instruct", text)
    return continue_model(folder, text, model), model
