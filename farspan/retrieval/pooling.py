"""Weighted means of a model's streams over the tokens of texts, by threads of this process or by
several processes.

Shapes: B texts, S positions, D size of a state, L streams, F = L D features, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from farspan.corpus.processes import spawn_pool
from farspan.domain.model import ModelSpec
from farspan.domain.struct_files import load, save
from farspan.retrieval.cpu_threads import compute_on_threads
from farspan.runtime.device import read_cpu_info
from farspan.runtime.model.compute_dtype import autocast_products
from farspan.runtime.model.decoder import Decoder

#: Batches that wait in each process: enough that none is idle, and few, as each holds its result
#: until it is taken.
_AHEAD = 4
_WEIGHTS = "weights"


def pool_batches(
    model: Decoder, weights_V: Tensor, end: int, batches: Sequence[Sequence[Tensor]]
) -> Iterator[Tensor]:
    """Yield the result of `pool_batch` for each batch, in order."""
    pool = functools.partial(pool_batch, model, weights_V, end)
    if model.tok.weight.device.type == "cpu" and len(batches) > 1:
        yield from compute_on_threads(pool, batches)
    else:
        yield from map(pool, batches)


@torch.inference_mode()
def pool_batch(model: Decoder, weights_V: Tensor, end: int, ids: Sequence[Tensor]) -> Tensor:
    """Weighted means of every stream (B, F) of texts that have tokens, on the CPU. `end` is the
    end-of-text token."""
    device = model.tok.weight.device
    # Texts follow an end of text, as in training. Padding lies behind them, where causal attention
    # cannot see.
    tokens_BS = pad_sequence(list(ids), batch_first=True, padding_value=end)
    weights_BS = pad_sequence([weights_V[text] for text in ids], batch_first=True).to(device)
    behind_end_B1S = F.pad(weights_BS, (1, 0))[:, None]
    # Each stream is summed as it comes: to stack them first took a third as long again.
    sums: list[Tensor] = []
    products = autocast_products(model)
    if bf16_is_fast(device):
        products = torch.autocast(device.type, torch.bfloat16)
    with products:
        for states_BSD in model.residual_streams(F.pad(tokens_BS, (1, 0), value=end).to(device)):
            sums.append(_sum_weighted(behind_end_B1S, states_BSD))
        sums.append(_sum_weighted(behind_end_B1S, model.norm(states_BSD)))
    return (torch.cat(sums, 1) / weights_BS.sum(1, keepdim=True)).cpu()


def _sum_weighted(weights_B1S: Tensor, states_BSD: Tensor) -> Tensor:
    """Return sums (B, D) over positions, in 32 bits."""
    with torch.autocast(states_BSD.device.type, enabled=False):
        return torch.bmm(weights_B1S, states_BSD.float())[:, 0]


def bf16_is_fast(device: torch.device) -> bool:
    """Return whether a device is a CPU that pools in bf16 in less time than in fp32: one with
    matrix units, or AMD's with AVX-512's instructions (0.62 of the time). Intel's with these
    alone took 1.2 to 1.6 times as long (docs/log.md). Of a GPU `inference_dtype` decides."""
    if device.type != "cpu":
        return False
    if torch.cpu._is_amx_tile_supported():
        return True
    is_amd = read_cpu_info("vendor_id") == "AuthenticAMD"
    return is_amd and bool(torch.cpu._is_avx512_bf16_supported())


class Processes:
    """Processes of one thread each that pool batches: `with Processes(4) as processes:
    Embedder(..., processes)`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = spawn_pool(count)

    def __enter__(self) -> Processes:
        self._folder = tempfile.TemporaryDirectory(prefix="farspan-embed-")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()

    def pooled(
        self, model: Decoder, weights_V: Tensor, end: int, batches: Sequence[Sequence[Tensor]]
    ) -> Iterator[Tensor]:
        """Yield the result of `pool_batch` for each batch, in order."""
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            _write_model(Path(folder), model, weights_V)
            tasks = (
                self._pool.submit(_pool_in_process, folder, end, [text.numpy() for text in batch])
                for batch in batches
            )
            waiting: list[Future[npt.NDArray[np.float32]]] = list(
                itertools.islice(tasks, _AHEAD * self._count)
            )
            while waiting:
                yield torch.from_numpy(waiting.pop(0).result())
                waiting += itertools.islice(tasks, 1)


def _write_model(folder: Path, model: Decoder, weights_V: Tensor) -> None:
    save(model.spec, folder / "spec.json")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    save_file({_WEIGHTS: weights_V.contiguous()}, folder / "weights.safetensors")


@functools.lru_cache(maxsize=1)
def _read_model(folder: str) -> tuple[Decoder, Tensor]:
    """Read the model and its token weights, once: a process pools many batches with one model."""
    torch.set_num_threads(1)
    model = Decoder(load(Path(folder) / "spec.json", ModelSpec)).eval()
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model, load_file(Path(folder) / "weights.safetensors")[_WEIGHTS]


def _pool_in_process(
    folder: str, end: int, ids: Sequence[npt.NDArray[np.int64]]
) -> npt.NDArray[np.float32]:
    model, weights_V = _read_model(folder)
    texts = [torch.from_numpy(text) for text in ids]
    pooled: npt.NDArray[np.float32] = pool_batch(model, weights_V, end, texts).numpy()
    return pooled
