"""Presets have exactly the published sizes; the maps to Hugging Face cover every parameter; listing
imports nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from farspan import models
from farspan.domain.model import count_parameters
from farspan.domain.problems import Refusal

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "slm-100m": 130_569_920,
    "slm-500m": 526_550_016,
    "slm-1b": 970_458_240,
    "slm-2b": 1_969_027_008,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "mistral-7b": 7_241_732_096,
    "gpt3-13b": 12_853_473_280,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "smollm3-3b": 3_075_098_624,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_the_count_is_the_published_one(name, count):
    preset = models.preset(name)
    assert count_parameters(preset.spec) == preset.published == count
    assert preset.planning_only == (count > 2e9)


@pytest.mark.parametrize(
    ("name", "layers", "d_model", "heads"),
    [("gpt2m", 24, 1024, 16), ("gpt2L", 30, 1280, 20), ("gpt2l", 26, 1280, 20)],
)
def test_the_fabric_models_have_the_papers_shapes(name, layers, d_model, heads):
    spec = models.preset(name).spec
    assert (spec.layers, spec.d_model, spec.heads, spec.context, spec.vocab_size) == (
        layers,
        d_model,
        heads,
        1024,
        50256,
    )


def test_preset_whose_shape_differs_from_its_checkpoint_is_for_planning_only():
    preset = models.preset("opt-350m")
    assert preset.published is None and preset.planning_only
    assert f"{count_parameters(preset.spec):,}" in preset.source and "331,196,416" in preset.source
    checkpoint = models.family("opt").to_config(preset.spec) | {"word_embed_proj_dim": 512}
    for config in (
        checkpoint,
        checkpoint | {"word_embed_proj_dim": 1024, "do_layer_norm_before": False},
    ):
        with pytest.raises(Refusal) as caught:
            models.from_config(config)
        assert caught.value.problem.code == "model-unsupported"


@pytest.mark.parametrize("name", ["gpt2", "slm-100m", "opt-125m"])
@pytest.mark.parametrize(
    "value", [10**9, 2**63, 10**400, 1e308, 12.0, -1, 0, True, "12", None, [12], {}]
)
def test_config_with_sizes_that_no_model_has_is_refused(name, value):
    """Each number of a config.json in turn: none is built, none ends in a traceback."""
    spec = models.preset(name).spec
    config = models.family(spec.family).to_config(spec)
    sizes = {key for key, size in config.items() if type(size) is int} - {"n_ctx"}
    if not value:
        # These may be left out.
        sizes -= {"n_inner", "num_key_value_heads", "head_dim", "ffn_dim", "num_attention_heads"}
    assert len(sizes) >= 4
    for key in sizes:
        changed = config | {key: value}
        with pytest.raises(Refusal) as caught:
            models.from_config(changed)
        assert caught.value.problem.code == "model-unsupported", key


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": {"LlamaForCausalLM": 1}},
        {"rope_parameters": "default"},
        {"rope_parameters": {"rope_theta": "x"}},
        {"rope_parameters": {"rope_theta": float("inf")}},
        {"rms_norm_eps": "1e-6"},
        {"rms_norm_eps": float("nan")},
        {"tie_word_embeddings": "yes"},
        {"hidden_act": ["silu"]},
    ],
)
def test_config_of_another_form_is_refused(change):
    spec = models.preset("slm-100m").spec
    with pytest.raises(Refusal) as caught:
        models.from_config(models.family("llama").to_config(spec) | change)
    assert caught.value.problem.code == "model-unsupported"


def test_config_file_that_is_far_too_long_is_refused_unread(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(Refusal) as caught:
        models.read_config(tmp_path)
    assert caught.value.problem.code == "model-unsupported"


@pytest.mark.parametrize("name", models.presets())
def test_the_module_has_as_many_parameters_and_the_map_covers_each(name):
    torch = pytest.importorskip("torch")
    from farspan.runtime.model.decoder import Decoder

    spec = models.preset(name).spec
    with torch.device("meta"):
        built = {n: p.shape for n, p in Decoder(spec).named_parameters()}
    assert sum(shape.numel() for shape in built.values()) == count_parameters(spec)
    entries = models.family(spec.family).tensors(spec)
    assert {entry.ours: sum(entry.rows) for entry in entries} == {
        n: shape[0] for n, shape in built.items()
    }
    theirs = [t for entry in entries for t in entry.theirs]
    assert len(theirs) == len(set(theirs))


@pytest.mark.parametrize("name", models.presets())
def test_the_config_leads_back_to_the_spec(name):
    spec = models.preset(name).spec
    assert models.from_config(models.family(spec.family).to_config(spec)) == spec


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(Refusal) as caught:
        models.preset("gpt2-medum")
    assert caught.value.problem.code == "out-of-range"
    assert "gpt2-medium" in caught.value.problem.remedy
    with pytest.raises(Refusal, match="llama"):
        models.family("lama")


FAMILIES = ["gemma3", "gpt2", "gpt_neox", "llama", "olmo2", "opt", "qwen2", "qwen3", "smollm3"]


def test_listing_families_imports_none_and_presets_need_no_torch():
    program = (
        "import sys; from farspan import models; names = models.families(); "
        "assert not any(f'farspan.models.{n}' in sys.modules for n in names); "
        "models.presets(); assert not {'torch', 'numpy', 'transformers'} & set(sys.modules); "
        "print(*names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == FAMILIES
