"""The blocks of a model, compiled before its first step; or computed as they are where that fails.

Shapes: B rows, S positions, D d_model.
"""

from __future__ import annotations

import itertools
import os
import shutil
import types
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farspan.domain.problems import Refusal
from farspan.runtime.compiler import describe_failure
from farspan.runtime.device import synchronize_device
from farspan.runtime.model.decoder import Block, Decoder
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.model.linear import freeze_base
from farspan.runtime.model.rotary import layer_rotation


class BlockInputs(NamedTuple):
    """What a training gives to blocks: the numbers of rows of its microbatches, positions, and the
    share that is dropped."""

    rows: tuple[int, ...]
    seq_len: int
    dropout: float = 0.0


def compile_blocks(model: Decoder, device: torch.device) -> None:
    """torch.compile each block's arithmetic, not the hooks that gather its weights; on a CPU that
    needs a C++ compiler.

    Each number of rows has a graph of its own: what is computed again in a backward pass could find
    another graph than its forward pass had, where one takes several (pytorch#166926).
    """
    compilers = os.environ.get("CXX", "g++"), "clang++"
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise Refusal(
            "extra-missing",
            what="train.compile needs a C++ compiler on a CPU",
            where="run.yaml, key train.compile",
            fact="neither g++ nor clang++ is on the path",
            remedy="apt-get install g++, or set train.compile: false",
            key="train.compile",
        )
    for block in model.blocks:
        # Its own, also where another number of rows was compiled before.
        forward = types.MethodType(type(block).forward, block)
        block.forward = torch.compile(forward, dynamic=False)


def restore_blocks(model: Decoder) -> None:
    """Let blocks compute without the compiler."""
    for block in model.blocks:
        del block.forward


def compile_or_restore(
    model: Decoder, device: torch.device, dtype: torch.dtype, inputs: BlockInputs
) -> str:
    """Compile a model's blocks for a training's inputs. Where the compiler fails, let them compute
    without it and return a warning. Raises Refusal (extra-missing) as `compile_blocks`."""
    compile_blocks(model, device)
    if not len(model.blocks):
        return ""
    # On a tensor axis blocks exchange: others of it would wait for one whose compiler has failed.
    if model.layouts.axis.size == 1:
        try:
            warm_up_blocks(model, device, dtype, inputs)
        # Whatever a compiler, a driver or a full disk raises: PyTorch's operators give the same.
        except Exception as error:
            restore_blocks(model)
            cause = describe_failure(error)
            return f"the blocks could not be compiled, and take longer for it: {cause}"
    # Other inputs, such as a validation's, make other graphs later on.
    torch._dynamo.config.suppress_errors = True
    return ""


def warm_up_blocks(
    model: Decoder, device: torch.device, dtype: torch.dtype, inputs: BlockInputs
) -> None:
    """Make a forward and a backward pass over a compiled block for each number of rows.

    Each is another block of the same form, which shares its graph with the model's: no gradient of
    these is touched, nothing is sent, and random numbers are drawn as if this had not been. Each
    kind of block has one. Raises what the compiler raises.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        # The first block's input has a gradient where the embedding is trained.
        unlike = (True, False) if model.spec.lora else (True,)
        for layer in _first_of_each_kind(model):
            block = _make_alike(model, layer, device, dtype)
            for rows, has_grad in itertools.product(dict.fromkeys(inputs.rows), unlike):
                shape = (rows, inputs.seq_len, model.spec.d_model)
                x_BSD = torch.zeros(shape, device=device, dtype=dtype, requires_grad=has_grad)
                _pass_forward(model, block, layer, x_BSD, inputs).backward()
                synchronize_device(device)


def _first_of_each_kind(model: Decoder) -> list[int]:
    """Return the first layer of each kind of block that is here."""
    by_kind: dict[object, int] = {}
    for layer, block in enumerate(model.blocks, max(model.units[0] - 1, 0)):
        assert isinstance(block, Block)
        by_kind.setdefault(block.kind, layer)
    return list(by_kind.values())


def _make_alike(model: Decoder, layer: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a block of zeros that is like the model's at a layer, and compiled as that is."""
    like = model.get_submodule(f"blocks.{layer}")
    assert isinstance(like, Block)
    with torch.device("meta"):
        block = Block(model.spec, like.attn.vanilla, like.attn.layouts, layer)
    if model.spec.lora:
        freeze_base(block)
    block.attn.policy = like.attn.policy
    for module in block.modules():
        _replace_by_zeros(module._parameters.items(), device, dtype, module)
    block.train(like.training)
    block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    return block


def _replace_by_zeros(
    parameters: Iterable[tuple[str, nn.Parameter | None]],
    device: torch.device,
    dtype: torch.dtype,
    module: nn.Module,
) -> None:
    """Give a module's parameters, which have none, values on a device."""
    for name, parameter in list(parameters):
        if parameter is not None:
            zeros = torch.zeros(parameter.shape, device=device, dtype=dtype)
            module._parameters[name] = nn.Parameter(zeros, parameter.requires_grad)


def _pass_forward(
    model: Decoder, block: nn.Module, layer: int, x_BSD: Tensor, inputs: BlockInputs
) -> Tensor:
    """Return a number that a block has made of x as the model gives it that."""
    device = x_BSD.device
    dropouts = None
    if inputs.dropout:
        seeds = torch.zeros(len(x_BSD), dtype=torch.int32, device=device)
        first, second = Dropout(inputs.dropout, seeds).at_places(2)
        dropouts = first, second
    rotation = layer_rotation(model.spec, layer, inputs.seq_len, device, x_BSD.dtype)
    return model.run_block(block, x_BSD, rotation, dropouts).sum()
