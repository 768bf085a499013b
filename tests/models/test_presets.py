"""Presets have exactly the published sizes; the maps to Hugging Face cover every parameter; listing
imports nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from farspan import models
from farspan.domain.model import parameters
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
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_the_count_is_the_published_one(name, count):
    preset = models.preset(name)
    assert parameters(preset.spec) == preset.published == count
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
    assert f"{parameters(preset.spec):,}" in preset.source and "331,196,416" in preset.source
    checkpoint = models.family("opt").to_config(preset.spec) | {"word_embed_proj_dim": 512}
    for config in (
        checkpoint,
        checkpoint | {"word_embed_proj_dim": 1024, "do_layer_norm_before": False},
    ):
        with pytest.raises(Refusal) as caught:
            models.from_config(config)
        assert caught.value.problem.code == "model-unsupported"


@pytest.mark.parametrize("name", models.presets())
def test_the_module_has_as_many_parameters_and_the_map_covers_each(name):
    torch = pytest.importorskip("torch")
    from farspan.runtime.model.decoder import Decoder

    spec = models.preset(name).spec
    with torch.device("meta"):
        built = {n: p.shape for n, p in Decoder(spec).named_parameters()}
    assert sum(shape.numel() for shape in built.values()) == parameters(spec)
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
    assert done.stdout.split() == ["gpt2", "llama", "opt"]
