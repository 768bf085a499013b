"""Parameters, gradients and moments of one worker, in flat buckets that are summed, divided and
updated whole.

The model computes in the working dtype (fp32, bf16 or fp16); the optimizer keeps fp32 masters.
Frozen parameters have neither gradient nor master, and lie outside of buckets. What
ZeRO (arXiv 1910.02054) divides over the data axis is divided bucket by bucket: of n workers the
k-th owns the k-th part of each. AdamW updates elements, Muon whole matrices, which lie in buckets
of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farspan.domain.train import Muon, Optimizer, Precision
from farspan.runtime.native_dtypes import TORCH_DTYPES
from farspan.runtime.state.muon import MatrixUpdates
from farspan.runtime.state.zero_buckets import (
    Bucket,
    ZeroDivision,
    divide_buckets,
    owned_length,
    weight_decay_segment,
)

#: Devices that take what changes from step to step from their own memory, so that a step may be
#: recorded as a graph: the same kernels, and the same bits, whether it is or not.
RECORDING_DEVICES = frozenset({"cuda"})
#: Backends whose fused AdamW ignores `grad_scale`, by which alone gradients are clipped and fp16's
#: scale is taken off: Apple's GPUs until pytorch#186360.
IGNORES_GRAD_SCALE = frozenset({"mps"})
Scalar = float | Tensor


class UpdateScalars(NamedTuple):
    """What an update takes that changes from step to step: numbers of the host, or 0-dim fp32
    tensors of the device."""

    lr: Scalar
    #: Of the tables of the embedding and the head, where Muon updates the matrices.
    table_lr: Scalar
    #: Updates of the run, this one included.
    updates: Scalar
    #: What gradients are divided by.
    grad_divisor: Scalar
    #: What the average of the weights moves towards them; 0 where there is none.
    average_weight: Scalar = 0.0
    #: 1.0 where the update is not to be made; None where the host has seen to that.
    skip: Tensor | None = None


def update_scalars(
    optimizer: Optimizer, lr: float, updates: int, grad_divisor: float = 1.0
) -> UpdateScalars:
    """Return the numbers of the update that makes it `updates` in all."""
    table_lr = lr * optimizer.muon.embedding if optimizer.muon else lr
    average_weight = 1 - ema_decay(optimizer.average, updates) if optimizer.average else 0.0
    return UpdateScalars(lr, table_lr, float(updates), grad_divisor, average_weight)


def ema_decay(share: float, step: int) -> float:
    """Return the decay of an average at a step: less in the first ones, which soon would be
    forgotten (as TensorFlow's ExponentialMovingAverage has it)."""
    return min(share, (1 + step) / (10 + step))


class TrainState:
    """Flat buckets of parameters in the model's order; the model's parameters become views of them.

    In each bucket parameters with two or more dims come first: weight decay shrinks those.
    Gradients of every backward pass are added in fp32 as soon as they exist, so that accumulation
    loses no precision.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        device: torch.device | None = None,
        division: ZeroDivision | None = None,
        updates: MatrixUpdates | None = None,
        averaged: bool = False,
    ) -> None:
        """Keep the state of a model; `updates` of the division's matrices, where it has any;
        whether a moving average of the weights is kept."""
        self.division = division or ZeroDivision()
        self._updates = updates
        everything = dict(model.named_parameters())
        old = {name: value for name, value in everything.items() if value.requires_grad}
        self.names = list(old)
        self.shapes = [parameter.shape for parameter in old.values()]
        self.buckets = divide_buckets(self.names, self.shapes, self.division)
        self.dtype = TORCH_DTYPES[precision]
        self.device = next(iter(everything.values())).device if device is None else device
        #: Parameters outside of all buckets: they stay as they are loaded, in the working dtype.
        self.frozen = self._replace_frozen(model)
        #: The bucket of each parameter, and where it begins there.
        self.home = dict[int, tuple[int, int]]()
        for b, bucket in enumerate(self.buckets):
            for member, start in zip(bucket.members, bucket.starts, strict=True):
                self.home[member] = (b, start)
        self._allocate()
        #: By bucket, as the masters; nothing where no average is kept.
        self.average = [torch.zeros_like(master) for master in self.master] if averaged else []
        #: Parameters that have a gradient of this step: what the first backward pass gives takes
        #: the old one's place.
        self._begun: set[int] = set()
        #: Called with a parameter's index each time a backward pass has added to its gradient.
        self.on_grad: Callable[[int], None] | None = None
        self.parameters = self._replace_parameters(model, list(old.values()))
        values = [(name, value) for name, value in everything.items() if not value.is_meta]
        if values:
            self.load_parameters(values)

    def _allocate(self) -> None:
        buckets = self.buckets
        sizes = [bucket.size for bucket in buckets]
        owned_sizes = [owned_length(bucket) for bucket in buckets]
        # Muon has no second moment: nothing for its matrices.
        second_sizes = [0 if bucket.matrices else owned_length(bucket) for bucket in buckets]
        self.working: list[Tensor]
        self.shards: list[Tensor]
        if self.division.zero == 3:
            # Apart, so that each can be given back to the allocator by itself, and never touched
            # until it is gathered.
            self.working = []
            self.shards = self._new_zeros(owned_sizes, self.dtype)
            for b, bucket in enumerate(buckets):
                working = torch.empty(bucket.size, dtype=self.dtype, device=self.device)
                if bucket.ways == 1:
                    self.shards[b] = working.zero_()
                self.working.append(working)
        else:
            self.working = self._new_zeros(sizes, self.dtype)
            self.shards = self._own_parts(self.working)
        self.master = self.shards
        if self.dtype != torch.float32:
            self.master = self._new_zeros(owned_sizes)
        self.exp_avg = self._new_zeros(owned_sizes)
        self.exp_avg_sq = self._new_zeros(second_sizes)
        #: The fp32 gradient of a whole bucket where the backward pass writes it; None while it is
        #: not there.
        self.collected: list[Tensor | None]
        if self.division.zero < 2:
            whole = self._new_zeros(sizes)
            self.collected = [*whole]
            self.grad = self._own_parts(whole)
        else:
            self.grad = self._new_zeros(owned_sizes)
            self.collected = [None] * len(buckets)
            for b, bucket in enumerate(buckets):
                if bucket.ways == 1:
                    self.collected[b] = self.grad[b]

    def _new_zeros(self, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Allocate zeros for all buckets at once."""
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self.device)
        return list(flat.split(sizes))

    def _own_parts(self, flats: Sequence[Tensor]) -> list[Tensor]:
        return [flat[bucket.own] for flat, bucket in zip(flats, self.buckets, strict=True)]

    def _replace_parameters(
        self, model: nn.Module, old: Sequence[nn.Parameter]
    ) -> list[nn.Parameter]:
        """Put views of the buckets into the model, and collect their gradients."""
        new: dict[nn.Parameter, nn.Parameter] = {}
        self._hooks = []
        for i, parameter in enumerate(old):
            working = self.view_parameter(self.working, i)
            replacement = nn.Parameter(working, requires_grad=parameter.requires_grad)
            collect = (
                self._accumulate_lasting(i) if self.division.zero < 2 else self._accumulate_sent(i)
            )
            self._hooks.append(replacement.register_post_accumulate_grad_hook(collect))
            new[parameter] = replacement
        for module in model.modules():
            for name, old_parameter in module._parameters.items():
                if old_parameter in new:
                    module._parameters[name] = new[old_parameter]
        return list(new.values())

    def _replace_frozen(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Put parameters of this state's device and dtype in the place of frozen ones."""
        frozen = dict[str, nn.Parameter]()
        for path, module in model.named_modules():
            for name, old in module._parameters.items():
                if old is not None and not old.requires_grad:
                    value = torch.zeros(old.shape, dtype=self.dtype, device=self.device)
                    parameter = nn.Parameter(value, requires_grad=False)
                    module._parameters[name] = parameter
                    frozen[f"{path}.{name}".lstrip(".")] = parameter
        return frozen

    def _accumulate_lasting(self, index: int) -> Callable[[Tensor], None]:
        """Return a hook that collects into a bucket that is there all the time: once a step's first
        gradient is, it is the parameter's own, to which torch adds the later ones, without Python,
        where both have one dtype."""
        part = self.view_parameter(self.collected, index)  # type: ignore[arg-type]
        same = self.dtype == torch.float32

        def collect(parameter: Tensor) -> None:
            if index not in self._begun:
                assert parameter.grad is not None
                part.copy_(parameter.grad)
                self._begun.add(index)
                parameter.grad = part if same else None
            elif not same:
                assert parameter.grad is not None
                part.add_(parameter.grad)
                parameter.grad = None
            if self.on_grad is not None:
                self.on_grad(index)

        return collect

    def _accumulate_sent(self, index: int) -> Callable[[Tensor], None]:
        """Return a hook that collects into a bucket that is new whenever the one before has been
        sent."""
        b, start = self.home[index]
        shape = self.shapes[index]
        stop = start + shape.numel()
        bucket = self.buckets[b]

        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            flat = self.collected[b]
            if flat is None:
                flat = self.collected[b] = torch.empty(bucket.size, device=self.device)
                for gap in bucket.gaps:
                    flat[gap] = 0.0
                self._begun.difference_update(bucket.members)
            part = flat[start:stop].view(shape)
            if index in self._begun:
                part.add_(parameter.grad)
            else:
                part.copy_(parameter.grad)
                self._begun.add(index)
            parameter.grad = None
            if self.on_grad is not None:
                self.on_grad(index)

        return collect

    def view_parameter(self, flats: Sequence[Tensor], index: int) -> Tensor:
        """Return parameter `index` inside whole buckets, in its own shape."""
        b, start = self.home[index]
        shape = self.shapes[index]
        return flats[b][start : start + shape.numel()].view(shape)

    def owned_range(self, index: int) -> tuple[int, int, slice]:
        """Return this worker's part of parameter `index`, flattened: [start, stop), and its place
        in its bucket's own part."""
        b, start = self.home[index]
        own = self.buckets[b].own
        low = max(start, own.start)
        high = min(start + self.shapes[index].numel(), own.stop)
        if high <= low:
            return 0, 0, slice(0, 0)
        where = slice(low - own.start, high - own.start)
        return low - start, high - start, where

    def load_parameters(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Take parameters' values, each in this worker's shape; call `publish_masters` afterwards
        where state is divided."""
        index = {name: i for i, name in enumerate(self.names)}
        with torch.no_grad():
            for name, value in values:
                if name in self.frozen:
                    self.frozen[name].copy_(value)
                    continue
                i = index[name]
                b, _ = self.home[i]
                start, stop, where = self.owned_range(i)
                own = value.detach().reshape(-1)[start:stop]
                self.master[b][where].copy_(own)
        self.publish_masters()

    def begin_weight_average(self) -> None:
        """Begin the average with the masters, the first weights."""
        for average, master in zip(self.average, self.master, strict=False):
            average.copy_(master)

    def update_weight_average(self, weights: Sequence[Tensor], weight: Scalar) -> None:
        """Move the average towards these weights by `weight` of the way."""
        lerp_(self.average, weights, weight)

    def swap_weight_average(self) -> None:
        """Make the average the masters, and keep these in it meanwhile; and back again."""
        for average, master in zip(self.average, self.master, strict=False):
            own = master.clone()
            master.copy_(average)
            average.copy_(own)

    def publish_masters(self) -> None:
        """Round the masters into the working dtype. Where state is divided the working buckets are
        gathered next."""
        if self.master is not self.shards:
            torch._foreach_copy_(self.shards, self.master)

    def squared_grad_norm(self, counted: Callable[[Bucket], bool] | None = None) -> float:
        """Sum the squares of the owned gradient, of all buckets or of those that count."""
        parts = []
        for bucket, part in zip(self.buckets, self.grad, strict=True):
            if counted is None or counted(bucket):
                parts.append(part)
        if not parts:
            return 0.0
        norms = torch.stack(torch._foreach_norm(parts))
        if self.device.type in RECORDING_DEVICES:
            return float(norm_of_norms(norms)) ** 2
        # In double precision on the CPU: Apple's GPUs have none.
        values = norms.cpu().double().tolist()
        return sum((norm * norm for norm in values), 0.0)

    def norm_on_device(self) -> Tensor:
        """Return the norm of the whole gradient, fp64, where it lies."""
        return norm_of_norms(torch.stack(torch._foreach_norm(self.grad)))

    def remove_hooks(self) -> None:
        """Release the model: the hooks of its parameters hold both it and this state in memory."""
        for hook in self._hooks:
            hook.remove()

    def clear_gradients(self) -> None:
        """Begin new gradients: every parameter's must be given before the next update."""
        self._begun.clear()
        for parameter in self.parameters:
            parameter.grad = None
        for b, bucket in enumerate(self.buckets):
            if self.division.zero >= 2 and bucket.ways > 1:
                self.grad[b].zero_()  # To which every microbatch's part is added.
                continue
            full = self.collected[b]
            if full is not None:
                # Rounding to few bits makes NaNs of all that lies in a block with an infinity.
                for gap in bucket.gaps:
                    full[gap] = 0.0

    def optimizer_step(
        self, optimizer: Optimizer, lr: float, step: int, grad_divisor: float
    ) -> None:
        """Make one step on gradients divided by `grad_divisor`, and begin new ones. `step` counts
        updates from 1."""
        scalars = update_scalars(optimizer, lr, step, grad_divisor)
        self.update(optimizer, self.on_device(scalars))

    def on_device(self, scalars: UpdateScalars) -> UpdateScalars:
        """Return an update's numbers where this device takes them from."""
        if self.device.type not in RECORDING_DEVICES:
            return scalars
        numbers = torch.tensor([*scalars[:5], 0.0], dtype=torch.float32)
        return UpdateScalars(*numbers.to(self.device).unbind())

    def update(self, optimizer: Optimizer, scalars: UpdateScalars) -> None:
        """Make one step of the optimizer, and begin new gradients."""
        if len(self._begun) < len(self.parameters):
            raise RuntimeError("a parameter got no gradient: it would be updated by an older one")
        self._adamw_step(optimizer, scalars)
        if self._updates is not None and optimizer.muon:
            self._muon_step(self._updates, optimizer.muon, scalars, optimizer.weight_decay)
        self.clear_gradients()
        self.publish_masters()

    def _adamw_step(self, optimizer: Optimizer, scalars: UpdateScalars) -> None:
        """Step AdamW (arXiv 1711.05101) for all elements that are not of matrices updated whole."""
        divisor = self._as_tensor(scalars.grad_divisor)
        count = self._as_tensor(scalars.updates)
        # What is decayed, and is not Muon's, are the tables of the embedding and the head.
        for decay, decayed, rate in (
            (optimizer.weight_decay, True, scalars.table_lr),
            (0.0, False, scalars.lr),
        ):
            masters: list[Tensor] = []
            grads: list[Tensor] = []
            averages: list[Tensor] = []
            squares: list[Tensor] = []
            for b, bucket in enumerate(self.buckets):
                part = weight_decay_segment(bucket, decayed)
                if part is not None and not bucket.matrices:
                    masters.append(self.master[b][part])
                    grads.append(self.grad[b][part])
                    averages.append(self.exp_avg[b][part])
                    squares.append(self.exp_avg_sq[b][part])
            if not masters:
                continue
            grad_scale: Tensor | None = divisor
            if self.device.type in IGNORES_GRAD_SCALE:
                torch._foreach_div_(grads, divisor)
                grad_scale = None
            torch._fused_adamw_(
                masters,
                grads,
                averages,
                squares,
                [],
                [count] * len(masters),
                amsgrad=False,
                lr=rate,
                beta1=optimizer.beta1,
                beta2=optimizer.beta2,
                weight_decay=decay,
                eps=optimizer.eps,
                maximize=False,
                grad_scale=grad_scale,
                found_inf=scalars.skip,
            )

    def _as_tensor(self, value: Scalar) -> Tensor:
        if isinstance(value, Tensor):
            return value
        return torch.tensor(value, dtype=torch.float32, device=self.device)

    def _muon_step(
        self, updates: MatrixUpdates, muon: Muon, scalars: UpdateScalars, weight_decay: float
    ) -> None:
        """Step Muon with Nesterov's momentum for the matrices that this worker owns."""
        buckets = [b for b, bucket in enumerate(self.buckets) if bucket.matrices]
        if not buckets:
            return
        masters = [self.master[b] for b in buckets]
        grads = [self.grad[b] for b in buckets]
        averages = [self.exp_avg[b] for b in buckets]
        lr = scalars.lr
        momentum_weight: Scalar = 1 - muon.momentum
        torch._foreach_div_(grads, scalars.grad_divisor)
        # Without an update gradients may hold anything, and momentum and weights stay.
        if scalars.skip is not None:
            skipped = scalars.skip.bool()
            for grad in grads:
                grad.masked_fill_(skipped, 0.0)
            lr = lr * ~skipped
            momentum_weight = momentum_weight * ~skipped
        lerp_(averages, grads, momentum_weight)
        lerp_(grads, averages, muon.momentum)
        torch._foreach_mul_(masters, 1 - lr * weight_decay)

        owned = []
        for b in buckets:
            owned += [i for i in self.buckets[b].members if self.owned_range(i)[1]]
        momenta = [self._view_owned(self.grad, i) for i in owned]
        matrices = [self.names[i] for i in owned]
        steps = updates.muon_directions(matrices, momenta, muon.iterations)
        if not steps:
            return
        weights = [self._view_owned(self.master, i) for i in owned]
        if isinstance(lr, Tensor):
            torch._foreach_mul_(steps, lr)
            torch._foreach_sub_(weights, steps)
        else:
            torch._foreach_sub_(weights, steps, alpha=lr)

    def _view_owned(self, flats: Sequence[Tensor], index: int) -> Tensor:
        """Return parameter `index`, which this worker owns whole, inside its parts of buckets."""
        b, _ = self.home[index]
        _, _, where = self.owned_range(index)
        return flats[b][where].view(self.shapes[index])


def norm_of_norms(norms: Tensor) -> Tensor:
    """Return the norm (0-dim, fp64) of tensors with these fp32 norms."""
    return torch.linalg.vector_norm(norms, dtype=torch.float64)


def lerp_(targets: Sequence[Tensor], ends: Sequence[Tensor], weight: Scalar) -> None:
    """Move targets towards their ends by `weight` of the way."""
    if isinstance(weight, Tensor):
        for target, end in zip(targets, ends, strict=True):
            target.lerp_(end, weight)
    else:
        torch._foreach_lerp_(list(targets), list(ends), weight)
