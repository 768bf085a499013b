"""Logits equal transformers' both ways, through real files; round trips keep every bit; strange
folders are refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as token_models

from farspan import models
from farspan.corpus import tokenizer as tokenizers
from farspan.domain.model import SlidingWindow, count_parameters
from farspan.domain.problems import Refusal
from farspan.models import _weight_files
from farspan.runtime.model import huggingface
from farspan.runtime.model.decoder import Decoder, initialize_model
from farspan.runtime.model.generate import generate
from tests.examples import few

transformers = pytest.importorskip("transformers")

TEXT = "Zażółć gęślą jaźń; def f(x):\n    return x  # naïve 字"
SHAPES = {
    "gpt2": ("gpt2", {"d_model": 48, "layers": 2, "heads": 3}),
    "gpt2-untied": ("gpt2", {"d_model": 40, "layers": 1, "heads": 5, "d_ff": 52, "tied": False}),
    "llama": ("llama", {"d_model": 48, "layers": 2, "heads": 3}),
    "llama-untied-gqa": (
        "llama",
        {"d_model": 96, "layers": 3, "heads": 6, "kv_heads": 2, "d_ff": 101, "tied": False},
    ),
    "llama-mqa": ("llama", {"d_model": 32, "layers": 1, "heads": 4, "kv_heads": 1}),
    "opt": ("opt", {"d_model": 48, "layers": 2, "heads": 3}),
    "qwen2": ("qwen2", {"d_model": 48, "layers": 2, "heads": 4, "kv_heads": 2}),
    "qwen3": (
        "qwen3",
        {"d_model": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 20, "tied": False},
    ),
    "gpt_neox": ("gpt_neox", {"d_model": 48, "layers": 2, "heads": 2}),
    "gemma3": (
        "gemma3",
        {
            "d_model": 48,
            "layers": 3,
            "heads": 4,
            "kv_heads": 2,
            "head_size": 20,
            "window": SlidingWindow(size=7, layers=(0, 2), rope_theta=1e4),
        },
    ),
    "olmo2": ("olmo2", {"d_model": 48, "layers": 2, "heads": 4, "kv_heads": 2, "tied": False}),
    "smollm3": ("smollm3", {"d_model": 48, "layers": 5, "heads": 4, "kv_heads": 2}),
}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A byte-level BPE of 300 tokens, end of text first."""
    made = Tokenizer(token_models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT] * 5,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
        ),
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def build(name, vocab_size=331, context=24):
    family, knobs = SHAPES[name]
    return models.family(family).shape(vocab_size=vocab_size, context=context, **knobs)


def decoder(spec, seed=0):
    """A model whose every parameter is random, norms and biases too, so that no mistake hides
    behind ones and zeros."""
    model = Decoder(spec).eval()
    initialize_model(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def random_tokens(spec):
    return torch.randint(
        spec.vocab_size, (2, spec.context), generator=torch.Generator().manual_seed(1)
    )


def export(folder, model, tokenizer, **options):
    huggingface.export_model(
        folder, model.state_dict(), model.spec, tokenizer=tokenizer, end_of_text=0, **options
    )
    return folder


@torch.no_grad()
@pytest.mark.parametrize("name", SHAPES)
def test_exported_logits_equal_transformers(name, tmp_path, tokenizer):
    model = decoder(build(name))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        export(tmp_path / "hf", model, tokenizer)
    ).eval()
    assert theirs.dtype == torch.float32
    assert sum(p.numel() for p in theirs.parameters()) == count_parameters(model.spec)
    tokens_BS = random_tokens(model.spec)
    assert (theirs(tokens_BS).logits - model(tokens_BS)).abs().max() < 1e-4
    assert theirs.config.eos_token_id == 0


@torch.no_grad()
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sharded", [False, True])
def test_imported_logits_equal_transformers(name, sharded, tmp_path):
    spec = build(name)
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(**models.family(spec.family).to_config(spec))
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    theirs.save_pretrained(tmp_path, max_shard_size="50KB" if sharded else "1GB")
    assert (tmp_path / _weight_files.INDEX).exists() == sharded
    read_spec, state = huggingface.read_model(tmp_path)
    assert read_spec == spec
    ours = Decoder(read_spec).eval()
    ours.load_state_dict(state, strict=True)
    tokens_BS = random_tokens(spec)
    assert (theirs(tokens_BS).logits - ours(tokens_BS)).abs().max() < 1e-4


