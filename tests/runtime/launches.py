"""Counts what a GPU would launch, read and write: operators on the meta device, which stands for
it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import layer_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from benchmarks.gpu_step import plan_of
from farspan.domain.model import ModelSpec
from farspan.domain.train import TrainSpec
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model import decoder, kernels
from farspan.runtime.parallel import executor
from farspan.runtime.parallel.executor import Executor

#: Operators that only describe memory otherwise, or reserve it.
NO_KERNELS = {
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "new_empty",
    "new_empty_strided",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
    "_reshape_alias",
    "_unsafe_view",
}
#: Kernels of one compiled loss: what the compiler made of it on a CPU, at most.
FUSED_KERNELS = 5
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
#: Operators that take more than one kernel: a norm's gains have their gradients summed by another
#: (layer_norm_kernel.cu), attention's products have one before and one after them
#: (flash_bwd_launch_template.h), and zeros are written before what is put into them.
KERNELS = {
    "native_layer_norm_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3,
    "embedding_dense_backward": 2,
    "slice_backward": 2,
}
#: Operators that read nothing of their operands, and that write operands without reading them.
READ_NOTHING = {"new_zeros", "ones_like", "zeros_like"}
ONLY_WRITTEN = {"copy_", "_foreach_copy_", "fill_", "zero_"}
#: Elements of a block, and blocks of a launch, of operators over lists of tensors
#: (ATen/native/cuda/MultiTensorApply.cuh).
BLOCK_ELEMENTS = 65_536
LAUNCH_BLOCKS = 320
#: The meta device lacks AdamW with a learning rate of its own memory.
META_OPERATORS = torch.library.Library("aten", "IMPL", "Meta")
META_OPERATORS.impl("_fused_adamw_.tensor_lr", lambda *given, **named: None)


class Launch(NamedTuple):
    """A kernel, or several (`count`), and the bytes that it reads and writes."""

    name: str
    size: int
    count: int = 1


class LaunchCounter(TorchDispatchMode):
    """Collects the launches of what runs under it; `launches` may be added to for kernels that are
    not PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        result = operator(*given, **(named or {}))
        name = operator._schema.name.split("::")[1]
        if name not in NO_KERNELS:
            tensors = [*tensors_in((given, named)), *tensors_in(result)]
            if any(tensor.is_meta for tensor in tensors):
                size = count_bytes(operator, given, named or {}, result)
                self.launches.append(Launch(name, size, count_launches(name, given)))
        return result

    def fused_loss(self, logits: Tensor, targets: Tensor, V: int) -> Tensor:
        """Stand for the compiled loss: logits are read for the sum and for the gradient, which is
        written over them."""
        self.launches.append(Launch("fused", 3 * logits.nbytes, FUSED_KERNELS))
        return torch.empty((), device="meta")

    @property
    def count(self) -> int:
        return sum(launch.count for launch in self.launches)

    @property
    def bytes_beside_products(self) -> int:
        return sum(launch.size for launch in self.launches if launch.name not in PRODUCTS)


def count_launches(name: str, given: Any) -> int:
    """Return the kernels of an operator: one, or by the elements of a list of tensors."""
    if not name.startswith(("_foreach", "_fused")):
        return KERNELS.get(name, 1)
    blocks = sum(math.ceil(tensor.numel() / BLOCK_ELEMENTS) for tensor in given[0])
    return math.ceil(blocks / LAUNCH_BLOCKS)


def count_bytes(operator: Any, given: Any, named: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes: operands that it changes count twice,
    unless it only writes them."""
    schema = operator._schema
    name = schema.name.split("::")[1]
    operands = dict(zip((argument.name for argument in schema.arguments), given, strict=False))
    operands |= named
    read = 0
    written = 0
    for argument in schema.arguments:
        size = sum(tensor.nbytes for tensor in tensors_in(operands.get(argument.name)))
        is_changed = argument.alias_info is not None and argument.alias_info.is_write
        if is_changed:
            written += size
        if not (is_changed and (argument.is_out or name in ONLY_WRITTEN)):
            read += size
    if not any(kind.alias_info is not None for kind in schema.returns):
        written += sum(tensor.nbytes for tensor in tensors_in(result))
    if name in READ_NOTHING:
        read = 0
    elif name in ("embedding", "gather"):  # Of the table what it writes.
        index = "indices" if name == "embedding" else "index"
        read = written + operands[index].nbytes
    elif name == "scatter_add_":  # Of the table what is added.
        written = operands["src"].nbytes
        read = 2 * written + operands["index"].nbytes
    elif name == "native_layer_norm_backward":  # Both kernels read them.
        read += operands["grad_out"].nbytes + operands["input"].nbytes
    return read + written


def tensors_in(values: object) -> Iterator[Tensor]:
    """Yield the tensors among operands or results."""
    yield from (value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor))


def pose_as_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let the head on the meta device be an H200's."""
    patch.setattr(kernels, "_pad_vocabulary", lambda V, device: -(-V // 64) * 64)
    patch.setattr(kernels, "_device_memory", lambda device: 141 * 10**9)


def attend_by_flash(
    q: Tensor, k: Tensor, v: Tensor, policy: object, window: None, scale: None
) -> Tensor:
    """Attention as a GPU computes it."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def meta_executor(
    patch: pytest.MonkeyPatch, spec: ModelSpec, train: TrainSpec, microbatches: int = 1
) -> tuple[Executor, LaunchCounter]:
    """Return an executor of one GPU, which the meta device stands for, with eager blocks, and what
    counts its launches."""
    counter = LaunchCounter()
    pose_as_gpu(patch)
    patch.setattr(decoder, "causal_attention", attend_by_flash)
    # A GPU has one kernel for it; the meta device takes it apart.
    patch.setattr(decoder.F, "rms_norm", lambda x, s, w, e: layer_norm(x, s, w, None, e))
    patch.setattr(Topology, "device", "meta")
    patch.setattr(executor, "synchronize_device", lambda device: None)
    plan = plan_of(spec, train, "cuda")
    (replica,) = plan.replicas
    plan = replace(plan, replicas=(replace(replica, microbatches=microbatches),))
    made = Executor(Topology(plan, 0), torch.device("meta"))
    made.begin_run()
    made.model.fused_loss = counter.fused_loss
    return made, counter
