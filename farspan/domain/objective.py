"""What is best of several plans."""

from __future__ import annotations

from typing import Literal

Objective = Literal["time", "cost", "loss_per_dollar", "fewest_devices"]
OBJECTIVES: tuple[Objective, ...] = ("time", "cost", "loss_per_dollar", "fewest_devices")
#: `fewest_devices` admits plans that take at most this much longer than the fastest.
TOLERANCE = 0.1
