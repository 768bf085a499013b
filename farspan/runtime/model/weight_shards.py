"""The weights of a Hugging Face folder as it is written: one safetensors file, or several with an
index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from farspan.domain.problems import Refusal
from farspan.domain.struct_files import write_atomically
from farspan.models._weight_files import INDEX, WEIGHTS_FILE

#: Bytes of a file's tensors above which another is begun, as the hub advises. A tensor that is
#: larger has a file of its own.
MAX_SHARD_BYTES = 5_000_000_000


class OutTensor(NamedTuple):
    """A tensor and its name in the folder."""

    name: str
    tensor: Tensor


def write_weights(
    folder: Path,
    tensors: Sequence[OutTensor],
    kind: torch.dtype,
    max_shard_bytes: int,
    mode: int,
) -> None:
    """Write tensors as files of at most `max_shard_bytes`, converted to `kind`; one file's tensors
    are held at a time. The index is written last: without it the folder has no weights.

    Raises Refusal (cannot-export) for weights that are too large for `kind`.
    """
    shards = _fill_shards(tensors, kind.itemsize, max_shard_bytes)
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS_FILE, shards[0], kind, mode)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, shard, kind, mode)
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
    values = sum(tensor.tensor.numel() for tensor in tensors)
    metadata = {"total_parameters": values, "total_size": values * kind.itemsize}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")


def _fill_shards(
    tensors: Sequence[OutTensor], value_bytes: int, max_shard_bytes: int
) -> list[list[OutTensor]]:
    """Divide tensors among files, in their order."""
    shards: list[list[OutTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = tensor.tensor.numel() * value_bytes
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def write_tensors(path: Path, shard: Sequence[OutTensor], kind: torch.dtype, mode: int) -> None:
    """Write one safetensors file, whole or not at all, converted to `kind`. Raises Refusal
    (cannot-export) for weights that are too large for it."""
    content = {}
    for name, tensor in shard:
        # Copies, since safetensors refuses shared memory.
        whole = tensor.cpu().clone(memory_format=torch.contiguous_format)
        stored = whole.to(kind)
        if kind == torch.float16 and not torch.isfinite(stored).all():
            raise Refusal(
                "cannot-export",
                what="a weight is too large for fp16",
                where=name,
                fact=f"the largest is {float(whole.abs().max()):.3g}, fp16 ends at 65,504",
                remedy="export in bf16: --dtype bf16",
            )
        content[name] = stored
    temporary = path.with_name(f"{path.name}.tmp")
    save_file(content, temporary, metadata={"format": "pt"})
    # safetensors makes files for their owner alone.
    temporary.chmod(mode)
    temporary.replace(path)
