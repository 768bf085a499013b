"""Parameters, gradients and AdamW moments of one worker as flat buffers.

The model computes in the working dtype (fp32, bf16 or fp16); the optimizer keeps fp32 masters. Flat buffers make
gradient summation, norms, clipping, the update and checkpoints a few long passes instead of hundreds of short ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from farspan.domain.train import Optimizer, Precision, Schedule

WORKING_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


class TrainState:
    """Flat fp32 masters, moments and gradients; the model's parameters become views of a flat working buffer.

    Parameters with two or more dims come first: they are the ones that weight decay shrinks. Gradients of every
    backward pass are added to the flat fp32 gradient as soon as they exist, so that accumulation loses no precision.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        named = sorted(model.named_parameters(), key=lambda item: item[1].dim() < 2)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.decayed = sum(p.numel() for p in self.parameters if p.dim() >= 2)
        total, device = sum(sizes), self.parameters[0].device
        self.master = torch.empty(total, device=device)
        self.grad = torch.zeros(total, device=device)
        self.exp_avg = torch.zeros(total, device=device)
        self.exp_avg_sq = torch.zeros(total, device=device)
        dtype = WORKING_DTYPES[precision]
        self.working = self.master if dtype == torch.float32 else torch.empty(total, dtype=dtype, device=device)
        self.offsets = [0]
        for size in sizes:
            self.offsets.append(self.offsets[-1] + size)
        #: Called with a parameter's index each time a backward pass has added to its gradient.
        self.on_grad: Callable[[int], None] | None = None
        self._adopt()

    def _adopt(self) -> None:
        """Move the parameters' values into the masters, make them views, and collect their gradients."""
        for i, parameter in enumerate(self.parameters):
            self.view(self.master, i).copy_(parameter.data)
        self.publish()
        for i, parameter in enumerate(self.parameters):
            parameter.data = self.view(self.working, i)
            parameter.register_post_accumulate_grad_hook(self._collector(i))

    def _collector(self, index: int) -> Callable[[Tensor], None]:
        target = self.view(self.grad, index)

        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            target.add_(parameter.grad)
            parameter.grad = None
            if self.on_grad is not None:
                self.on_grad(index)

        return collect

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Parameter `index` inside a flat buffer, in its own shape."""
        return flat[self.offsets[index] : self.offsets[index + 1]].view(self.parameters[index].shape)

    def publish(self) -> None:
        """Round the masters into the working buffer."""
        if self.working is not self.master:
            self.working.copy_(self.master)

    def grad_norm(self) -> float:
        return float(torch.linalg.vector_norm(self.grad))

    def update(self, optimizer: Optimizer, lr: float, step: int, grad_divisor: float) -> None:
        """One AdamW step (arXiv 1711.05101) on gradients divided by `grad_divisor`; gradients become zero.

        `step` counts updates from 1.
        """
        divisor = torch.tensor(grad_divisor, dtype=torch.float32, device=self.grad.device)
        counted = torch.tensor(float(step), device=self.grad.device)
        for decay, part in ((optimizer.weight_decay, slice(0, self.decayed)), (0.0, slice(self.decayed, None))):
            torch._fused_adamw_(
                [self.master[part]], [self.grad[part]], [self.exp_avg[part]], [self.exp_avg_sq[part]], [], [counted],
                amsgrad=False, lr=lr, beta1=optimizer.beta1, beta2=optimizer.beta2, weight_decay=decay,
                eps=optimizer.eps, maximize=False, grad_scale=divisor, found_inf=None,
            )  # fmt: skip
        self.grad.zero_()
        self.publish()


def learning_rate(schedule: Schedule, peak: float, step: int, steps: int) -> float:
    """Learning rate of update `step` (from 0) of `steps`: linear warm-up, then the schedule's shape."""
    if step < schedule.warmup_steps:
        return peak * (step + 1) / (schedule.warmup_steps + 1)
    floor = peak * schedule.floor
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "wsd":
        start = max(schedule.warmup_steps, steps - math.ceil(steps * schedule.decay))
        done = max(0.0, (step - start) / max(1, steps - 1 - start)) if step > start else 0.0
        return peak + (floor - peak) * min(1.0, done)
    done = (step - schedule.warmup_steps) / max(1, steps - 1 - schedule.warmup_steps)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
