"""Parameters, gradients and moments of one worker, in flat buckets that are summed, divided and
updated whole.

The model computes in the working dtype (fp32, bf16 or fp16); the optimizer keeps fp32 masters. What
ZeRO (arXiv
1910.02054) divides over the data axis is divided bucket by bucket: of n workers the k-th owns the
  k-th part of each. AdamW updates elements, Muon whole matrices, which lie in buckets of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from farspan.domain.train import Muon, Optimizer, Precision
from farspan.runtime.state.matrix_updates import MatrixUpdates
from farspan.runtime.state.zero_buckets import Bucket, Division, divide, length, segment

WORKING_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


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
        division: Division | None = None,
        updates: MatrixUpdates | None = None,
        averaged: bool = False,
    ) -> None:
        """`updates` of the division's matrices, where it has any; whether a moving average of the
        weights is kept."""
        self.division = division or Division()
        self._updates = updates
        division = self.division
        named = list(model.named_parameters())
        self.names = [name for name, _ in named]
        self.shapes = [parameter.shape for _, parameter in named]
        self.buckets = divide(self.names, self.shapes, division)
        self.dtype = WORKING_DTYPES[precision]
        self.device = named[0][1].device if device is None else device
        self.home = {
            member: (b, start)
            for b, bucket in enumerate(self.buckets)
            for member, start in zip(bucket.members, bucket.starts, strict=True)
        }
        self._allocate()
        #: By bucket, as the masters; nothing where no average is kept.
        self.average = [torch.zeros_like(master) for master in self.master] if averaged else []
        #: Parameters that have a gradient of this step: what the first backward pass gives takes
        #: the old one's place.
        self._begun: set[int] = set()
        #: Called with a parameter's index each time a backward pass has added to its gradient.
        self.on_grad: Callable[[int], None] | None = None
        self.parameters = self._replace(model, [parameter for _, parameter in named])
        values = [(name, parameter) for name, parameter in named if parameter.device.type != "meta"]
        if values:
            self.load(values)

    def _allocate(self) -> None:
        whole, own = (
            sum(getattr(b, name) if name == "size" else length(b) for b in self.buckets)
            for name in ("size", "own")
        )
        new = lambda size, dtype=torch.float32: torch.zeros(size, dtype=dtype, device=self.device)  # noqa: E731
        sizes = [bucket.size for bucket in self.buckets]
        owns = [length(bucket) for bucket in self.buckets]
        if self.division.zero == 3:
            # Apart, so that each can be given back to the allocator by itself, and never touched
            # until it is gathered.
            self.working = [
                torch.empty(size, dtype=self.dtype, device=self.device)
                if bucket.ways > 1
                else new(size, self.dtype)
                for size, bucket in zip(sizes, self.buckets, strict=True)
            ]
            shards = new(own, self.dtype).split(owns)
            self.shards = [
                working if bucket.ways == 1 else shard
                for working, shard, bucket in zip(self.working, shards, self.buckets, strict=True)
            ]
        else:
            self.working = list(new(whole, self.dtype).split(sizes))
            self.shards = [
                part[bucket.own] for part, bucket in zip(self.working, self.buckets, strict=True)
            ]
        same = self.dtype == torch.float32
        self.master = self.shards if same else list(new(own).split(owns))
        self.exp_avg = list(new(own).split(owns))
        #: Muon has no second moment: nothing for its matrices.
        seconds = [
            0 if bucket.matrices else size for bucket, size in zip(self.buckets, owns, strict=True)
        ]
        self.exp_avg_sq = list(new(sum(seconds)).split(seconds))
        #: The fp32 gradient of a whole bucket where the backward pass writes it; None while it is
        #: not there.
        self.collected: list[Tensor | None]
        if self.division.zero < 2:
            self.collected = list(new(whole).split(sizes))
            self.grad = [
                full[bucket.own]
                for full, bucket in zip(self.collected, self.buckets, strict=True)
                if full is not None
            ]
        else:
            self.collected = [None] * len(self.buckets)
            self.grad = list(new(own).split(owns))
            for b, bucket in enumerate(self.buckets):
                if bucket.ways == 1:
                    self.collected[b] = self.grad[b]

    def _replace(self, model: nn.Module, old: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Put views of the buckets into the model, and collect their gradients."""
        new: dict[int, nn.Parameter] = {}
        for i, parameter in enumerate(old):
            new[id(parameter)] = nn.Parameter(
                self.view(self.working, i), requires_grad=parameter.requires_grad
            )
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = new[id(parameter)]
        parameters = [new[id(parameter)] for parameter in old]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._collector(i))
            for i, parameter in enumerate(parameters)
        ]
        return parameters

    def _collector(self, index: int) -> Callable[[Tensor], None]:
        return self._into_lasting(index) if self.division.zero < 2 else self._into_leaving(index)

    def _into_lasting(self, index: int) -> Callable[[Tensor], None]:
        """Into a bucket that is there all the time: once a step's first gradient is, it is the
        parameter's own, to which torch adds the later ones, without Python, where both have one
        dtype."""
        part = self.view(self.collected, index)
        same = self.dtype == torch.float32  # type: ignore[arg-type]

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

    def _into_leaving(self, index: int) -> Callable[[Tensor], None]:
        """Into a bucket that is new whenever the one before has been sent."""
        b, start = self.home[index]
        shape = self.shapes[index]
        size = self.buckets[b].size
        members = self.buckets[b].members
        gaps = self.buckets[b].gaps

        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            flat = self.collected[b]
            if flat is None:
                flat = self.collected[b] = torch.empty(size, device=self.device)
                for gap in gaps:
                    flat[gap] = 0.0
                self._begun.difference_update(members)
            part = flat[start : start + shape.numel()].view(shape)
            if index in self._begun:
                part.add_(parameter.grad)
            else:
                part.copy_(parameter.grad)
                self._begun.add(index)
            parameter.grad = None
            if self.on_grad is not None:
                self.on_grad(index)

        return collect

    def view(self, flats: Sequence[Tensor], index: int) -> Tensor:
        """Parameter `index` inside whole buckets, in its own shape."""
        b, start = self.home[index]
        return flats[b][start : start + self.shapes[index].numel()].view(self.shapes[index])

    def owned(self, index: int) -> tuple[int, int, slice]:
        """What of parameter `index`, flattened, this worker owns: [start, stop), and where in its
        bucket's own part."""
        b, start = self.home[index]
        bucket = self.buckets[b]
        size = self.shapes[index].numel()
        low = max(start, bucket.own.start)
        high = min(start + size, bucket.own.stop)
        if high <= low:
            return 0, 0, slice(0, 0)
        return low - start, high - start, slice(low - bucket.own.start, high - bucket.own.start)

    def load(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Take parameters' values, each in this worker's shape; call `publish` afterwards where
        state is divided."""
        index = {name: i for i, name in enumerate(self.names)}
        with torch.no_grad():
            for name, value in values:
                start, stop, where = self.owned(index[name])
                self.master[self.home[index[name]][0]][where].copy_(
                    value.detach().reshape(-1)[start:stop]
                )
        self.publish()

    def begin_average(self) -> None:
        """The masters are the first weights."""
        for average, master in zip(self.average, self.master, strict=False):
            average.copy_(master)

    def follow(self, weights: Sequence[Tensor], share: float) -> None:
        """The average keeps `share` of itself, and takes the rest of these weights."""
        torch._foreach_lerp_(self.average, list(weights), 1 - share)

    def swap_average(self) -> None:
        """The masters become the average, which keeps them meanwhile; and back again."""
        for average, master in zip(self.average, self.master, strict=False):
            own = master.clone()
            master.copy_(average)
            average.copy_(own)

    def publish(self) -> None:
        """Round the masters into the working dtype. Where state is divided the working buckets are
        gathered next."""
        if self.master is not self.shards:
            for shard, master in zip(self.shards, self.master, strict=True):
                shard.copy_(master)

    def square_sum(self, counted: Callable[[Bucket], bool] | None = None) -> float:
        """Sum of the squares of the owned gradient, of all buckets or of those that count."""
        norms = [
            torch.linalg.vector_norm(part)
            for bucket, part in zip(self.buckets, self.grad, strict=True)
            if counted is None or counted(bucket)
        ]
        # In double precision on the CPU: Apple's GPUs have none.
        return (
            sum((norm * norm for norm in torch.stack(norms).cpu().double().tolist()), 0.0)
            if norms
            else 0.0
        )

    def end(self) -> None:
        """Let go of the model, with which this state's memory would stay: the hooks of its
        parameters hold both."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Gradients begin anew: every parameter's must be given before the next update."""
        self._begun.clear()
        for parameter in self.parameters:
            parameter.grad = None
        for bucket, part, full in zip(self.buckets, self.grad, self.collected, strict=True):
            if self.division.zero >= 2 and bucket.ways > 1:
                part.zero_()  # To which every microbatch's part is added.
            elif full is not None:
                for gap in (
                    bucket.gaps
                ):  # Rounding to few bits makes NaNs of all that lies beside an infinity.
                    full[gap] = 0.0

    def update(self, optimizer: Optimizer, lr: float, step: int, grad_divisor: float) -> None:
        """One step on gradients divided by `grad_divisor`; gradients begin anew. `step` counts
        updates from 1."""
        if len(self._begun) < len(self.parameters):
            raise RuntimeError("a parameter got no gradient: it would be updated by an older one")
        self._adamw(optimizer, lr, step, grad_divisor)
        if self._updates is not None and optimizer.muon:
            self._muon(self._updates, optimizer.muon, lr, optimizer.weight_decay, grad_divisor)
        self.clear()
        self.publish()

    def _adamw(self, optimizer: Optimizer, lr: float, step: int, grad_divisor: float) -> None:
        """AdamW (arXiv 1711.05101) for all elements that are not of matrices updated whole."""
        divisor = torch.tensor(grad_divisor, dtype=torch.float32, device=self.device)
        counted = torch.tensor(float(step), device=self.device)
        faster = optimizer.muon.embedding if optimizer.muon else 1.0
        for decay, first, rate in ((optimizer.weight_decay, True, lr * faster), (0.0, False, lr)):
            pieces = [
                (b, piece)
                for b, bucket in enumerate(self.buckets)
                if not bucket.matrices and (piece := segment(bucket, first))
            ]
            if not pieces:
                continue
            tensors = [
                [flats[b][piece] for b, piece in pieces]
                for flats in (self.master, self.grad, self.exp_avg, self.exp_avg_sq)
            ]
            torch._fused_adamw_(
                *tensors,
                [],
                [counted] * len(pieces),
                amsgrad=False,
                lr=rate,
                beta1=optimizer.beta1,
                beta2=optimizer.beta2,
                weight_decay=decay,
                eps=optimizer.eps,
                maximize=False,
                grad_scale=divisor,
                found_inf=None,
            )

    def _muon(
        self,
        updates: MatrixUpdates,
        muon: Muon,
        lr: float,
        weight_decay: float,
        grad_divisor: float,
    ) -> None:
        """Muon with Nesterov's momentum for the matrices that this worker owns."""
        buckets = [b for b, bucket in enumerate(self.buckets) if bucket.matrices]
        for b in buckets:
            self.grad[b].div_(grad_divisor)
            self.exp_avg[b].lerp_(self.grad[b], 1 - muon.momentum)
            self.grad[b].lerp_(self.exp_avg[b], muon.momentum)
        owned = [i for b in buckets for i in self.buckets[b].members if self.owned(i)[1]]
        momenta = [self._own(self.grad, i) for i in owned]
        steps = updates.directions([self.names[i] for i in owned], momenta, muon.iterations)
        for b in buckets:
            self.master[b].mul_(1 - lr * weight_decay)
        for i, step in zip(owned, steps, strict=True):
            self._own(self.master, i).sub_(step, alpha=lr)

    def _own(self, flats: Sequence[Tensor], index: int) -> Tensor:
        """Parameter `index`, all of which this worker owns, inside its parts of buckets."""
        _, _, where = self.owned(index)
        return flats[self.home[index][0]][where].view(self.shapes[index])
