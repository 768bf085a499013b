"""Models to and from Hugging Face folders: config.json, safetensors, tokenizer. Pickled weights are
never opened."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from farspan import models
from farspan.corpus import tokenizer as tokenizers
from farspan.domain.codec import missing_path, parse_json, read_bytes, write_atomically
from farspan.domain.escapes import shell_line
from farspan.domain.model import ModelSpec, parameters
from farspan.domain.problems import Refusal
from farspan.models import Family, TensorMap
from farspan.runtime.model.decoder import Decoder

#: A safetensors file begins with the length of its header. Entries of 1,024 layers take 3 MB.
LENGTH = 8
MAX_HEADER_BYTES = 1 << 24
#: Bytes of the index of a sharded model.
MAX_INDEX_BYTES = 1 << 26
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"


def export(
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
    config = family.to_config(spec)
    config |= {
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": str(kind).split(".")[1],
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    words = json.loads(read_bytes(tokenizer))
    end = _token(words, end_of_text)
    _write_json(
        folder / "tokenizer.json", words | {"post_processor": _begin_with(end, end_of_text)}
    )
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(end, spec.context))
    unused = range(tokenizers.load(tokenizer).vocab_size, spec.vocab_size)
    _write_json(folder / "generation_config.json", _generation_config(end_of_text, unused))
    tensors = {
        name: tensor.to(kind)
        for entry in family.tensors(spec)
        for name, tensor in _theirs(entry, state)
    }
    temporary = folder / f"{WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(
        (folder / "config.json").stat().st_mode
    )  # safetensors makes files for their owner alone.
    temporary.replace(folder / WEIGHTS)


def read(folder: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The spec of a Hugging Face folder and its weights under our names, in the dtype of the file.

    Refuses architectures and options that farspan does not compute, pickled weights, and tensors
    that are missing, left over or of another shape (model-unsupported), and files that do not exist
    (path-missing).
    """
    spec = models.read_config(folder)
    family = models.family(spec.family)
    tensors = _full_names(family, _load(_weight_files(folder), folder, family, spec))
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Decoder(spec).named_parameters()}
    state = {}
    for entry in family.tensors(spec):
        if missing := [name for name in entry.theirs if name not in tensors]:
            raise _misfit(folder, f"tensor {missing[0]!r} is missing")
        parts = [tensors.pop(name) for name in entry.theirs]
        tensor = torch.cat([part.t() for part in parts] if entry.transpose else parts)
        if tensor.shape != shapes[entry.ours]:
            fact = (
                f"{' + '.join(entry.theirs)} gives {list(tensor.shape)}, config.json "
                f"{list(shapes[entry.ours])}"
            )
            raise _misfit(folder, fact)
        state[entry.ours] = tensor.contiguous()
    if spec.tied and HEAD in tensors and torch.equal(tensors[HEAD], state["tok.weight"]):
        del tensors[HEAD]
    if tensors:
        raise _misfit(folder, f"tensor {min(tensors)!r} is left over")
    return spec, state


def _theirs(entry: TensorMap, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of one of our parameters. Copies, since safetensors refuses shared
    memory."""
    for name, part in zip(
        entry.theirs, state[entry.ours].detach().cpu().split(list(entry.rows)), strict=True
    ):
        yield (
            name,
            (part.t() if entry.transpose else part).clone(memory_format=torch.contiguous_format),
        )


def _full_names(family: Family, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names a causal model's file uses: files of the bare model lack the prefix.
    Buffers are dropped."""
    bare = not any(name.startswith(family.PREFIX) for name in tensors)
    return {
        family.PREFIX + name if bare and name != HEAD else name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(family.BUFFERS)
    }


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        content = read_bytes(folder / INDEX, most=MAX_INDEX_BYTES)
        if len(content) > MAX_INDEX_BYTES:
            raise _misfit(folder, f"{INDEX} is longer than {MAX_INDEX_BYTES >> 20} MiB")
        shards = sorted(set(parse_json(content, _Index, folder / INDEX).weight_map.values()))
        if outside := [name for name in shards if Path(name).name != name]:
            raise _misfit(folder, f"{INDEX} names {outside[0]!r}, a file outside the folder")
        return [folder / name for name in shards]
    if pickled := sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    ):
        convert = (
            "from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
        raise Refusal(
            "model-unsupported",
            what="the weights are pickled, and a pickle can run any code when it is opened",
            where=folder / pickled[0],
            fact=f"there is no {WEIGHTS}",
            remedy=f"where you trust the file: {shell_line('python', '-c', convert)}",
        )
    raise missing_path(folder / WEIGHTS)


class _Index(msgspec.Struct):
    """The part of the index of a sharded model that says which file holds which tensor."""

    weight_map: dict[str, str]


def _load(files: list[Path], folder: Path, family: Family, spec: ModelSpec) -> dict[str, Tensor]:
    """The tensors of all files but buffers.

    Raises Refusal for a damaged file, and before any tensor is read for files that hold more values
    than the model has.
    """
    names: dict[Path, list[str]] = {}
    count = 0
    for path in files:
        shapes = _shapes(path)
        names[path] = [name for name in shapes if not name.endswith(family.BUFFERS)]
        count += sum(math.prod(shapes[name]) for name in names[path])
    # A tied head may be stored in addition.
    most = parameters(spec) + spec.vocab_size * spec.d_model
    if count > most:
        raise _misfit(folder, f"the files hold {count:,} values, config.json {most:,} at most")
    tensors = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                tensors.update({name: file.get_tensor(name) for name in names[path]})
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _misfit(path, f"the file is damaged: {error}") from None
    return tensors


def _shapes(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor by the header of a safetensors file, which the library checks."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(LENGTH), "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise _misfit(path, f"its header has {header_bytes:,} bytes")
            header = msgspec.json.decode(file.read(header_bytes), type=dict[str, _Entry])
    except FileNotFoundError:
        raise missing_path(path) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _misfit(path, f"the file is damaged: {error}") from None
    return {name: entry.shape for name, entry in header.items() if name != "__metadata__"}


class _Entry(msgspec.Struct):
    """The part of a tensor's entry in a header that says how many values it has."""

    shape: list[Annotated[int, msgspec.Meta(ge=0)]] = []


def _misfit(where: Path, fact: str) -> Refusal:
    return Refusal(
        "model-unsupported",
        what="the weights do not fit config.json",
        where=where,
        fact=fact,
        remedy="download or export the model again",
    )


def _token(words: dict[str, Any], end_of_text: int) -> str:
    """The special token of that id in a tokenizer.json."""
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


def _begin_with(token: str, number: int) -> dict[str, Any]:
    """The part of a tokenizer.json that puts a special token before every text, and nothing else
    anywhere."""
    texts = [
        [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": name, "type_id": 0}}]
        for name in "AB"
    ]
    return {
        "type": "TemplateProcessing",
        "single": texts[0],
        "pair": texts[0] + texts[1],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _tokenizer_config(end: str, context: int) -> dict[str, Any]:
    """What `AutoTokenizer` needs beside tokenizer.json: the class, and which token begins and ends
    a text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
        "add_bos_token": True,
        "split_special_tokens": True,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }


def _generation_config(end_of_text: int, unused: range) -> dict[str, Any]:
    """Where texts begin and end, and the rows of the model's vocabulary that stand for no token."""
    config = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
    return config | ({"suppress_tokens": list(unused)} if unused else {})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2).encode() + b"\n")
