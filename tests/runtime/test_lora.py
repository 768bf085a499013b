"""Adapters against PEFT, on the same model, batch and first adapters: logits, gradients, losses of
AdamW's steps, and the folder that PEFT loads. Frozen weights keep every bit."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from farspan import models
from farspan.domain.model import Lora, ModelSpec
from farspan.domain.train import Optimizer, Precision

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from safetensors.torch import load_file  # noqa: E402

from farspan.runtime.model import huggingface, peft_folder  # noqa: E402
from farspan.runtime.model.compiled_blocks import BlockInputs, warm_up_blocks  # noqa: E402
from farspan.runtime.model.decoder import Decoder, initial_adapters  # noqa: E402
from farspan.runtime.model.linear import is_adapter, merge_adapters  # noqa: E402
from farspan.runtime.probing import unit_timing  # noqa: E402
from farspan.runtime.state.train_state import TrainState  # noqa: E402

RANK = 4
SEQ_LEN = 16
FAMILIES = {
    "gpt2": {"heads": 2},
    "llama": {"heads": 4, "kv_heads": 2, "d_ff": 40, "tied": False},
    "opt": {"heads": 2},
    "qwen2": {"heads": 4, "kv_heads": 2},
    "qwen3": {"heads": 4, "kv_heads": 1},
    "gpt_neox": {"heads": 2},
    "smollm3": {"heads": 4, "kv_heads": 2, "layers": 4},
    "olmo2": {"heads": 4, "kv_heads": 2},
    "gemma3": {"heads": 4, "kv_heads": 1},
}
OPTIMIZER = Optimizer(lr=5e-3, weight_decay=0.01, clip=0.0)


@pytest.fixture(params=FAMILIES)
def base(request, tmp_path) -> Path:
    """A model as transformers saves it, every parameter of it random."""
    family = request.param
    spec = models.family(family).shape(
        **{"d_model": 32, "layers": 2, "vocab_size": 67, "context": SEQ_LEN} | FAMILIES[family]
    )
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**models.family(family).to_config(spec))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(base: Path, precision: Precision = "fp32") -> tuple[Decoder, TrainState]:
    """Our model of a folder with adapters, and its state."""
    spec, weights = huggingface.read_model(base)
    spec = msgspec.structs.replace(spec, lora=Lora(rank=RANK, alpha=8))
    with torch.device("meta"):
        model = Decoder(spec)
    state = TrainState(model, precision, torch.device("cpu"))
    state.load_parameters(weights.items())
    state.load_parameters(initial_adapters(spec, seed=7))
    return model, state


def adapters_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().clone() for name, value in model.named_parameters() if is_adapter(name)
    }


def load_theirs(base: Path, folder: Path, spec: ModelSpec, adapters, *, trained: bool = False):
    """PEFT's model of a folder with these adapters, which it loads from a folder of ours."""
    folder.mkdir()
    peft_folder.write_adapters(folder, adapters, spec, base=str(base))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(theirs, folder, is_trainable=trained).eval()


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(67, (3, SEQ_LEN), generator=generator)


def test_model_begins_as_its_base_bit_by_bit(base):
    model, _ = load(base)
    spec, weights = huggingface.read_model(base)
    plain = Decoder(spec)
    plain.load_state_dict(weights)
    assert torch.equal(model(tokens()), plain(tokens()))


