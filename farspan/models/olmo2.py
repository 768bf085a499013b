"""OLMo 2: Llama's decoder with norms after attention and MLP, and over all heads of q and of k
together (arXiv 2501.00656)."""

from __future__ import annotations

import functools

from farspan.domain.model import ModelSpec
from farspan.models import _llama_like
from farspan.models._decoder import graph as graph
from farspan.models._family import Config, Preset, require_value
from farspan.models._llama_like import BUFFERS as BUFFERS
from farspan.models._llama_like import HEAD as HEAD
from farspan.models._llama_like import PREFIX as PREFIX
from farspan.models._llama_like import map_tensors

TITLE = "OLMo 2"
ARCHITECTURES = ("Olmo2ForCausalLM",)
TOKENIZER_CLASS = "AutoTokenizer"
GGUF = "olmo2"


shape = functools.partial(
    _llama_like.build_spec,
    "olmo2",
    rope_theta=500_000.0,
    norm_eps=1e-6,
    joint_qk_norm=True,
    norm_place="after",
)

_SOURCE = "arXiv 2501.00656; counts of the allenai/OLMo-2 checkpoints"


def _make_preset(
    name: str, layers: int, d_model: int, heads: int, d_ff: int, published: int
) -> Preset:
    spec = shape(
        d_model=d_model,
        layers=layers,
        heads=heads,
        d_ff=d_ff,
        vocab_size=100_352,
        context=4096,
        tied=False,
    )
    return Preset(
        name=name, spec=spec, published=published, source=_SOURCE, planning_only=published > 2e9
    )


PRESETS = (
    _make_preset("olmo-2-1b", 16, 2048, 16, 8192, 1_484_916_736),
    _make_preset("olmo-2-7b", 32, 4096, 32, 11_008, 7_298_617_344),
)


def to_config(spec: ModelSpec) -> Config:
    """Write a spec of this family as a config.json."""
    config = _llama_like.write_config(spec, "Olmo2ForCausalLM", "olmo2")
    # transformers' own is a token of the published vocabulary, which others may lack.
    return config | {"attention_bias": False, "pad_token_id": None}


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a config.json; a Refusal names what farspan does not compute."""
    require_value(config, "attention_bias", (False,))
    # transformers' own, which most files leave out.
    config = {"rms_norm_eps": 1e-5} | config
    return _llama_like.read_spec(
        config, "olmo2", bias=False, joint_qk_norm=True, norm_place="after"
    )


tensors = map_tensors
