"""The safetensors files of a Hugging Face folder, and the contents of their headers. Pickled
weights are never opened."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated

import msgspec

from farspan.domain.decoding import decode_json
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import missing_path, parse_json, read_bytes
from farspan.domain.units import counted

#: A safetensors file begins with the length of its header. Entries of 1,024 layers take 3 MB.
LENGTH_BYTES = 8
MAX_TENSOR_HEADER_BYTES = 1 << 24
#: Bytes of the index of a sharded model.
MAX_INDEX_BYTES = 1 << 26
WEIGHTS_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Of the SHA-256 of a model's weights.
HASH_DIGITS = 16


def list_weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights. Raises Refusal (model-unsupported, path-missing)."""
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX).exists():
        content = read_bytes(folder / INDEX, most=MAX_INDEX_BYTES)
        if len(content) > MAX_INDEX_BYTES:
            raise misfit(folder, f"{INDEX} is longer than {MAX_INDEX_BYTES >> 20} MiB")
        index = parse_json(content, _Index, folder / INDEX)
        shards = sorted(set(index.weight_map.values()))
        for name in shards:
            if Path(name).name != name:
                raise misfit(folder, f"{INDEX} names {name!r}, a file outside the folder")
        return [folder / name for name in shards]
    files = sorted(path.name for path in folder.glob("*"))
    pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        convert = (
            "from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
        raise Refusal(
            "model-unsupported",
            what="the weights are pickled, and a pickle can run any code when it is opened",
            where=folder / pickled[0],
            fact=f"there is no {WEIGHTS_FILE}",
            remedy=f"where you trust the file: {shell_line('python', '-c', convert)}",
        )
    raise missing_path(folder / WEIGHTS_FILE)


def hash_weights(folder: Path) -> str:
    """Return a hash of all bytes of a model's weights, by which it is known again."""
    digest = hashlib.sha256()
    for path in list_weight_files(folder):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:HASH_DIGITS]


def require_weights(folder: Path, expected: str) -> None:
    """Require the weights that adapters belong to. Raises Refusal (path-missing, plan-mismatch)."""
    actual = hash_weights(folder)
    if actual != expected:
        raise Refusal(
            "plan-mismatch",
            what="the model that the adapters belong to has other weights than before",
            where=folder,
            fact=f"the run began with weights of hash {expected}, these have {actual}",
            remedy=f"put the model that the run began with back into {shell_word(folder)}",
        )


class _Index(msgspec.Struct):
    """The part of the index of a sharded model that gives the file of each tensor."""

    weight_map: dict[str, str]


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor by the header of a safetensors file, which the library
    checks. Raises Refusal for a file that is missing, damaged or cut off."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if header_bytes > MAX_TENSOR_HEADER_BYTES:
                raise misfit(path, f"its header has {header_bytes:,} bytes")
            content = file.read(header_bytes)
            header = decode_json(content, dict[str, _Entry])
            size = file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        raise missing_path(path) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise misfit(path, f"the file is damaged: {error}") from None
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    data_bytes = max((entry.data_offsets[1] for entry in entries), default=0)
    missing = LENGTH_BYTES + header_bytes + data_bytes - size
    if missing > 0:
        raise misfit(path, f"the file is damaged: its end is missing, {counted(missing, 'byte')}")
    return {name: entry.shape for name, entry in header.items() if name != "__metadata__"}


class _Entry(msgspec.Struct):
    """The part of a tensor's entry in a header that gives how many values it has, and where."""

    shape: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    data_offsets: tuple[int, int] = (0, 0)


def misfit(where: Path, fact: str) -> Refusal:
    """Build the refusal of weights that do not fit their config.json."""
    return Refusal(
        "model-unsupported",
        what="the weights do not fit config.json",
        where=where,
        fact=fact,
        remedy="download or export the model again",
    )
