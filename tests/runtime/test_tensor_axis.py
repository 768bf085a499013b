"""Divided operators and stages, in real processes, against the whole model in one process, in
double precision."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from farspan import models
from farspan.domain.graph import Operator, recomputed_operators
from farspan.domain.model import ModelSpec
from farspan.estimate.memory import local_parameters
from farspan.estimate.stage import Costs
from farspan.runtime.model import kernels
from farspan.runtime.model.decoder import Decoder, initialize_model, load_whole
from farspan.runtime.model.tensor_axis import TensorAxis, parameter_slices
from farspan.semantics.tensor_sharding import RESIDUAL, strategies, strategy
from tests.estimate.parts import cluster, device, plain
from tests.estimate.parts import costs as costs_on

LAYERS = 2
LENGTH = 5
WORLD = 4
#: The tightest bound that sums in another order leave; in bf16, where only the loss is compared,
#: that of its rounding.
BOUNDS = {"float64": 1e-10, "bfloat16": 2**-8}
MEGATRON = {
    "attn.qkv": "n",
    "attn": "n",
    "attn.out": "n",
    "mlp.up": "f",
    "mlp.act": "f",
    "mlp.down": "f",
}
VOCABULARY = {"tok": "v", "head": "v", "loss": "v"}
ROWS = dict.fromkeys(("attn_norm", "mlp_norm", "norm", RESIDUAL, *MEGATRON, *VOCABULARY), "b")
POST_NORM_ROWS = {"attn_post_norm": "b", "mlp_post_norm": "b"}


def spec(family: str, ways: int) -> ModelSpec:
    """A model of which an axis of `ways` divides every dim."""
    name, _, knobs = family.partition("-")
    size = {
        "d_model": 8 * ways,
        "layers": LAYERS,
        "heads": 2 * ways,
        "d_ff": 3 * ways,
        "vocab_size": 7 * ways,
    }
    grouped = {} if name in ("gpt2", "opt", "gpt_neox") else {"kv_heads": ways}
    made = models.family(name).shape(**size, **grouped, context=8, tied="untied" not in knobs)
    if made.window:
        made = replace(made, window=replace(made.window, size=3, layers=(0,)))
    return replace(made, bias=True) if "bias" in knobs else made


FAMILIES = (
    "gpt2",
    "gpt2-untied",
    "llama",
    "llama-untied",
    "llama-untied-bias",
    "opt",
    "qwen2",
    "qwen3",
    "gpt_neox",
    "olmo2",
    "gemma3",
)


class Case(NamedTuple):
    """`cuts`: where one stage ends and the next begins."""

    family: str
    ways: int
    splits: dict[str, str]
    recompute: bool = False
    cuts: tuple[int, ...] = ()
    dtype: str = "float64"

    @property
    def spec(self) -> ModelSpec:
        return spec(self.family, self.ways)

    @property
    def stages(self) -> list[tuple[int, int]]:
        return list(pairwise((0, *self.cuts, LAYERS + 2)))

    @property
    def rows(self) -> int:
        return 2 * self.ways

    def parts(self, coordinate: int, group: dist.ProcessGroup | None = None) -> list[Decoder]:
        axis = TensorAxis(group, self.ways, coordinate, self.splits)
        return [
            Decoder(self.spec, recompute=self.recompute, units=units, axis=axis).train()
            for units in self.stages
        ]

    @property
    def label(self) -> str:
        splits = ",".join(f"{op}:{dim}" for op, dim in self.splits.items() if dim)
        rest = [self.dtype, "again" * self.recompute, *map(str, self.cuts)]
        return " ".join((self.family, str(self.ways), splits, *rest))


def by_hand() -> list[Case]:
    unlike = [("v", ""), ("v", "b"), ("", "v"), ("", "b"), ("b", "v"), ("b", "")]
    ends = [*unlike, ("v", "v"), ("b", "b")]
    found = [
        Case(family, 2, splits)
        for family in ("gpt2", "llama-untied-bias")
        for splits in ({}, MEGATRON, MEGATRON | VOCABULARY, ROWS)
    ]
    found += [Case("llama", 2, {"head": head, "loss": loss}) for head, loss in unlike]
    found += [Case("gpt2", 2, {"tok": tok, "head": head, "loss": head}) for tok, head in ends]
    found += [
        Case("gpt2", 2, MEGATRON | {"tok": tok, "head": head}, cuts=(2,)) for tok, head in ends
    ]
    found += [
        Case("gpt2", 2, ROWS | MEGATRON | VOCABULARY),
        Case("opt", 2, MEGATRON | VOCABULARY, recompute=True, cuts=(1, 2, 3)),
        Case("llama", 3, MEGATRON | VOCABULARY),
        Case("qwen2", 2, MEGATRON | VOCABULARY),
        Case("qwen3", 2, MEGATRON | VOCABULARY),
        Case("qwen3", 2, MEGATRON | {"attn.head_norm": "n"}, cuts=(2,)),
        Case("qwen3", 2, MEGATRON | {"attn.head_norm": "b"}, recompute=True),
        Case("qwen3", 3, ROWS | {"attn.head_norm": "b"}),
        Case("gpt_neox", 2, MEGATRON | VOCABULARY, cuts=(2,)),
        Case("gpt_neox", 3, ROWS, recompute=True),
        Case("gemma3", 2, MEGATRON | {"attn.head_norm": "n"} | VOCABULARY),
        Case("gemma3", 2, ROWS | POST_NORM_ROWS | {"attn.head_norm": "b"}, cuts=(2,)),
        Case("gemma3", 3, MEGATRON | POST_NORM_ROWS | {RESIDUAL: "b"}, recompute=True),
        Case("olmo2", 2, MEGATRON | {"attn.head_norm": "n"} | VOCABULARY),
        Case("olmo2", 3, MEGATRON | {"attn.head_norm": "n"}, recompute=True),
        Case("olmo2", 2, MEGATRON | POST_NORM_ROWS | {RESIDUAL: "b"}, cuts=(2,)),
        Case("olmo2", 2, ROWS | POST_NORM_ROWS | {"attn.head_norm": "b"}, recompute=True),
        Case("olmo2", 2, MEGATRON | {"attn.head_norm": "n"}, dtype="bfloat16"),
        Case("gpt2", 3, MEGATRON, recompute=True),
        Case("llama", 3, ROWS),
        Case("llama", 4, MEGATRON | VOCABULARY, recompute=True),
        Case("gpt2", 4, ROWS | {"mlp.act": "f"}),
        Case("gpt2", 2, MEGATRON | VOCABULARY, dtype="bfloat16"),
        Case("llama", 2, ROWS, dtype="bfloat16"),
        Case("llama", 2, MEGATRON | {"tok": "v", "head": "v", "loss": "b"}, dtype="bfloat16"),
    ]
    return found


def at_random(ways: int, count: int) -> list[Case]:
    rng = random.Random(ways)
    found = []
    for i in range(count):
        family = FAMILIES[i % len(FAMILIES)]
        graph = models.graph(spec(family, ways))
        splits = {RESIDUAL: rng.choice(("", "b"))}
        for op in (op for unit in (graph.embedding, graph.block, graph.head) for op in unit):
            splits[op.name] = rng.choice(strategies(op, graph.sizes, ways, 2 * ways)).split
        cuts = tuple(sorted(rng.sample(range(1, LAYERS + 2), rng.choice((0, 0, 1, 2)))))
        found.append(Case(family, ways, splits, recompute=rng.random() < 0.4, cuts=cuts))
    return found


CASES = [*by_hand(), *at_random(2, 18), *at_random(3, 9), *at_random(4, 9)]


# -- what every process does
#   -------------------------------------------------------------------------------------------


def whole_values(spec: ModelSpec) -> dict[str, Tensor]:
    """Values of every parameter, none of them 0 or 1 as initialisation would leave norms and
    biases."""
    generator = torch.Generator().manual_seed(1)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Decoder(spec).named_parameters()}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and targets, some of them none."""
    generator = torch.Generator().manual_seed(2)
    shape = (case.rows, LENGTH)
    tokens = torch.randint(case.spec.vocab_size, shape, generator=generator)
    return tokens, torch.randint(-1, case.spec.vocab_size, shape, generator=generator)


