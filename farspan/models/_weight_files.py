"""The safetensors files of a Hugging Face folder, and the contents of their headers. Pickled
weights are never opened."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from farspan.domain.decoding import decode_json
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.model import ModelSpec, StoredType, count_parameters
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import missing_path, parse_json, read_bytes
from farspan.domain.units import counted
from farspan.models import Family, family

#: A safetensors file begins with the length of its header. Entries of 1,024 layers take 3 MB.
LENGTH_BYTES = 8
MAX_TENSOR_HEADER_BYTES = 1 << 24
#: Bytes of the index of a sharded model.
MAX_INDEX_BYTES = 1 << 26
WEIGHTS_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Of the SHA-256 of a model's weights.
HASH_DIGITS = 16
#: How safetensors names the types that weights are read from.
STORED_TYPES: dict[str, StoredType] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
VALUE_BYTES: dict[StoredType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Bytes that are compared at a time.
COMPARED_BYTES = 1 << 22


class Entry(msgspec.Struct, frozen=True):
    """A tensor's entry in a header: its type, its shape, and where its values lie behind the
    header."""

    shape: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    data_offsets: tuple[int, int] = (0, 0)
    dtype: str = ""

    @property
    def values(self) -> int:
        return math.prod(self.shape)


class WeightPlaces(msgspec.Struct, frozen=True):
    """Where the tensors of a model lie: the file of each, by its name there.

    `prefix` stands before each name in the family's map: files of a bare model lack it. `stored` is
    the type of most values.
    """

    files: dict[str, Path]
    prefix: str
    stored: StoredType

    def file_of(self, name: str) -> tuple[Path, str]:
        """Return the file of a tensor of the family's map, and its name there."""
        stored_name = name if name in self.files else name.removeprefix(self.prefix)
        return self.files[stored_name], stored_name


def locate_weights(folder: Path, spec: ModelSpec) -> WeightPlaces:
    """Find every tensor of a model by the headers of its files; no value is read, but those of a
    tied head that is stored in addition.

    Raises Refusal (model-unsupported, path-missing) for files that are missing, damaged or cut off,
    and for tensors that are missing, left over, stored twice, of another shape or of a type that
    weights are not read from.
    """
    kind = family(spec.family)
    shards, index = _list_files(folder)
    places: dict[str, tuple[Path, Entry]] = {}
    for path in shards:
        for name, entry in read_header(path).items():
            if name.endswith(kind.BUFFERS):
                continue
            if name in places:
                raise misfit(path, f"tensor {name!r} is in {places[name][0].name}, too")
            places[name] = (path, entry)
    for name, file_name in index.items():
        is_there = name in places and places[name][0].name == file_name
        if not is_there and not name.endswith(kind.BUFFERS):
            fact = f"tensor {name!r}, which {INDEX} puts there, is missing"
            raise misfit(folder / file_name, fact)

    # A tied head may be stored in addition.
    count = sum(entry.values for _, entry in places.values())
    most = count_parameters(spec) + spec.vocab_size * spec.d_model
    if count > most:
        raise misfit(folder, f"the files hold {count:,} values, config.json {most:,} at most")
    types = Counter[StoredType]()
    for name, (path, entry) in places.items():
        if entry.dtype not in STORED_TYPES:
            known = ", ".join(STORED_TYPES)
            raise misfit(path, f"tensor {name!r} is stored as {entry.dtype}; {known} are read")
        stored = STORED_TYPES[entry.dtype]
        start, end = entry.data_offsets
        if end - start != entry.values * VALUE_BYTES[stored]:
            raise misfit(
                path,
                f"tensor {name!r} has {end - start:,} bytes, which is not {entry.shape} in "
                f"{entry.dtype}",
            )
        types[stored] += entry.values
    is_bare = not any(name.startswith(kind.PREFIX) for name in places)
    prefix = kind.PREFIX if is_bare else ""
    _match_tensors(folder, kind, spec, places, prefix)
    files_of = {name: path for name, (path, _) in places.items()}
    return WeightPlaces(files_of, prefix, types.most_common(1)[0][0])


