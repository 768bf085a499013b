"""The cloze against one question after the other, answered token by token."""

from __future__ import annotations

import random

import pytest
import torch

from farspan.corpus import tokenizer as tokenizers
from farspan.domain.problems import Refusal
from farspan.runtime.cloze import LEAST_CONTEXT, measure_cloze
from tests.runtime.test_huggingface import SHAPES, decoder
from tests.runtime.test_huggingface import build as build_spec

WORDS = ("wind", "list", "blow", "where", "naïve", "字", "x9", "Haus", "slowly")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(20, 120))) for _ in range(12)]


@pytest.fixture(scope="module")
def tokenizer(texts) -> tokenizers.Tokenizer:
    return tokenizers.train_bpe_tokenizer(texts, 300)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_answers_are_those_of_one_token_after_the_other(name, texts, tokenizer):
    assert name in SHAPES
    model = decoder(build_spec(name, context=48), seed=1)
    found = measure_cloze(model, tokenizer, texts, count=40, seed=3)
    places = []
    for number, text in enumerate(texts):
        at = LEAST_CONTEXT
        for word in text[at:].split(" ")[1:-1]:
            at = text.index(f" {word}", at)
            if word.isalpha() and len(word) > 1:
                places.append((number, at, at + 1 + len(word)))
            at += 1
    right = 0
    nats = 0.0
    asked = random.Random(3).sample(places, 40)
    for number, start, stop in asked:
        word = tokenizer.encode(texts[number][start:stop])
        ids = [tokenizer.end_of_text, *tokenizer.encode(texts[number][:start])]
        ids = ids[-(48 - len(word)) :]
        written = []
        for token in word:
            logits = model(torch.tensor([[*ids, *word[: len(written)]]]))[0, -1]
            written.append(int(logits.argmax()))
            nats -= float(torch.log_softmax(logits, -1)[token])
        right += written == word
    assert found.questions == 40
    assert found.accuracy == right / 40
    assert found.nats == pytest.approx(nats / 40, rel=1e-5)
    answers = [texts[number][start:stop] for number, start, stop in asked]
    assert found.commonest == max(map(answers.count, answers)) / 40


def test_text_without_words_is_refused(tokenizer):
    model = decoder(build_spec("llama", context=48))
    for strange in ([], ["short text of few words"], ["1 2 3 " * 500], ["字" * 5000]):
        with pytest.raises(Refusal) as caught:
            measure_cloze(model, tokenizer, strange, count=5)
        assert caught.value.problem.code == "corpus-too-small"
