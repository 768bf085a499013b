"""Adapters as a folder that the PEFT library loads onto the model that they belong to:
adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from farspan import models
from farspan.domain.model import ModelSpec, StoredType
from farspan.domain.struct_files import write_atomically
from farspan.models._adapters import PROJECTIONS
from farspan.runtime.model.huggingface import swap_leading
from farspan.runtime.model.linear import A_SUFFIX, B_SUFFIX, adapter_parts
from farspan.runtime.model.weight_shards import OutTensor, write_tensors
from farspan.runtime.native_dtypes import TORCH_DTYPES

CONFIG_FILE = "adapter_config.json"
ADAPTERS_FILE = "adapter_model.safetensors"
#: PEFT's name of a module of a causal language model.
PREFIX = "base_model.model."


def write_adapters(
    folder: Path,
    adapters: Mapping[str, Tensor],
    spec: ModelSpec,
    *,
    base: str,
    dtype: StoredType = "fp32",
) -> None:
    """Write a folder that `PeftModel.from_pretrained` loads onto `base`, a folder or an id of the
    hub. `adapters` have our parameter names. Weights are written last."""
    assert spec.lora
    tensors = list[OutTensor]()
    modules = dict[str, None]()
    transposed = False
    for entry in models.family(spec.family).tensors(spec.base):
        path = entry.ours.removesuffix(".weight")
        if not path.endswith(PROJECTIONS) or path == entry.ours:
            continue
        transposed = entry.transpose
        pairs = adapter_parts(
            adapters[path + A_SUFFIX], adapters[path + B_SUFFIX], spec.lora, entry.rows
        )
        for weight, (a, b) in zip(entry.theirs, pairs, strict=True):
            module = weight.removesuffix(".weight")
            if entry.heads is not None:
                b = swap_leading(b, 3, entry.heads)
            tensors.append(OutTensor(f"{PREFIX}{module}.lora_A.weight", a))
            tensors.append(OutTensor(f"{PREFIX}{module}.lora_B.weight", b))
            modules[_name_in_block(module)] = None
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.lora.rank,
        "lora_alpha": spec.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(modules),
        # GPT-2 has its matrices as (in, out).
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
    content = json.dumps(config, indent=2).encode() + b"\n"
    write_atomically(folder / CONFIG_FILE, content)
    mode = (folder / CONFIG_FILE).stat().st_mode
    write_tensors(folder / ADAPTERS_FILE, tensors, TORCH_DTYPES[dtype], mode)


def _name_in_block(module: str) -> str:
    """Return a module's name behind the number of its block."""
    words = module.split(".")
    number = next(i for i, word in enumerate(words) if word.isdigit())
    return ".".join(words[number + 1 :])
