"""A worker with a device that holds few sequences at once: `python -m tests.app.small_device ROWS
WORDS...` runs a command in which a larger microbatch ends as PyTorch ends it where memory lacks.
"""

from __future__ import annotations

import os
import runpy
import sys

WORKER = "farspan.runtime.worker"


def main() -> None:
    most = int(sys.argv[1])
    words = sys.argv[2:]
    if WORKER not in words:
        os.execvp(words[0], words)
    import torch

    from farspan.runtime.model.decoder import Decoder

    # `env NAME=VALUE... python -m MODULE ARGUMENTS...`
    place = words.index(WORKER)
    for word in words[:place]:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            os.environ[name] = value
    forward = Decoder.forward_blocks

    def forward_on_little(self: Decoder, x: torch.Tensor, dropout: object = None) -> torch.Tensor:
        if len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, x, dropout)

    Decoder.forward_blocks = forward_on_little
    sys.argv = [WORKER, *words[place + 1 :]]
    runpy.run_module(WORKER, run_name="__main__")


if __name__ == "__main__":
    main()
