"""The tensors of a safetensors file, mapped into memory: pages that nothing reads are never loaded.

The library `safetensors` copies each tensor, and gives numpy none in bf16.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

#: The header's length, in front of it. The library refuses headers above 100 MB.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
#: Numbers that are here. BF16 is read as the upper halves of 32-bit floats.
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}


class Tensor(NamedTuple):
    """One tensor as it lies in the file, and the file's name of its dtype."""

    stored: Array
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def floats(self) -> Floats:
        """Return the tensor in 32 bits: without a copy where the file has it so."""
        if self.dtype == "BF16":
            return (self.stored.astype(np.uint32) << 16).view(np.float32)
        return self.stored.astype(np.float32, copy=False)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Map a file's tensors into memory; refuse (file-unreadable) a file that is cut off or damaged,
    and (path-missing) one that is not there."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise missing_file(path) from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped.
        raise unreadable(path, str(error)) from None
    try:
        return _parse(mapped)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(path, f"it is no whole safetensors file: {error}") from None


def _parse(mapped: mmap.mmap) -> dict[str, Tensor]:
    """Return the tensors that the header lists; raises ValueError where one is not in the file."""
    length = int.from_bytes(mapped[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or start > len(mapped):
        raise ValueError(f"its header has {length} bytes, the file {len(mapped)}")
    header = json.loads(mapped[_LENGTH_BYTES:start])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} is of dtype {entry['dtype']}")
        begin, end = entry["data_offsets"]
        shape = [int(size) for size in entry["shape"]]
        count = 1
        for size in shape:
            count *= size
        if (
            min(shape, default=0) < 0
            or not 0 <= begin <= end
            or end - begin != count * dtype.itemsize
        ):
            raise ValueError(f"{name} has a shape that does not fit its bytes")
        if start + end > len(mapped):
            raise ValueError(f"{name} ends at byte {start + end}, the file has {len(mapped)}")
        stored = np.frombuffer(mapped, dtype, count, start + begin).reshape(shape)
        tensors[name] = Tensor(stored, entry["dtype"])
    return tensors


def require_finite(path: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse (non-finite) weights with a NaN or an infinity."""
    for name, tensor in tensors.items():
        if tensor.dtype not in ("F64", "F32", "F16", "BF16"):
            continue
        # A sum is not finite if a number is not; it reads each once and makes no copy.
        with np.errstate(over="ignore", invalid="ignore"):
            total = tensor.floats().sum(dtype=np.float64 if tensor.dtype == "F64" else None)
        if not np.isfinite(total):
            raise Refusal(
                "non-finite",
                what=f"the encoder's weights {name} hold a NaN or an infinity",
                where=path,
                fact="vectors made with them could not be compared",
                remedy=another_encoder(),
            )


def missing_file(path: Path) -> Refusal:
    return Refusal(
        "path-missing",
        what=f"the encoder's folder has no {path.name}",
        where=path,
        fact=_missing_fact(path),
        remedy=f"load it again: hf download MODEL --local-dir {shell_word(path.parent)}",
    )


def _missing_fact(path: Path) -> str:
    if path.name == "model.safetensors" and path.with_name("pytorch_model.bin").exists():
        return (
            "there is a pytorch_model.bin: a pickle, which can run any code when it is read; "
            "only safetensors files are read"
        )
    return "the file does not exist"


def unreadable(path: Path, fact: str) -> Refusal:
    return Refusal(
        "file-unreadable",
        what=f"the encoder's {path.name} cannot be read",
        where=path,
        fact=fact,
        remedy=f"load it again: hf download MODEL --local-dir {shell_word(path.parent)}",
    )


def another_encoder() -> str:
    return "name another: index.encoder: minilm"