def expected(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the whole model, and its gradients by name."""
    model = Decoder(case.spec).double().train()
    for name, value in whole_values(case.spec).items():
        load_whole(model, name, value)
    loss = model.loss(*batch(case))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def steps(parts: list[Decoder], case: Case) -> Tensor:
    """Forward and backward passes through all stages; between two of them go the stream and its
    gradient."""
    x, targets = batch(case)
    passed = []
    for part in parts[:-1]:
        y = part.forward_blocks(x)
        x = y.detach().requires_grad_()
        passed.append((y, x))
    loss = parts[-1].summed_loss(parts[-1].forward_blocks(x), targets)
    loss.backward()
    for y, x in reversed(passed):
        y.backward(x.grad)
    return loss.detach()


def whole_gradient(part: Decoder, name: str, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """What an update would see: the sum of summands, and slices side by side."""
    gradient = part.get_parameter(name).grad.clone()
    if name in part.partial:
        dist.all_reduce(gradient, group=group)
    if name not in part.slices:
        return gradient
    cut = part.slices[name]
    whole = torch.zeros(shape, dtype=gradient.dtype)
    at = 0
    for start, stop in cut.ranges:
        whole.narrow(cut.dim, start, stop - start).copy_(gradient.narrow(cut.dim, at, stop - start))
        at += stop - start
    dist.all_reduce(whole, group=group)
    return whole


def drifting(part: Decoder, group: dist.ProcessGroup) -> list[str]:
    """Parameters that ranks hold whole and would update unlike each other, be it in the last
    bit."""
    found = []
    for name, parameter in part.named_parameters():
        if name not in part.slices and name not in part.partial:
            first = parameter.grad.clone()
            dist.broadcast(first, group=group, group_src=0)
            found += [] if torch.equal(parameter.grad, first) else [name]
    return found


def faults(case: Case, group: dist.ProcessGroup, coordinate: int, sent: Counter[str]) -> list[str]:
    """What differs from the whole model, and from the price."""
    loss, gradients = expected(case)
    parts = case.parts(coordinate, group)
    values = whole_values(case.spec)
    for part in parts:
        part.to(getattr(torch, case.dtype))
        for name, _ in part.named_parameters():
            load_whole(part, name, values[name])
    sent.clear()
    found_loss = steps(parts, case)
    found = []
    bound = BOUNDS[case.dtype]
    if case.dtype == "float64" and sent["bytes"] != priced(case):
        found.append(f"{sent['bytes']} bytes sent, {priced(case)} priced")
    if abs(found_loss - loss) > bound * loss:
        found.append(f"loss {found_loss}, not {loss}")
    found += [f"{name} drifts" for part in parts for name in drifting(part, group)]
    for name, gradient in gradients.items():
        holders = [part for part in parts if name in dict(part.named_parameters())]
        total = sum(whole_gradient(part, name, gradient.shape, group) for part in holders)
        error = float((total - gradient).abs().max() / gradient.abs().max())
        if case.dtype == "float64" and not error <= bound:
            found.append(f"gradient of {name} is off by {error:.1e}")
    return found


def priced(case: Case) -> int:
    """Bytes of the tensors that the estimator counts collectives over, and those that it leaves
    out."""
    costs = costs_on(
        cluster([[device()] * case.ways]), plain(), case.spec, batch=case.rows, seq_len=LENGTH
    )
    costs.width = 8
    for name in EXCHANGED:
        setattr(costs.network, f"{name}_s", lambda group, size, concurrent: size)
    total = 0.0
    for units in case.stages:
        for unit, count in costs.graph.kinds(*units):
            total += count * sum(costs.unit_wait(range(case.ways), unit, case.rows, case.splits, 1))
            if case.recompute and costs.graph.is_block(unit):
                total += (
                    count
                    * costs.unit_wait(
                        range(case.ways), recomputed_operators(unit), case.rows, case.splits, 1
                    )[0]
                )
                if unit[-1].kind == "matmul":
                    total += count * last_input(costs, unit, case)
    # The loss exchanges doubles here, where the price is of floats; its rows' sum is a scalar,
    # which has no price.
    extra = {"v": 3 * 4 * case.rows * LENGTH, "b": 8, "": 0}[case.splits.get("loss", "")]
    return int(total) + extra


def last_input(costs: Costs, unit: tuple[Operator, ...], case: Case) -> float:
    """Recomputation needs what a block's last operator reads, of which the price leaves out the way
    there."""
    before, last = (strategy(op, case.splits.get(op.name, "")) for op in unit[-2:])
    edge = (before.writes, last.reads, last.gradient, unit[-1].inputs[0])
    return costs.edge_s(range(case.ways), *edge, case.rows, 1)[0]


#: Bytes of the whole tensor that a collective exchanges, from its arguments.
EXCHANGED = {
    "all_reduce": lambda tensor, *rest: tensor.nbytes,
    "all_gather": lambda parts, own: own.nbytes * len(parts),
    "reduce_scatter": lambda own, parts: own.nbytes * len(parts),
    "all_to_all": lambda received, parts: parts[0].nbytes * len(parts) ** 2,
}


def count_bytes(sent: Counter[str], name: str) -> None:
    """Wrap one of this process's collectives."""
    original = getattr(dist, name)

    def wrapped(*args, **kwargs):
        sent["bytes"] += EXCHANGED[name](*args)
        return original(*args, **kwargs)

    setattr(dist, name, wrapped)


def work(rank: int, folder: str) -> None:
    """Pairs of processes share the cases of axes of two; the first three, and all, have the
    others."""
    torch.set_num_threads(1)
    kernels.LOGITS_CHUNK_BYTES = 600  # A few rows of logits, so that there are several chunks.
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=900)
    )
    groups = [(ranks, dist.new_group(ranks)) for ranks in ([0, 1], [2, 3], [0, 1, 2], [0, 1, 2, 3])]
    sent = Counter[str]()
    results = {}
    for name in EXCHANGED:
        count_bytes(sent, name)
    for i, case in sorted(enumerate(CASES), key=lambda item: item[1].ways):
        ranks, group = groups[i % 2 if case.ways == 2 else case.ways - 1]
        if rank in ranks:
            results[i] = faults(case, group, ranks.index(rank), sent)
    Path(f"{folder}/rank-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


# -- the tests
#   ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, list[str]]:
    """What each case's processes found wrong."""
    folder = tmp_path_factory.mktemp("axis")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, str(folder))) for rank in range(WORLD)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        for process in processes:
            process.start()
    try:
        for process in processes:
            process.join(900)
        assert [process.exitcode for process in processes] == [0] * WORLD
    finally:
        for process in processes:
            process.kill()
    found: dict[int, list[str]] = {}
    for rank in range(WORLD):
        for i, problems in json.loads((folder / f"rank-{rank}.json").read_text()).items():
            found.setdefault(int(i), []).extend(f"rank {rank}: {problem}" for problem in problems)
    return found


