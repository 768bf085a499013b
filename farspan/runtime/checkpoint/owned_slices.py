"""What each worker owns of a run's state: the pieces of its buckets, and the slices of a checkpoint
that they make."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from farspan.runtime.checkpoint.checkpoint_folder import AVERAGE, MODEL, MOMENTUM, SHARED_STATE
from farspan.runtime.checkpoint.manifest import boxes
from farspan.runtime.checkpoint.slice_files import OwnedSlice
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.state.full_state import BucketManifest, Piece


def kept_by_kind(executor: Executor) -> dict[str, Sequence[Tensor]]:
    """Return this worker's tensors by bucket, by the kinds of `checkpoint_folder.source_kinds`."""
    state = executor.state
    outer = executor.outer
    kept: dict[str, Sequence[Tensor]] = {MODEL: state.master}
    if outer is not None:
        kept = {MODEL: outer.synced_parameters, MOMENTUM: outer.momentum, "master": state.master}
    kept["exp_avg"] = state.exp_avg
    kept["exp_avg_sq"] = state.exp_avg_sq
    if state.average:
        kept[AVERAGE] = state.average
    return kept


def owners_by_piece(
    manifests: Sequence[BucketManifest],
) -> Collection[list[tuple[int, int, Piece]]]:
    """List the owners of each piece of the state, in the order of ranks: rank, bucket, and the
    piece as it is there."""
    owners: dict[tuple[object, ...], list[tuple[int, int, Piece]]] = {}
    for rank, manifest in enumerate(manifests):
        for b, pieces in enumerate(manifest.pieces):
            if manifest.copies[b]:
                continue
            for piece in pieces:
                key = manifest.replica, piece.name, piece.slice, piece.start, piece.stop
                owners.setdefault(key, []).append((rank, b, piece))
    return owners.values()


def slices_of(
    executor: Executor, own: Sequence[tuple[int, Piece]], flats: Mapping[str, Sequence[Tensor]]
) -> list[OwnedSlice]:
    """List the slices of these pieces, by bucket, of these kinds: views of the state. The first
    replica has the shared ones."""
    first = executor.topology.replica_index == 0
    slices = list[OwnedSlice]()
    for kind, buckets in flats.items():
        if kind in SHARED_STATE and not first:
            continue
        for b, piece in own:
            flat = buckets[b].reshape(-1)
            if len(flat) == 0:  # A second moment that the optimizer does not keep.
                continue
            name = f"{kind}/{piece.name}"
            shape = tuple(executor.whole.shapes[piece.name])
            owned = flat[piece.at : piece.at + piece.stop - piece.start]
            for box in boxes(piece.slice, piece.shape, piece.start, piece.stop):
                slices.append(OwnedSlice(name, shape, box.at, box.of(owned)))
    return slices
