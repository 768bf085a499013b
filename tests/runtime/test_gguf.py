"""GGUF files in llama.cpp itself: the same ids for texts in ten scripts, and the same tokens as the
model."""

from __future__ import annotations

import json
import random
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as token_models

from farspan import models
from farspan.corpus import llama_cpp_rules, patterns
from farspan.corpus import tokenizer as tokenizers
from farspan.domain.model import ModelSpec, RopeScaling, SlidingWindow
from farspan.domain.problems import Refusal
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.model.gguf_file import require_gguf, write_gguf
from tests.runtime.test_huggingface import decoder

xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")

CONTEXT = 256
VOCAB = 1500
#: First and last letters of scripts that use spaces and of those that do not, and marks.
SCRIPTS = {
    "latin": "azAZéüßøñł",
    "cyrillic": "абвгдежзийклмнопрстуфхцчшщъыьэюяЁ",
    "greek": "αβγδεζηθικλμνξοπρστυφχψωΆ",
    "arabic": "ابتثجحخدذرزسشصضطظعغفقكلمنهوي\u064b\u0651",
    "hebrew": "אבגדהוזחטיכלמנסעפצקרשת\u05b0",
    "devanagari": "अआइईकखगघचछजटडतदनपबमयरलवशसह\u093e\u093f\u094d",
    "thai": "กขคงจฉชซญดตถทธนบปผพฟมยรลวสหอ\u0e31\u0e48",
    "han": "的一是不了人我在有他这中大来上国",
    "kana": "あいうえおかきくけこアイウエオー",
    "hangul": "가나다라마바사아자차카타파하한국어",
}
SPECS = {
    "llama": ("llama", {"heads": 4, "kv_heads": 2, "tied": False}),
    "llama-3": (
        "llama",
        {
            "heads": 4,
            "kv_heads": 2,
            "rope_theta": 500_000.0,
            "rope_scaling": RopeScaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
            ),
        },
    ),
    "qwen2": ("qwen2", {"heads": 4, "kv_heads": 2}),
    "qwen3": ("qwen3", {"heads": 4, "kv_heads": 2, "head_size": 32}),
    "gemma3": (
        "gemma3",
        {
            "heads": 4,
            "kv_heads": 1,
            "head_size": 32,
            "layers": 7,
            "window": SlidingWindow(size=40, layers=(0, 1, 2, 3, 4, 6), rope_theta=10_000.0),
        },
    ),
    "olmo2": ("olmo2", {"heads": 4, "kv_heads": 2, "tied": False}),
    "smollm3": ("smollm3", {"heads": 4, "kv_heads": 2, "layers": 5}),
    "gpt2": ("gpt2", {"heads": 4}),
    "gpt_neox": ("gpt_neox", {"heads": 4}),
}
#: llama.cpp takes GELU from a table of half precision: what a logit may differ by. All else is
#: fp32.
TABLE_ERRORS = {"gpt2": 5e-3, "gpt_neox": 5e-3, "gemma3": 5e-3}
EXACT_ERROR = 1e-4


def make_texts(count: int) -> list[str]:
    """Texts of words of one script or several, with digits, punctuation, spaces and line ends."""
    rng = random.Random(0)
    texts = []
    for number in range(count):
        scripts = rng.sample(sorted(SCRIPTS), rng.choice((1, 1, 2)))
        parts = []
        for _ in range(rng.randint(1, 30)):
            letters = SCRIPTS[rng.choice(scripts)]
            word = "".join(rng.choice(letters) for _ in range(rng.randint(1, 9)))
            others = ("12", "2026", "3.14", "'s", "I'LL", "!?", "...", "(a)", "字1", "🙂", "\u200d")
            parts.append(rng.choice((word, word, word, rng.choice(others))))
            parts.append(rng.choice((" ", " ", " ", "", "\n", "  ", "\r\n", "\t", " \n ")))
        texts.append(f"{number} {''.join(parts)}")
    return texts


def train_tokenizer(path: Path, pre_tokenizer: Any, *, ignore_merges: bool = False) -> Path:
    """Save a byte-level BPE that splits as given, trained on texts of all scripts."""
    words = Tokenizer(token_models.BPE(ignore_merges=ignore_merges))
    words.pre_tokenizer = pre_tokenizer
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words.train_from_iterator(make_texts(400), trainer)
    words.save(str(path))
    return path


