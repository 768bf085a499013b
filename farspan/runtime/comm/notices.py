"""What the workers of one run tell each other through their store, signed with the secret of the
run.

A store asks nobody who they are: each caller reads, writes and deletes every key. A value that is
not signed for its key is therefore no value. The names of keys are made with the secret, too, so
that nobody else knows which is which. The secret itself is never stored or sent.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from farspan.domain.problems import Refusal
from farspan.domain.run import ON_STDIN, SECRET

#: Between two looks at whether a value has come.
POLL_S = 0.02
#: A secret is at least so long; a launcher's has 64 characters.
LEAST_SECRET = 16


def run_secret() -> bytes:
    """The secret of the run, which a launcher gives in the environment or as the first line of
    standard input.

    Raises Refusal (launcher-unusable) where there is none.
    """
    given = os.environ.pop(SECRET, "")
    if given == ON_STDIN:
        given = sys.stdin.readline()
    if len(given := given.strip()) < LEAST_SECRET:
        raise Refusal(
            "launcher-unusable",
            what="this worker has no secret to know the others by",
            where=f"variable {SECRET}",
            fact=f"it has {len(given)} characters of {LEAST_SECRET} at least; without it anybody "
            "on the network could "
            "end the run",
            remedy=f'on one host: {SECRET}=$(python3 -c "import secrets; '
            'print(secrets.token_hex(32))"), and the same '
            "value on the others",
        )
    return given.encode()


def sign(secret: bytes, *parts: bytes) -> bytes:
    """32 bytes that only a holder of the secret can make for these parts (HMAC-SHA256, RFC
    2104)."""
    content = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, content, hashlib.sha256)


class Notices:
    """One worker's end. Values are bytes; a key's value is None until one with a right signature is
    there."""

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        self.store, self.secret = store, secret

    def say(self, key: str, value: bytes | str) -> None:
        self.store.set(self._name(key), self._signed(key, value))

    def heard(self, key: str) -> bytes | None:
        """Raises DistNetworkError where the store is gone."""
        if not self.store.check([self._name(key)]):
            return None
        try:
            return self._verified(key, self.store.get(self._name(key)))
        except dist.DistStoreError:  # Somebody has deleted it since.
            return None

    def say_first(self, key: str, value: bytes | str) -> bytes:
        """Say this unless another worker has said something there before; returns what stands there
        now."""
        signed = self._signed(key, value)
        before = self._verified(key, self.store.compare_set(self._name(key), "", signed))
        if before is None:  # Something is there that no worker has said.
            self.store.set(self._name(key), signed)
        return before or (value.encode() if isinstance(value, str) else value)

    def wait(
        self,
        keys: Sequence[str],
        seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> list[bytes]:
        """The values of all keys, once all are there. Raises TimeoutError after so many seconds,
        and DistNetworkError where the store is gone."""
        end = clock() + seconds
        while True:
            values = self._all(keys)
            if values and None not in values:
                return [value for value in values if value is not None]
            if clock() > end:
                raise TimeoutError(f"not all have come within {seconds:.0f} s")
            time.sleep(POLL_S)

    def _all(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of all keys in three round trips; nothing where not every one is there."""
        names = [self._name(key) for key in keys]
        if not self.store.check(names):
            return []
        try:
            said = self.store.multi_get(names)
        except dist.DistStoreError:  # Somebody has deleted one since.
            return []
        return [self._verified(key, content) for key, content in zip(keys, said, strict=True)]

    def missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if self.heard(key) is None]

    def clone(self, timeout_s: float) -> Notices:
        """The same over a connection of its own, which asks a store that does not answer for so
        long."""
        before = self.store.timeout
        self.store.set_timeout(timedelta(seconds=timeout_s))
        copy = self.store.clone()
        self.store.set_timeout(before)
        return Notices(copy, self.secret)

    def _name(self, key: str) -> str:
        return sign(self.secret, b"name", key.encode()).hex()

    def _signed(self, key: str, value: bytes | str) -> str:
        text = value.decode() if isinstance(value, bytes) else value
        return f"{self._signature(key, text.encode())} {text}"

    def _verified(self, key: str, content: bytes) -> bytes | None:
        signature, _, value = content.partition(b" ")
        return (
            value if hmac.compare_digest(signature, self._signature(key, value).encode()) else None
        )

    def _signature(self, key: str, value: bytes) -> str:
        return sign(self.secret, b"value", key.encode(), value).hex()
