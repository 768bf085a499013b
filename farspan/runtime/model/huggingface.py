"""Models to and from Hugging Face folders: config.json, safetensors, tokenizer. Pickled weights are
never opened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farspan import models
from farspan.corpus import tokenizer as tokenizers
from farspan.domain.model import ModelSpec, StoredType
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import read_bytes, write_atomically
from farspan.models import Family
from farspan.models._base_files import GENERATION_CONFIG, TOKENIZER_FILES, copy_files
from farspan.models._weight_files import WeightPlaces, locate_weights, misfit
from farspan.runtime.model.decoder import parameter_shapes
from farspan.runtime.model.weight_shards import MAX_SHARD_BYTES, OutTensor, write_weights
from farspan.runtime.native_dtypes import TORCH_DTYPES


def export_model(
    folder: Path,
    state: Mapping[str, Tensor],
    spec: ModelSpec,
    *,
    tokenizer: Path,
    end_of_text: int,
    dtype: StoredType = "fp32",
    base: Path | None = None,
    trained_tokens: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that transformers' `AutoModelForCausalLM` and `AutoTokenizer` load.

    Its tokenizer begins every text with the end of text, as training and `generate` do, so that
    transformers writes after a prompt what farspan writes. `state` holds our parameter names (a
    Decoder's `state_dict()`); `tokenizer` is a tokenizer.json; `end_of_text` is the token id that
    ends documents. `base` has the files of a model that was continued: its tokenizer, chat template
    and special tokens are exported byte by byte instead. config.json records `trained_tokens`,
    which the learning rate of a run that continues the model goes by. Weights are written last, so
    that a folder with weights is whole; above `max_shard_bytes` they are several files.
    """
    family = models.family(spec.family)
    kind = TORCH_DTYPES[dtype]
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    if base is not None:
        ends = _read_special_ids(base) or ends
    folder.mkdir(parents=True, exist_ok=True)
    config = family.to_config(spec) | ends
    config["torch_dtype"] = str(kind).removeprefix("torch.")
    if trained_tokens is not None:
        config[models.OWN_CONFIG_KEY] = {models.TRAINED_TOKENS: trained_tokens}
    _write_json(folder / "config.json", config)
    if base is None:
        _write_tokenizer(folder, tokenizer, end_of_text, spec.context)
    else:
        copy_files(base, folder, TOKENIZER_FILES)
        copy_files(base, folder, (GENERATION_CONFIG,))
    if not (folder / GENERATION_CONFIG).exists():
        # Rows of the model's vocabulary that stand for no token are never generated.
        generation: dict[str, Any] = {"pad_token_id": end_of_text} | ends
        unused = list(range(tokenizers.load_tokenizer(tokenizer).vocab_size, spec.vocab_size))
        if unused:
            generation |= {"suppress_tokens": unused}
        _write_json(folder / GENERATION_CONFIG, generation)
    mode = (folder / "config.json").stat().st_mode
    write_weights(folder, list(_list_tensors(family, spec, state)), kind, max_shard_bytes, mode)


def _write_tokenizer(folder: Path, tokenizer: Path, end_of_text: int, context: int) -> None:
    """Write a tokenizer that puts the end of text before every text, and nothing else anywhere."""
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
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _read_special_ids(base: Path) -> dict[str, Any]:
    """Return the ids of special tokens that the config.json of a continued model has."""
    config = json.loads(read_bytes(base / "config.json"))
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}


def _list_tensors(
    family: Family, spec: ModelSpec, state: Mapping[str, Tensor]
) -> Iterator[OutTensor]:
    """List the tensors of an exported folder, by their names there."""
    for entry in family.tensors(spec):
        parts = state[entry.ours].detach().split(list(entry.rows))
        for name, part in zip(entry.theirs, parts, strict=True):
            if entry.heads is not None:
                part = swap_leading(part, 3, entry.heads)
            yield OutTensor(name, part.t() if entry.transpose else part)


def read_model(folder: Path) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    """Return the spec of a Hugging Face folder and its weights by our names, in the file's dtype.
    Each is read when it is asked for, so no more than one is held.

    Refuses architectures and options that farspan does not compute, pickled weights, and tensors
    that are missing, left over or of another shape (model-unsupported), and files that do not exist
    (path-missing).
    """
    spec = models.read_config(folder)
    return spec, FolderWeights(spec, locate_weights(folder, spec))


class FolderWeights(Mapping[str, Tensor]):
    """The weights of a Hugging Face folder by our names, read one by one."""

    def __init__(self, spec: ModelSpec, places: WeightPlaces) -> None:
        self._places = places
        self._maps = {entry.ours: entry for entry in models.family(spec.family).tensors(spec)}
        self._shapes = parameter_shapes(spec)

    def __getitem__(self, ours: str) -> Tensor:
        entry = self._maps[ours]
        parts = []
        for name in entry.theirs:
            part = self._read_tensor(name)
            parts.append(part.t() if entry.transpose else part)
        # A copy, so that the file is unmapped.
        tensor = torch.cat(parts)
        shape = self._shapes[ours]
        if tensor.shape != shape:
            sources = " + ".join(entry.theirs)
            path, _ = self._places.file_of(entry.theirs[0])
            raise misfit(path, f"{sources} gives {list(tensor.shape)}, config.json {list(shape)}")
        if entry.heads is not None:
            tensor = swap_leading(tensor, entry.heads, 3)
        return tensor.contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def _read_tensor(self, name: str) -> Tensor:
        """Map a tensor of the family's map from its file."""
        path, stored_name = self._places.file_of(name)
        try:
            with safe_open(path, "pt") as file:
                tensor: Tensor = file.get_tensor(stored_name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise misfit(path, f"the file is damaged: {error}") from None
        return tensor


def swap_leading(x: Tensor, outer: int, inner: int) -> Tensor:
    """Return rows, which are `outer` groups of `inner` runs, as `inner` groups of `outer` runs: q,
    k and v of each head as the heads of each of q, k and v, and back."""
    runs = x.unflatten(0, (outer, inner, -1))
    return runs.transpose(0, 1).flatten(0, 2)


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