@pytest.mark.parametrize("i", range(len(CASES)), ids=[case.label for case in CASES])
def test_loss_gradients_and_bytes_are_those_of_the_whole_model_and_of_the_price(results, i):
    assert results[i] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_rank_of_a_tensor_axis_holds_the_parameters_that_the_estimator_counts(case):
    graph = models.graph(case.spec)
    for units, part in zip(case.stages, case.parts(case.ways - 1), strict=True):
        here = sum(parameter.numel() for parameter in part.parameters())
        assert here == local_parameters(graph, units, case.splits, case.ways)
        assert part.slices == parameter_slices(
            case.spec, units, case.splits, case.ways, case.ways - 1
        )
        assert set(part.slices) <= {name for name, _ in part.named_parameters()}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.ways != 4], ids=lambda case: case.label
)
def test_every_part_starts_with_the_values_of_the_whole_model(case):
    whole = Decoder(case.spec)
    initialize_model(whole, 3)
    covered: dict[tuple[int, str], Tensor] = {}
    for coordinate in range(case.ways):
        with torch.device("meta"):
            parts = case.parts(coordinate)
        for stage, part in enumerate(parts):
            initialize_model(part.to_empty(device="cpu"), 3)
            for name, parameter in part.named_parameters():
                wanted = whole.get_parameter(name)
                cut = part.slices.get(name)
                assert torch.equal(parameter, wanted if cut is None else cut.copy_from(wanted))
                for start, stop in cut.ranges if cut else ():
                    times = covered.setdefault((stage, name), torch.zeros(wanted.shape))
                    times.narrow(cut.dim, start, stop - start).add_(1)
    assert all((times == 1).all() for times in covered.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_starts_with_the_values_that_it_always_had(family):
    """Drawn in the order of sorted names from one generator."""
    model = Decoder(spec(family, 2))
    initialize_model(model, 7)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in sorted(model.named_parameters()):
        if "norm" in name or name.endswith("bias"):
            gain = 0.0 if model.spec.offset_gains else 1.0
            first = gain if "norm" in name and name.endswith("weight") else 0.0
            assert (parameter == first).all()
        else:
            std = 0.02 / (4**0.5 if name.endswith(("attn.out.weight", "mlp.down.weight")) else 1)
            assert torch.equal(
                parameter, torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            )


def test_slices_of_grouped_heads_and_gated_matrices_by_hand():
    """Heads of size 4, two query heads a group: 12 heads' rows of q, then 6 each of k and v."""
    cut = parameter_slices(spec("llama-untied-bias", 6), (1, 2), MEGATRON, 3, 1)
    assert cut == {
        "blocks.0.attn.qkv.weight": (0, ((16, 32), (56, 64), (80, 88))),
        "blocks.0.attn.qkv.bias": (0, ((16, 32), (56, 64), (80, 88))),
        "blocks.0.attn.out.weight": (1, ((16, 32),)),
        "blocks.0.mlp.up.weight": (0, ((6, 12), (24, 30))),
        "blocks.0.mlp.up.bias": (0, ((6, 12), (24, 30))),
        "blocks.0.mlp.down.weight": (1, ((6, 12),)),
    }


def test_tensor_axis_refuses_heads_units_or_rows_that_do_not_divide_evenly():
    with pytest.raises(ValueError, match="divided evenly over a tensor axis of 4"):
        Decoder(spec("llama", 2), axis=TensorAxis(None, 4, 0, {"attn": "n"}))
    with pytest.raises(ValueError, match="cannot be split over 'f'"):
        Decoder(spec("gpt2", 2), axis=TensorAxis(None, 2, 0, {"attn": "f"}))
    model = Decoder(spec("gpt2", 2), axis=TensorAxis(None, 2, 0, {"tok": "b", RESIDUAL: "b"}))
    with pytest.raises(ValueError, match="3 cannot be divided evenly"):
        model.forward_blocks(torch.zeros(3, 2, dtype=torch.long))


def test_an_axis_of_one_rank_is_none():
    model = Decoder(
        spec("llama", 2), axis=TensorAxis(None, 1, 0, MEGATRON | VOCABULARY | {"norm": "b"})
    )
    assert not model.slices and not model.partial
    initialize_model(model, 7)
    plain = Decoder(spec("llama", 2))
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(8).view(2, 4)
    assert torch.equal(model.loss(tokens, tokens), plain.loss(tokens, tokens))


def test_the_loss_of_the_whole_model_is_the_textbooks_in_double_precision():
    case = Case("gpt2", 2, {})
    model = Decoder(case.spec).double()
    initialize_model(model, 7)
    tokens, targets = batch(case)
    textbook = F.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
    )
    loss = model.loss(tokens, targets)
    torch.testing.assert_close(loss, textbook, rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(one, model.tok.weight)[0] for one in (loss, textbook))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
