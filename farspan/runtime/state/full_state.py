"""Whole parameters on rank 0, and the pieces of them that each worker owns: what checkpoints are
written from.

Each worker announces its buckets once; afterwards both sides know what every message holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from farspan.runtime.comm.channels import Channel, tag
from farspan.runtime.comm.collective import gather_bytes
from farspan.runtime.comm.messages import Messenger, Posted
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model.tensor_axis import TensorSlice
from farspan.runtime.state.train_state import TrainState
from farspan.runtime.state.zero_buckets import length


class Piece(NamedTuple):
    """What a worker owns of one parameter: elements [start, stop) of its slice, flattened, at `at`
    of its bucket's."""

    name: str
    slice: TensorSlice | None
    shape: tuple[int, ...]
    start: int
    stop: int
    at: int


class BucketManifest(NamedTuple):
    """One worker's buckets, by replica: bytes' worth of pieces each, whether another stage has the
    same, and whether they are of matrices, of which the optimizer keeps one moment."""

    replica: int
    sizes: list[int]
    pieces: list[list[Piece]]
    copies: list[bool]
    matrices: list[bool]


class FullState:
    """One worker's end. `collect` and `hand_out` are called by all workers of the run at once."""

    def __init__(
        self,
        topology: Topology,
        state: TrainState,
        slices: Mapping[str, TensorSlice],
        shapes: Mapping[str, Sequence[int]],
        messenger: Messenger,
    ) -> None:
        """`slices` of the parameters that are not whole here, `shapes` of all parameters of the
        model."""
        self._rank = topology.rank
        self._state = state
        self._messenger = messenger
        self.shapes = shapes
        mine = _manifest(topology, state, slices)
        self.manifests = [mine]
        if (world := len(topology.plan.devices)) > 1:
            said = gather_bytes(msgspec.msgpack.encode(mine), topology.rank, world)
            self.manifests = [
                msgspec.msgpack.decode(content, type=BucketManifest) for content in said
            ]
        self._count = self._handed = 0

    def collect(self, flats: Sequence[Tensor], replica: int = 0) -> dict[str, Tensor]:
        """The parameters of one replica, whole and on rank 0, from what each worker keeps by
        bucket: masters, moments, or gradients. Empty on other ranks."""
        number = tag(Channel.FULL_STATE, self._count)
        self._count = self._count + 1
        sources = self._sources(replica)
        if self._rank != 0:
            for rank, bucket in sources:
                if rank == self._rank:
                    self._messenger.send(flats[bucket].reshape(-1), 0, number)
            self._messenger.close()
            return {}
        posted: list[tuple[int, int, Posted | None]] = [
            (
                rank,
                b,
                None
                if rank == 0
                else self._messenger.post(
                    self.manifests[rank].sizes[b], torch.float32, rank, number
                ),
            )
            for rank, b in sources
        ]
        tensors: dict[str, Tensor] = {}
        parts: dict[tuple[str, TensorSlice | None], Tensor] = {}
        for rank, b, receive in posted:
            content = flats[b].reshape(-1) if receive is None else receive.wait()
            for piece in self.manifests[rank].pieces[b]:
                self._place(
                    tensors, parts, piece, content[piece.at : piece.at + piece.stop - piece.start]
                )
        for (name, cut), local in parts.items():
            if cut is not None:
                into(tensors.setdefault(name, torch.empty(tuple(self.shapes[name]))), cut, local)
        return tensors

    def _place(
        self,
        tensors: dict[str, Tensor],
        parts: dict[tuple[str, TensorSlice | None], Tensor],
        piece: Piece,
        content: Tensor,
    ) -> None:
        """Put a piece where it belongs; one that is a whole parameter is not copied."""
        size = torch.Size(piece.shape).numel()
        if piece.slice is None and piece.stop - piece.start == size:
            tensors[piece.name] = content.view(piece.shape).cpu()
            return
        key = (piece.name, piece.slice)
        if key not in parts:
            parts[key] = torch.empty(piece.shape)
            if piece.slice is None:
                tensors[piece.name] = parts[key]
        parts[key].view(-1)[piece.start : piece.stop] = content.cpu()

    def hand_out(
        self,
        flats: Sequence[Tensor],
        whole: Mapping[str, Tensor] | None,
        replica: int | None = None,
    ) -> None:
        """Fill every worker's buckets (of one replica, or of all) from whole parameters, which rank
        0 gives."""
        number = tag(Channel.FULL_STATE, self._count)
        self._count = self._count + 1
        wanted = [
            rank
            for rank, manifest in enumerate(self.manifests)
            if replica is None or manifest.replica == replica
        ]
        if self._rank != 0:
            if self._rank in wanted:
                self._receive(flats, number)
            return
        assert whole is not None
        if 0 in wanted:
            for b, flat in enumerate(flats):
                flat.copy_(self._content(0, b, whole))
        self._send(
            [rank for rank in wanted if rank != 0],
            lambda rank, b: self._content(rank, b, whole),
            number,
        )

    def send_out(self, ranks: Sequence[int], content: Callable[[int, int], Tensor]) -> None:
        """On rank 0: fill the buckets of these workers, each of which calls `receive`, with
        `content(rank, bucket)`."""
        number = tag(Channel.HANDED_OUT, self._handed)
        self._handed = self._handed + 1
        self._send(ranks, content, number)

    def receive(self, flats: Sequence[Tensor]) -> None:
        """Fill this worker's buckets with what rank 0 sends."""
        number = tag(Channel.HANDED_OUT, self._handed)
        self._handed = self._handed + 1
        self._receive(flats, number)

    def _send(
        self, ranks: Sequence[int], content: Callable[[int, int], Tensor], number: int
    ) -> None:
        for b in range(max((len(self.manifests[rank].pieces) for rank in ranks), default=0)):
            for rank in (
                receiver for receiver in ranks if b < len(self.manifests[receiver].pieces)
            ):
                if len(values := content(rank, b)):  # Of Muon's matrices there is no second moment.
                    self._messenger.send(values, rank, number)
            # Few are held at once. Whoever receives has posted all of them before it waits for any.
            self._messenger.settle()
        self._messenger.close()

    def _receive(self, flats: Sequence[Tensor], number: int) -> None:
        kept = [flat for flat in flats if len(flat)]
        posted = [self._messenger.post(len(flat), torch.float32, 0, number) for flat in kept]
        for flat, receive in zip(kept, posted, strict=True):
            flat.copy_(receive.wait())

    def _content(self, rank: int, b: int, whole: Mapping[str, Tensor]) -> Tensor:
        """What a worker owns of one of its buckets."""
        content = torch.zeros(self.manifests[rank].sizes[b])
        for piece in self.manifests[rank].pieces[b]:
            local = whole[piece.name] if piece.slice is None else piece.slice.of(whole[piece.name])
            content[piece.at : piece.at + piece.stop - piece.start] = local.reshape(-1)[
                piece.start : piece.stop
            ]
        return content

    def _sources(self, replica: int) -> list[tuple[int, int]]:
        """The first worker that owns each bucket of a replica, and the bucket's number there."""
        seen = set()
        sources = []
        for rank, manifest in enumerate(self.manifests):
            for b, pieces in enumerate(manifest.pieces):
                key = tuple((piece.name, piece.slice, piece.start, piece.stop) for piece in pieces)
                if manifest.replica == replica and not manifest.copies[b] and key not in seen:
                    seen.add(key)
                    sources.append((rank, b))
        return sources


def _manifest(
    topology: Topology, state: TrainState, slices: Mapping[str, TensorSlice]
) -> BucketManifest:
    pieces: list[list[Piece]] = [[] for _ in state.buckets]
    for i, name in enumerate(state.names):
        start, stop, where = state.owned(i)
        if stop > start:
            piece = Piece(name, slices.get(name), tuple(state.shapes[i]), start, stop, where.start)
            pieces[state.home[i][0]].append(piece)
    copies = [bucket.tied and not topology.first for bucket in state.buckets]
    return BucketManifest(
        topology.replica_index,
        [length(bucket) for bucket in state.buckets],
        pieces,
        copies,
        [bucket.matrices for bucket in state.buckets],
    )


def into(whole: Tensor, cut: TensorSlice, local: Tensor) -> None:
    """Put a worker's slice into a whole parameter."""
    at = 0
    for start, stop in cut.ranges:
        whole.narrow(cut.dim, start, stop - start).copy_(local.narrow(cut.dim, at, stop - start))
        at += stop - start