@torch.no_grad()
def test_a_mistral_folder_is_read(tmp_path):
    config = transformers.MistralConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=70,
        vocab_size=97,
        max_position_embeddings=24,
        sliding_window=24,
        rope_theta=5000.0,
    )
    theirs = transformers.MistralForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    spec, state = huggingface.read_model(tmp_path)
    ours = Decoder(spec).eval()
    ours.load_state_dict(state)
    tokens_BS = random_tokens(spec)
    assert (theirs(tokens_BS).logits - ours(tokens_BS)).abs().max() < 1e-4


#: Knobs of published models, in small: three of each family.
REAL_KNOBS = {
    "LlamaConfig": (
        {  # Llama 3.2
            "head_dim": 24,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 48,
            },
        },
        {  # Llama 3.1
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {  # SmolLM2
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    "Qwen2Config": (
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
    ),
    "Qwen3Config": (
        {"head_dim": 32, "tie_word_embeddings": True},
        {"head_dim": 16, "num_key_value_heads": 4},
        {"head_dim": 10, "num_key_value_heads": 1, "rope_parameters": {"rope_theta": 5e6}},
    ),
    "GPTNeoXConfig": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {"use_parallel_residual": False, "hidden_act": "gelu_new"},
        {"rope_parameters": {"rope_theta": 5e3, "partial_rotary_factor": 1.0}},
    ),
    "Gemma3TextConfig": (
        {  # Gemma 3 1B
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 12,
        },
        {  # Gemma 3 27B: scores have a scale of their own
            "head_dim": 16,
            "query_pre_attn_scalar": 21,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 512,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
    "Olmo2Config": (
        {"rope_parameters": {"rope_theta": 5e5}, "rms_norm_eps": 1e-6},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"num_key_value_heads": 1},
    ),
    "SmolLM3Config": (
        {"num_hidden_layers": 5, "rope_parameters": {"rope_theta": 5e6}},
        {"no_rope_layers": [0, 1, 0], "tie_word_embeddings": False},
        {"no_rope_layer_interval": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "number"), [(kind, number) for kind in REAL_KNOBS for number in range(3)]
)
def test_published_knobs_give_the_same_logits_and_come_back_bit_by_bit(
    kind, number, tmp_path, tokenizer
):
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 100,
        "vocab_size": 331,
        "max_position_embeddings": 96,
        "pad_token_id": None,
    }
    config = getattr(transformers, kind)(**sizes | REAL_KNOBS[kind][number])
    torch.manual_seed(number)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in theirs.eval().parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    theirs.save_pretrained(tmp_path / "theirs")
    spec, state = huggingface.read_model(tmp_path / "theirs")
    ours = Decoder(spec).eval()
    ours.load_state_dict(state, strict=True)
    tokens_BS = random_tokens(spec)
    logits = theirs(tokens_BS).logits
    assert (logits - ours(tokens_BS)).abs().max() <= 1e-5 * logits.abs().max()
    # What is exported has the same tensors, and reads as the same model.
    export(tmp_path / "ours", ours, tokenizer)
    assert huggingface.read_model(tmp_path / "ours")[0] == spec
    before = load_file(tmp_path / "theirs" / _weight_files.WEIGHTS_FILE)
    after = load_file(tmp_path / "ours" / _weight_files.WEIGHTS_FILE)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    assert torch.equal(again(tokens_BS).logits, logits)


@few(20)
@given(
    st.sampled_from(models.families()),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.integers(1, 9),
    st.integers(1, 60),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_round_trip_keeps_every_bit(
    tmp_path_factory,
    tokenizer,
    family,
    layers,
    kv_heads,
    group,
    half_head,
    d_ff,
    vocab_size,
    tied,
    seed,
):
    heads = kv_heads * group
    spec = models.family(family).shape(
        d_model=2 * half_head * heads,
        layers=layers,
        heads=heads,
        kv_heads=heads if family in ("gpt2", "opt", "gpt_neox") else kv_heads,
        d_ff=d_ff,
        vocab_size=vocab_size,
        context=5,
        tied=tied,
    )
    model = decoder(spec, seed)
    read_spec, state = huggingface.read_model(
        export(tmp_path_factory.mktemp("round"), model, tokenizer)
    )
    assert read_spec == spec
    assert {n: t.shape for n, t in state.items()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert all(torch.equal(state[name], parameter) for name, parameter in model.named_parameters())


def test_bf16_export_halves_the_file_and_reads_back(tmp_path, tokenizer):
    model = decoder(build("llama"))
    folder = export(tmp_path / "bf16", model, tokenizer, dtype="bf16")
    _, state = huggingface.read_model(folder)
    assert all(torch.equal(state[n], p.detach().bfloat16()) for n, p in model.named_parameters())
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
        == torch.bfloat16
    )


def test_the_exported_tokenizer_gives_the_same_ids(tmp_path, tokenizer):
    folder = export(tmp_path / "hf", decoder(build("llama")), tokenizer)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [0, *Tokenizer.from_file(str(tokenizer)).encode(TEXT).ids]
    assert (
        loaded(TEXT)["input_ids"] == ids
        and loaded(TEXT, add_special_tokens=False)["input_ids"] == ids[1:]
    )
    assert loaded.decode(ids, skip_special_tokens=True) == TEXT
    assert loaded("a", "b")["input_ids"] == [*loaded("a")["input_ids"], *loaded("b")["input_ids"]]
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", 0)


PROMPTS = [
    "",
    " ",
    "x  ",
    "\n\n",
    "naïve\t",
    "a<|endoftext|>b",
    "<|endoftext|>",
    "def f(x):\n    return",
    "Zażółć gęślą jaźń ",
    "字字 \u200d🙂",
]


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_writes_what_generate_writes(name, tmp_path, tokenizer):
    """Through the folder: the text's beginning, the prompt, the likeliest tokens, the end.
    Vocabularies have rows that stand for no token."""
    model = decoder(build(name, context=64))
    folder = export(tmp_path / "hf", model, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    loader = models.family(model.spec.family).TOKENIZER_CLASS
    words = getattr(transformers, loader).from_pretrained(folder)
    ours = tokenizers.load_tokenizer(tokenizer)
    for prompt in PROMPTS:
        asked = words(prompt, return_tensors="pt")
        assert asked["input_ids"].tolist() == [[ours.end_of_text, *ours.encode(prompt)]]
        written = theirs.generate(**asked, max_new_tokens=16, do_sample=False)[0]
        text = generate(model, ours, prompt, tokens=16, temperature=0, top_k=0, seed=0)
        assert (
            words.decode(written[asked["input_ids"].shape[1] :], skip_special_tokens=True) == text
        )
        assert words.decode(written, skip_special_tokens=True) == prompt + text


def with_processor(tokenizer, folder, processor):
    """The same tokenizer as somebody else gives it: with ends of text of its own around every
    text."""
    folder.mkdir()
    content = json.loads(tokenizer.read_text()) | {"post_processor": processor}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


END = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
TEXT_A, TEXT_B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
ENDS = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}


@pytest.mark.parametrize("around", [[END, TEXT_A], [TEXT_A, END], [END, TEXT_A, END]])
def test_a_tokenizer_that_adds_ends_of_text_itself_adds_no_second_one(tmp_path, tokenizer, around):
    processor = {
        "type": "TemplateProcessing",
        "single": around,
        "pair": [*around, TEXT_B],
        "special_tokens": ENDS,
    }
    given = with_processor(tokenizer, tmp_path / "given", processor)
    folder = export(tmp_path / "hf", decoder(build("llama")), given)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded(TEXT)["input_ids"] == [0, *tokenizers.load_tokenizer(tokenizer).encode(TEXT)]


def test_an_exported_folder_is_a_tokenizer_with_the_same_ids_and_exports_as_itself(
    tmp_path, tokenizer
):
    """As when `model.path` names the folder."""
    model = decoder(build("gpt2"))
    first = export(tmp_path / "first", model, tokenizer)
    words = tokenizers.load_tokenizer(first)
    before = tokenizers.load_tokenizer(tokenizer)
    assert words.encode(TEXT) == before.encode(TEXT)
    assert (words.end_of_text, words.vocab_size, words.engine) == (
        0,
        before.vocab_size,
        before.engine,
    )
    second = tmp_path / "second"
    words.save(tmp_path / "tokenizer.json")
    export(second, model, tmp_path / "tokenizer.json")
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        _weight_files.WEIGHTS_FILE,
    ):
        assert (second / name).read_bytes() == (first / name).read_bytes()
    assert json.loads((second / "tokenizer.json").read_text()) == json.loads(
        (first / "tokenizer.json").read_text()
    )


def test_files_of_the_bare_model_are_read(tmp_path, tokenizer):
    """The first GPT-2 checkpoints lack the prefix and carry mask buffers."""
    model = decoder(build("gpt2"))
    folder = export(tmp_path / "hf", model, tokenizer)
    bare = {
        n.removeprefix("transformer."): t
        for n, t in load_file(folder / _weight_files.WEIGHTS_FILE).items()
    }
    bare["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    save_file(bare, folder / _weight_files.WEIGHTS_FILE)
    _, state = huggingface.read_model(folder)
    assert all(torch.equal(state[n], p) for n, p in model.named_parameters())


def refusal(folder):
    with pytest.raises(Refusal) as caught:
        huggingface.read_model(folder)
    return caught.value.problem


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}}),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"attention_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}),
        ("qwen3", {"attention_bias": True}),
        ("gemma3", {"attn_logit_softcapping": 50.0}),
        ("gemma3", {"final_logit_softcapping": 30.0}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("gemma3", {"hidden_activation": "gelu"}),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("olmo2", {"attention_bias": True}),
        ("olmo2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("smollm3", {"mlp_bias": True}),
        ("gpt_neox", {"hidden_act": "silu"}),
        ("gpt_neox", {"attention_bias": False}),
        ("gpt_neox", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        (
            "llama",
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8},
        ),
        ("llama", {"num_attention_heads": 5}),
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"architectures": ["BloomForCausalLM"]}),
        ("gpt2", {"n_layer": 3}),
        ("gpt2", {"n_layer": 1}),
        ("gpt2", {"n_inner": 100}),
        ("opt", {"do_layer_norm_before": False}),
    ],
)
def test_import_refuses_configs_with_unsupported_keys_by_name(name, change, tmp_path, tokenizer):
    folder = export(tmp_path / "hf", decoder(build(name)), tokenizer)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    problem = refusal(folder)
    assert problem.code == "model-unsupported"
    named = {"n_layer", "n_inner", "num_attention_heads", "architectures"} & set(change)
    assert named or any(key in str(problem) or "rope_type" in str(problem) for key in change)


