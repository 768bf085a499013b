"""Whole parameters on rank 0, and the pieces of them that each worker owns: what checkpoints are
written from.

Each worker announces its buckets once; afterwards both sides know what every message holds.
"""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from farspan.domain.decoding import msgpack_decoder
from farspan.runtime.comm.message_tags import MessageChannel, tag
from farspan.runtime.comm.messages import Messenger, Posted
from farspan.runtime.comm.topology import Topology
from farspan.runtime.comm.worker_group import all_gather_bytes
from farspan.runtime.model.tensor_axis import TensorSlice
from farspan.runtime.state.train_state import TrainState
from farspan.runtime.state.zero_buckets import owned_length


class Piece(NamedTuple):
    """What a worker owns of one parameter: elements [start, stop) of its slice, flattened, at `at`
    of its bucket's."""

    name: str
    slice: TensorSlice | None
    shape: tuple[int, ...]
    start: int
    stop: int
    at: int

    @property
    def in_bucket(self) -> builtins.slice:
        return slice(self.at, self.at + self.stop - self.start)


class BucketManifest(NamedTuple):
    """One worker's buckets, by replica: bytes' worth of pieces each, whether another stage has the
    same, and whether they are of matrices, which have one moment in the optimizer."""

    replica: int
    sizes: list[int]
    pieces: list[list[Piece]]
    copies: list[bool]
    matrices: list[bool]