def split_by(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


def build(name: str) -> ModelSpec:
    family, knobs = SPECS[name]
    shape = models.family(family).shape
    sizes = {"d_model": 64, "layers": 2, "vocab_size": VOCAB + 20, "context": CONTEXT}
    return shape(**sizes | knobs)


@contextmanager
def llama_cpp(file: Path):
    """Load a file in llama.cpp; yields what sends a request to its server."""
    asked = xllamacpp.CommonParams()
    asked.model.path = str(file)
    asked.n_ctx = CONTEXT
    asked.n_parallel = 1
    asked.n_gpu_layers = 0
    asked.warmup = False
    asked.verbosity = -1
    asked.cpuparams.n_threads = 1
    asked.cpuparams_batch.n_threads = 1
    asked.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    asked.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    asked.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(asked)
    address = server.listening_address

    def send(path: str, content: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            address + path,
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    try:
        yield send
    finally:
        del server


def write(folder: Path, model: Decoder, tokenizer: Path, **options: Any) -> Path:
    file = folder / "model.gguf"
    write_gguf(
        file,
        model.state_dict(),
        model.spec,
        tokenizer=tokenizer,
        end_of_text=0,
        name="t",
        **options,
    )
    return file


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """As runs train theirs."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizers.train_bpe_tokenizer(make_texts(400), VOCAB).save(path)
    return path


@torch.no_grad()
@pytest.mark.parametrize("name", SPECS)
def test_llama_cpp_writes_the_tokens_of_the_model(name, tmp_path, tokenizer):
    """Each of 64 tokens after 20 prompts is the likeliest by the model's own logits; where two lie
    as close as the arithmetic is, either counts."""
    model = decoder(build(name))
    prompts = make_texts(19)
    with llama_cpp(write(tmp_path, model, tokenizer)) as send:
        for prompt in (*prompts, ""):
            ids = [0, *tokenizers.load_tokenizer(tokenizer).encode(prompt)][:100]
            asked = {"prompt": ids, "n_predict": 64, "temperature": 0, "return_tokens": True}
            answer = send("/completion", asked | {"cache_prompt": False})
            written = answer["tokens"]
            assert len(written) == 64 or answer["stop_type"] == "eos"
            logits = model(torch.tensor([[*ids, *written]]))[0, len(ids) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(written)[:, None])[:, 0]
            error = TABLE_ERRORS.get(name, EXACT_ERROR)
            assert (logits.max(dim=1).values - chosen).max() <= error


RULES = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False),
    "smollm": (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        False,
    ),
    "dbrx": (split_by(patterns.GPT4_PATTERN), False),
    "llama-bpe": (split_by(patterns.GPT4_PATTERN), True),
    "qwen2": (split_by(patterns.QWEN2_PATTERN), False),
    "qwen35": (split_by(patterns.MARKS_PATTERN), False),
}


@pytest.mark.parametrize("rule", [*RULES, "own"])
def test_llama_cpp_reads_texts_of_ten_scripts_as_the_tokenizer(rule, tmp_path, tokenizer):
    path = tokenizer
    if rule != "own":
        path = train_tokenizer(
            tmp_path / "tokenizer.json", RULES[rule][0], ignore_merges=RULES[rule][1]
        )
        assert llama_cpp_rules.find_rule(json.loads(path.read_bytes())) == rule
    words = tokenizers.load_tokenizer(path)
    texts = make_texts(1000)
    with llama_cpp(write(tmp_path, decoder(build("llama")), path)) as send:
        for text in texts:
            asked = {"content": text, "add_special": True, "parse_special": False}
            assert send("/tokenize", asked)["tokens"] == [0, *words.encode(text)], text


@pytest.mark.parametrize("kind", ["fp16", "bf16", "q8_0"])
def test_smaller_types_load_and_write_text(kind, tmp_path, tokenizer):
    model = decoder(build("llama"))
    whole = write(tmp_path, model, tokenizer).stat().st_size
    file = write(tmp_path, model, tokenizer, kind=kind)
    assert file.stat().st_size < whole
    with llama_cpp(file) as send:
        answer = send("/completion", {"prompt": "a", "n_predict": 8, "return_tokens": True})
    assert answer["tokens"]


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, tokenizer):
    opt = models.family("opt").shape(d_model=32, layers=1, vocab_size=300, context=16)
    with pytest.raises(Refusal, match=r"llama\.cpp has no OPT") as caught:
        require_gguf(opt, tokenizer)
    assert caught.value.problem.code == "cannot-export"
    gemma = build("gemma3")
    for changed in (
        replace(gemma, query_scalar=99),
        replace(gemma, window=replace(gemma.window, layers=(0, 1))),
        replace(gemma, window=replace(gemma.window, rope_theta=5e3)),
        replace(build("smollm3"), unrotated_layers=(1,)),
    ):
        with pytest.raises(Refusal, match=r"llama\.cpp's (gemma3|smollm3)"):
            require_gguf(changed, tokenizer)
    # As Gemma's own: bytes stand for what is no token.
    falling_back = json.loads(tokenizer.read_bytes())
    falling_back["model"]["byte_fallback"] = True
    (tmp_path / "falling_back.json").write_text(json.dumps(falling_back))
    with pytest.raises(Refusal, match="splits text in a way"):
        require_gguf(gemma, tmp_path / "falling_back.json")
    strange = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    for splitting in (strange, split_by(patterns.GPT4O_PATTERN)):
        path = train_tokenizer(tmp_path / "tokenizer.json", splitting)
        with pytest.raises(Refusal, match="splits text in a way"):
            require_gguf(build("llama"), path)