def test_gradients_and_losses_are_those_of_peft(base, tmp_path):
    model, state = load(base)
    spec = model.spec
    # B is not 0, so that A has a gradient.
    adapters = adapters_of(model)
    generator = torch.Generator().manual_seed(5)
    for name in adapters:
        adapters[name] += 0.1 * torch.randn(adapters[name].shape, generator=generator)
    state.load_parameters(adapters.items())
    theirs = load_theirs(base, tmp_path / "adapters", spec, adapters, trained=True)
    trained = {name: value for name, value in theirs.named_parameters() if value.requires_grad}
    updates = torch.optim.AdamW(
        trained.values(),
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    frozen = {name: value.clone() for name, value in state.frozen.items()}
    batch = tokens()
    assert torch.allclose(theirs(batch).logits, model(batch), atol=1e-5)
    count = batch[:, 1:].numel()
    for step in range(1, 6):
        loss = model.loss(batch[:, :-1], batch[:, 1:]) / count
        their_loss = theirs(batch, labels=batch).loss
        assert loss.item() == pytest.approx(their_loss.item(), rel=2e-5)
        loss.backward()
        their_loss.backward()
        if step == 1:
            # Ours by their names: what turns weights into theirs turns gradients, too.
            ours = {
                name: state.view_parameter(state.collected, i) for i, name in enumerate(state.names)
            }
            (tmp_path / "gradients").mkdir()
            peft_folder.write_adapters(tmp_path / "gradients", ours, spec, base="base")
            gradients = load_file(tmp_path / "gradients" / peft_folder.ADAPTERS_FILE)
            assert len(gradients) == len(trained)
            largest = max(value.grad.abs().max() for value in trained.values())
            for name, value in trained.items():
                mine = gradients[name.replace(".default", "")]
                assert torch.allclose(mine, value.grad, rtol=1e-4, atol=1e-5 * largest), name
        state.optimizer_step(OPTIMIZER, OPTIMIZER.lr, step, 1.0)
        updates.step()
        updates.zero_grad()
    for name, value in state.frozen.items():
        assert torch.equal(value, frozen[name]), name
    assert all(not torch.equal(value, adapters[name]) for name, value in adapters_of(model).items())


@torch.no_grad()
def test_peft_and_merged_weights_compute_the_same(base, tmp_path):
    model, state = load(base)
    generator = torch.Generator().manual_seed(5)
    adapters = {
        name: value + 0.2 * torch.randn(value.shape, generator=generator)
        for name, value in adapters_of(model).items()
    }
    state.load_parameters(adapters.items())
    theirs = load_theirs(base, tmp_path / "adapters", model.spec, adapters)
    _, weights = huggingface.read_model(base)
    merged = Decoder(model.spec.base)
    merged.load_state_dict(merge_adapters(model.spec, weights, adapters))
    logits = model(tokens())
    size = logits.abs().max()
    assert (theirs(tokens()).logits - logits).abs().max() < 1e-5 * size
    assert (merged(tokens()) - logits).abs().max() < 1e-5 * size
    assert (merged(tokens()) - load(base)[0](tokens())).abs().max() > 0.01 * size
    config = json.loads((tmp_path / "adapters" / peft_folder.CONFIG_FILE).read_text())
    assert config["base_model_name_or_path"] == str(base)


def test_frozen_weights_are_in_the_working_dtype_and_only_adapters_have_masters(base):
    model, state = load(base, "bf16")
    count = models.count_trained(model.spec)
    assert all(value.dtype == torch.bfloat16 for value in state.frozen.values())
    sizes = [sum(part.numel() for part in parts) for parts in (state.master, state.exp_avg)]
    assert all(count <= size < 1.5 * count for size in sizes)
    assert set(state.names) == set(adapters_of(model))


def test_blocks_with_adapters_warm_up_for_the_compiler(base):
    """The stand-in of a block is frozen where the model's is, or its graph would be another."""
    model, _ = load(base)
    made = []
    model.run_block = lambda block, x, *others: (
        made.append((block, x)) or type(block).forward(block, x, *others)
    )
    compiled = torch.compile
    try:
        torch.compile = lambda function, **options: function
        warm_up_blocks(model, torch.device("cpu"), torch.float32, BlockInputs((2,), SEQ_LEN))
    finally:
        torch.compile = compiled
    kinds = models.graph(model.spec).blocks
    assert [x.requires_grad for _, x in made] == [True, False] * len(kinds)
    for name, parameter in made[0][0].named_parameters():
        assert parameter.requires_grad == is_adapter(name)


def test_units_with_adapters_are_timed_though_the_embedding_is_frozen(monkeypatch):
    monkeypatch.setattr(unit_timing, "UNITS_S", 0.0)
    spec = models.family("llama").shape(d_model=32, layers=2, vocab_size=67, context=SEQ_LEN)
    spec = msgspec.structs.replace(spec, lora=Lora(rank=RANK))
    timed = unit_timing.unit_times(
        torch.device("cpu"), spec, SEQ_LEN, rows=[2], dtypes=["fp32"], allowed=2**33
    )
    assert not timed.left_out
    assert [one.unit for one in timed.times] == ["embedding", "block", "head"]
    assert {one.model for one in timed.times} == {models.graph(spec).units_hash}
    assert models.graph(spec).units_hash != models.graph(spec.base).units_hash