class FullState:
    """One worker's end. All workers of the run call `collect_parameters` and `hand_out` at once."""

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
        own = _make_manifest(topology, state, slices)
        self.manifests = [own]
        world = len(topology.plan.devices)
        if world > 1:
            contents = all_gather_bytes(msgspec.msgpack.encode(own), topology.rank, world)
            decode = msgpack_decoder(BucketManifest).decode
            self.manifests = [decode(content) for content in contents]
        self._rounds = itertools.count()
        self._handed = itertools.count()

    def collect_parameters(self, flats: Sequence[Tensor], replica: int = 0) -> dict[str, Tensor]:
        """Return the parameters of one replica, whole and on rank 0, from what each worker keeps by
        bucket: masters, moments, or gradients. Empty on other ranks."""
        number = tag(MessageChannel.FULL_STATE, next(self._rounds))
        sources = self._first_owners(replica)
        if self._rank != 0:
            for rank, bucket in sources:
                if rank == self._rank:
                    # All at once, and once a run: not by buffers that would stay.
                    self._messenger.send(flats[bucket].reshape(-1).cpu(), 0, number)
            self._messenger.close()
            return {}
        posted: dict[tuple[int, int], Posted] = {}
        for rank, b in sources:
            if rank != 0:
                size = self.manifests[rank].sizes[b]
                posted[rank, b] = self._messenger.post(size, torch.float32, rank, number)
        tensors: dict[str, Tensor] = {}
        parts: dict[tuple[str, TensorSlice | None], Tensor] = {}
        for rank, b in sources:
            flat = flats[b].reshape(-1) if rank == 0 else posted.pop((rank, b)).wait()
            for piece in self.manifests[rank].pieces[b]:
                self._place_piece(tensors, parts, piece, flat[piece.in_bucket])
        for (name, cut), local in parts.items():
            if cut is not None:
                if name not in tensors:
                    tensors[name] = torch.empty(tuple(self.shapes[name]))
                write_slice(tensors[name], cut, local)
        return tensors

    def _place_piece(
        self,
        tensors: dict[str, Tensor],
        parts: dict[tuple[str, TensorSlice | None], Tensor],
        piece: Piece,
        content: Tensor,
    ) -> None:
        """Put a piece where it belongs; one that is a whole parameter is not copied."""
        size = math.prod(piece.shape)
        if piece.slice is None and len(content) == size:
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
        number = tag(MessageChannel.FULL_STATE, next(self._rounds))
        wanted = []
        for rank, manifest in enumerate(self.manifests):
            if replica in (None, manifest.replica):
                wanted.append(rank)
        if self._rank != 0:
            if self._rank in wanted:
                self._receive_buckets(flats, number)
            return
        assert whole is not None
        if 0 in wanted:
            wanted.remove(0)
            for b, flat in enumerate(flats):
                flat.copy_(self._fill_bucket(0, b, whole))
        self._send_buckets(wanted, lambda rank, b: self._fill_bucket(rank, b, whole), number)

    def hand_out_frozen(self, whole: Mapping[str, Tensor] | None) -> None:
        """Fill every worker's frozen parameters from whole ones, which rank 0 gives."""
        number = tag(MessageChannel.FULL_STATE, next(self._rounds))
        messenger = self._messenger
        for name, parameter in self._state.frozen.items():
            if self._rank == 0:
                assert whole is not None
                for rank in range(1, len(self.manifests)):
                    messenger.send(whole[name].float().flatten(), rank, number)
                content = whole[name]
            else:
                post = messenger.post(parameter.numel(), torch.float32, 0, number)
                content = post.wait().view(parameter.shape)
            with torch.no_grad():
                parameter.copy_(content)
            # One tensor at a time is on its way.
            messenger.wait_for_previous_step()
        messenger.close()

    def send_out(self, ranks: Sequence[int], content: Callable[[int, int], Tensor]) -> None:
        """Fill the buckets of these workers from rank 0, with `content(rank, bucket)`; each of them
        calls `receive_buckets`."""
        self._send_buckets(ranks, content, tag(MessageChannel.HANDED_OUT, next(self._handed)))

    def receive_buckets(self, flats: Sequence[Tensor]) -> None:
        """Fill this worker's buckets with what rank 0 sends."""
        self._receive_buckets(flats, tag(MessageChannel.HANDED_OUT, next(self._handed)))

    def _send_buckets(
        self, ranks: Sequence[int], content: Callable[[int, int], Tensor], number: int
    ) -> None:
        most = max((len(self.manifests[rank].pieces) for rank in ranks), default=0)
        for b in range(most):
            for rank in ranks:
                if b < len(self.manifests[rank].pieces):
                    values = content(rank, b)
                    if len(values):  # Of Muon's matrices there is no second moment.
                        self._messenger.send(values.cpu(), rank, number)
            # Few are held at once. A receiver has posted all of them before it waits for any.
            self._messenger.wait_for_previous_step()
        self._messenger.close()

    def _receive_buckets(self, flats: Sequence[Tensor], number: int) -> None:
        kept = [flat for flat in flats if len(flat)]
        posted = [self._messenger.post(len(flat), torch.float32, 0, number) for flat in kept]
        for flat, receive in zip(kept, posted, strict=True):
            flat.copy_(receive.wait())

    def _fill_bucket(self, rank: int, b: int, whole: Mapping[str, Tensor]) -> Tensor:
        """Return a worker's own part of one of its buckets."""
        manifest = self.manifests[rank]
        content = torch.zeros(manifest.sizes[b])
        for piece in manifest.pieces[b]:
            local = whole[piece.name]
            if piece.slice is not None:
                local = piece.slice.copy_from(local)
            flat = local.reshape(-1)
            content[piece.in_bucket] = flat[piece.start : piece.stop]
        return content

    def _first_owners(self, replica: int) -> list[tuple[int, int]]:
        """Return the first worker that owns each bucket of a replica, and the bucket's number
        there."""
        owners: dict[object, tuple[int, int]] = {}
        for rank, manifest in enumerate(self.manifests):
            if manifest.replica != replica:
                continue
            for b, pieces in enumerate(manifest.pieces):
                if not manifest.copies[b]:
                    key = tuple(piece[:5] for piece in pieces)
                    owners.setdefault(key, (rank, b))
        return list(owners.values())


def _make_manifest(
    topology: Topology, state: TrainState, slices: Mapping[str, TensorSlice]
) -> BucketManifest:
    buckets = state.buckets
    pieces: list[list[Piece]] = [[] for _ in buckets]
    for i, name in enumerate(state.names):
        start, stop, where = state.owned_range(i)
        if stop > start:
            shape = tuple(state.shapes[i])
            b, _ = state.home[i]
            piece = Piece(name, slices.get(name), shape, start, stop, where.start)
            pieces[b].append(piece)
    sizes = [owned_length(bucket) for bucket in buckets]
    copies = [bucket.tied and not topology.first for bucket in buckets]
    matrices = [bucket.matrices for bucket in buckets]
    return BucketManifest(topology.replica_index, sizes, pieces, copies, matrices)


def write_slice(whole: Tensor, cut: TensorSlice, local: Tensor) -> None:
    """Put a worker's slice into a whole parameter."""
    sizes = [stop - start for start, stop in cut.ranges]
    parts = local.split(sizes, cut.dim)
    for (start, _), size, part in zip(cut.ranges, sizes, parts, strict=True):
        whole.narrow(cut.dim, start, size).copy_(part)