def _match_tensors(
    folder: Path,
    kind: Family,
    spec: ModelSpec,
    places: Mapping[str, tuple[Path, Entry]],
    prefix: str,
) -> None:
    """Refuse files whose tensors are not those of the family's map."""
    left_over = dict(places)
    embedding = None
    count = 0
    for tensor in kind.tensors(spec):
        for name, rows in zip(tensor.theirs, tensor.rows, strict=True):
            stored_name = name if name in places else name.removeprefix(prefix)
            if stored_name not in left_over:
                raise misfit(folder, f"tensor {name!r} is missing")
            path, entry = left_over.pop(stored_name)
            count += entry.values
            own_rows = entry.shape[-1 if tensor.transpose else 0] if entry.shape else 0
            if own_rows != rows:
                raise misfit(path, f"{name} has the shape {entry.shape}, config.json {rows} rows")
            if tensor.ours == "tok.weight":
                embedding = (path, entry)
    if count != count_parameters(spec):
        fact = f"the files hold {count:,} values, config.json {count_parameters(spec):,}"
        raise misfit(folder, fact)
    head_name = f"{kind.HEAD}.weight"
    if spec.tied and head_name in left_over:
        head = left_over.pop(head_name)
        if embedding is None or not _are_equal(head, embedding):
            raise misfit(
                head[0],
                f"tie_word_embeddings is true, but {head_name} is not the embedding's matrix",
            )
    if left_over:
        raise misfit(folder, f"tensor {min(left_over)!r} is left over")


def _are_equal(a: tuple[Path, Entry], b: tuple[Path, Entry]) -> bool:
    """Return whether two tensors of files have the same type, shape and bytes."""
    if (a[1].dtype, a[1].shape) != (b[1].dtype, b[1].shape):
        return False
    remaining = a[1].data_offsets[1] - a[1].data_offsets[0]
    with a[0].open("rb") as file_a, b[0].open("rb") as file_b:
        for file, entry in ((file_a, a[1]), (file_b, b[1])):
            header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
            file.seek(LENGTH_BYTES + header_bytes + entry.data_offsets[0])
        while remaining > 0:
            size = min(remaining, COMPARED_BYTES)
            if file_a.read(size) != file_b.read(size):
                return False
            remaining -= size
    return True


def _list_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files of a model's weights, and the file name of each tensor by the index; of one
    file there is none. Raises Refusal (model-unsupported, path-missing)."""
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE], {}
    if (folder / INDEX).exists():
        content = read_bytes(folder / INDEX, most=MAX_INDEX_BYTES)
        if len(content) > MAX_INDEX_BYTES:
            raise misfit(folder, f"{INDEX} is longer than {MAX_INDEX_BYTES >> 20} MiB")
        index = parse_json(content, _Index, folder / INDEX).weight_map
        shards = sorted(set(index.values()))
        for name in shards:
            if Path(name).name != name or name == "..":
                raise misfit(folder, f"{INDEX} names {name!r}, a file outside the folder")
        return [folder / name for name in shards], index
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
    files, _ = _list_files(folder)
    for path in files:
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


def read_header(path: Path) -> dict[str, Entry]:
    """Return the entry of each tensor in the header of a safetensors file. Raises Refusal for a
    file that is missing, damaged or cut off."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if header_bytes > MAX_TENSOR_HEADER_BYTES:
                raise misfit(path, f"its header has {header_bytes:,} bytes")
            content = file.read(header_bytes)
            header = decode_json(content, dict[str, Entry])
            size = file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        raise missing_path(path) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise misfit(path, f"the file is damaged: {error}") from None
    header.pop("__metadata__", None)
    data_bytes = max((entry.data_offsets[1] for entry in header.values()), default=0)
    missing = LENGTH_BYTES + header_bytes + data_bytes - size
    if missing > 0:
        raise misfit(path, f"the file is damaged: its end is missing, {counted(missing, 'byte')}")
    return header


def misfit(where: Path, fact: str) -> Refusal:
    """Build the refusal of weights that do not fit their config.json."""
    return Refusal(
        "model-unsupported",
        what="the weights do not fit config.json",
        where=where,
        fact=fact,
        remedy="download or export the model again",
    )
