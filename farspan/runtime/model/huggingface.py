"""Models to and from Hugging Face folders: config.json, safetensors, tokenizer. Pickled weights are
never opened."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from farspan import models
from farspan.corpus import tokenizer as tokenizers
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import read_bytes, write_atomically
from farspan.models import Family
from farspan.models._weight_files import WEIGHTS_FILE, list_weight_files, misfit, read_shapes
from farspan.runtime.model.decoder import parameter_shapes


def export_model(
    folder: Path,
    state: Mapping[str, Tensor],
    spec: ModelSpec,
    *,
    tokenizer: Path,
    end_of_text: int,
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> None:
    """Write a folder that transformers' `AutoModelForCausalLM` and `AutoTokenizer` load.

    Its tokenizer begins every text with the end of text, as training and `generate` do, so that
    transformers writes after a prompt what farspan writes. `state` holds our parameter names (a
    Decoder's `state_dict()`); `tokenizer` is a tokenizer.json; `end_of_text` is the token id that
    ends documents. Weights are written last, so that a folder with weights is whole.
    """
    family = models.family(spec.family)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    folder.mkdir(parents=True, exist_ok=True)
    config = family.to_config(spec) | ends
    config["torch_dtype"] = str(kind).removeprefix("torch.")
    _write_json(folder / "config.json", config)

    # The tokenizer puts the end of text before every text, and nothing else anywhere.
    words = json.loads(read_bytes(tokenizer))
    end = _special_token(words, end_of_text)
    first, second = (
        [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": name, "type_id": 0}}]
        for name in "AB"
    )
    words["post_processor"] = {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {end: {"id": end, "ids": [end_of_text], "tokens": [end]}},
    }
    _write_json(folder / "tokenizer.json", words)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
        "add_bos_token": True,
        "split_special_tokens": True,
        "model_max_length": spec.context,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)

    # Rows of the model's vocabulary that stand for no token are never generated.
    generation: dict[str, Any] = ends | {"pad_token_id": end_of_text}
    unused = list(range(tokenizers.load_tokenizer(tokenizer).vocab_size, spec.vocab_size))
    if unused:
        generation |= {"suppress_tokens": unused}
    _write_json(folder / "generation_config.json", generation)

    tensors = {}
    for entry in family.tensors(spec):
        own = state[entry.ours].detach().cpu()
        for name, part in zip(entry.theirs, own.split(list(entry.rows)), strict=True):
            if entry.heads is not None:
                part = swap_leading(part, 3, entry.heads)
            tensor = part.t() if entry.transpose else part
            # Copies, since safetensors refuses shared memory.
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format).to(kind)
    write_tensors(folder / WEIGHTS_FILE, tensors, like=folder / "config.json")


def write_tensors(path: Path, tensors: dict[str, Tensor], *, like: Path) -> None:
    """Write a safetensors file, whole or not at all, that may be read by those who may read
    another: the library makes files for their owner alone."""
    temporary = path.with_name(f"{path.name}.tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(like.stat().st_mode)
    temporary.replace(path)


def read_model(folder: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Return the spec of a Hugging Face folder and its weights by our names, in the file's dtype.

    Refuses architectures and options that farspan does not compute, pickled weights, and tensors
    that are missing, left over or of another shape (model-unsupported), and files that do not exist
    (path-missing).
    """
    spec = models.read_config(folder)
    family = models.family(spec.family)
    tensors = _load_tensors(list_weight_files(folder), folder, family, spec)
    head_name = f"{family.HEAD}.weight"
    # Files of the bare model, without its head, lack the prefix of names.
    if not any(name.startswith(family.PREFIX) for name in tensors):
        tensors = {
            name if name == head_name else family.PREFIX + name: tensor
            for name, tensor in tensors.items()
        }
    shapes = parameter_shapes(spec)
    state = {}
    for entry in family.tensors(spec):
        parts = []
        for name in entry.theirs:
            if name not in tensors:
                raise misfit(folder, f"tensor {name!r} is missing")
            part = tensors.pop(name)
            parts.append(part.t() if entry.transpose else part)
        tensor = torch.cat(parts)
        shape = shapes[entry.ours]
        if tensor.shape != shape:
            sources = " + ".join(entry.theirs)
            fact = f"{sources} gives {list(tensor.shape)}, config.json {list(shape)}"
            raise misfit(folder, fact)
        if entry.heads is not None:
            tensor = swap_leading(tensor, entry.heads, 3)
        state[entry.ours] = tensor.contiguous()
    head = tensors.get(head_name)
    if spec.tied and head is not None and torch.equal(head, state["tok.weight"]):
        del tensors[head_name]
    if tensors:
        raise misfit(folder, f"tensor {min(tensors)!r} is left over")
    return spec, state


def swap_leading(x: Tensor, outer: int, inner: int) -> Tensor:
    """Return rows, which are `outer` groups of `inner` runs, as `inner` groups of `outer` runs: q,
    k and v of each head as the heads of each of q, k and v, and back."""
    runs = x.unflatten(0, (outer, inner, -1))
    return runs.transpose(0, 1).flatten(0, 2)


def _load_tensors(
    files: list[Path], folder: Path, family: Family, spec: ModelSpec
) -> dict[str, Tensor]:
    """Return the tensors of all files but buffers.

    Raises Refusal for a damaged file, and before any tensor is read for files that hold more values
    than the model has.
    """
    tensor_names: dict[Path, list[str]] = {}
    count = 0
    for path in files:
        tensor_names[path] = []
        for name, shape in read_shapes(path).items():
            if not name.endswith(family.BUFFERS):
                tensor_names[path].append(name)
                count += math.prod(shape)
    # A tied head may be stored in addition.
    most = count_parameters(spec) + spec.vocab_size * spec.d_model
    if count > most:
        raise misfit(folder, f"the files hold {count:,} values, config.json {most:,} at most")
    tensors = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in tensor_names[path]:
                    tensors[name] = file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise misfit(path, f"the file is damaged: {error}") from None
    return tensors


def _special_token(words: dict[str, Any], end_of_text: int) -> str:
    """Return the special token of that id in a tokenizer.json."""
    added = {token["id"]: token["content"] for token in words["added_tokens"]}
    if end_of_text not in added:
        raise Refusal(
            "tokenizer-mismatch",
            what=(
                f"token {end_of_text} should end documents, but the tokenizer has no such "
                "special token"
            ),
            where="tokenizer.json",
            fact=f"its special tokens are {added}",
            remedy="export with the tokenizer of the run: tokenizer.json in the run directory",
        )
    return str(added[end_of_text])


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2).encode() + b"\n")