def test_a_tied_config_with_another_head_is_refused(tmp_path, tokenizer):
    folder = export(tmp_path / "hf", decoder(build("gpt2-untied")), tokenizer)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert "lm_head.weight" in refusal(folder).fact


def test_pickled_damaged_and_missing_weights_are_refused(tmp_path, tokenizer):
    folder = export(tmp_path / "hf", decoder(build("gpt2")), tokenizer)
    weights = folder / _weight_files.WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])
    assert refusal(folder).code == "model-unsupported"
    weights.rename(folder / "pytorch_model.bin")
    problem = refusal(folder)
    assert problem.code == "model-unsupported" and "pickle" in problem.what
    (folder / "pytorch_model.bin").unlink()
    assert refusal(folder).code == "path-missing"
    (folder / _weight_files.INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": "../../secret"}})
    )
    assert "outside" in refusal(folder).fact


def test_a_wrong_end_of_text_is_refused(tmp_path, tokenizer):
    model = decoder(build("gpt2"))
    with pytest.raises(Refusal) as caught:
        huggingface.export_model(
            tmp_path / "x", model.state_dict(), model.spec, tokenizer=tokenizer, end_of_text=7
        )
    assert caught.value.problem.code == "tokenizer-mismatch"


def test_weights_with_more_values_than_the_model_are_refused_unread(tmp_path, tokenizer):
    """A file of holes: a terabyte by its header, a few kB on the disk."""
    folder = export(tmp_path / "hf", decoder(build("gpt2")), tokenizer)
    weights = folder / _weight_files.WEIGHTS_FILE
    size = 2**40
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"transformer.wte.weight": entry}).encode()
    with weights.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert f"the files hold {size // 4:,} values" in refusal(folder).fact


@pytest.mark.parametrize("length", [0, 3, 2**24 + 1, 2**63])
def test_weights_with_a_header_of_absurd_length_are_refused(length, tmp_path, tokenizer):
    folder = export(tmp_path / "hf", decoder(build("gpt2")), tokenizer)
    weights = folder / _weight_files.WEIGHTS_FILE
    weights.write_bytes(length.to_bytes(8, "little") + b"{}" * 100)
    assert refusal(folder).code == "model-unsupported"
