"""The workers of one run as a group: the few exchanges that a training loop needs beside gradients."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

#: A peer that says nothing for this long is lost: better an end with a message than a hang.
TIMEOUT_S = 30.0


class Group:
    """All workers of a run. With one worker every exchange is a no-op."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = rank, world, device
        if world > 1:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=TIMEOUT_S),
            )

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all workers, in double precision."""
        if self.world == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(packed)
        return [float(value) for value in packed]

    def gather(self, value: float) -> list[float]:
        """The value of every worker, by rank."""
        one_hot = [0.0] * self.world
        one_hot[self.rank] = value
        return self.sum(*one_hot)

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()
