"""Cloze: how often a model continues a held-out text with the very next word, as LAMBADA asks
(arXiv 1606.06031), of text that the run has not trained on."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch
import torch.nn.functional as F

from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.problems import Refusal
from farspan.runtime.model.decoder import Decoder

#: A word with the space before it, which begins a token. Two letters at least.
_WORDS = re.compile(r" [^\W\d_]{2,}(?=[\s.,;:!?)])")
#: Characters of the text before a word that is asked for. A choice.
LEAST_CONTEXT = 200
#: Of each text before a word, characters beyond this are never in a model's context.
MOST_CHARS = 64 * 1024
#: Questions that are computed at a time.
BATCH = 8


class Cloze(msgspec.Struct, frozen=True, kw_only=True):
    """What a model makes of words of held-out text."""

    questions: int
    #: Share of the words whose every token is the likeliest, with its standard error.
    accuracy: float
    standard_error: float
    #: Nats of a word, in the mean.
    nats: float
    #: The accuracy of who always answers the commonest of these words.
    commonest: float


class _Question(msgspec.Struct, frozen=True):
    context: list[int]
    word: list[int]
    text: str


def measure_cloze(
    model: Decoder,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    count: int,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> Cloze:
    """Ask for `count` words of these texts, drawn by the seed; fewer where there are no more.

    Raises Refusal (corpus-too-small) where there is none.
    """
    places = list(_find_places(texts))
    if not places:
        raise Refusal(
            "corpus-too-small",
            what="the held-out text has no word with enough text before it",
            where="the validation split",
            fact=f"a word needs {LEAST_CONTEXT} characters before it",
            remedy="hold out more text: data: {source: FOLDER, val: 20%}",
        )
    chosen = random.Random(seed).sample(places, min(count, len(places)))
    questions = [
        _make_question(texts[n], start, stop, model, tokenizer) for n, start, stop in chosen
    ]
    # Those of one length go together.
    questions.sort(key=lambda question: len(question.context) + len(question.word))
    right = 0
    nats = 0.0
    for first in range(0, len(questions), BATCH):
        batch = questions[first : first + BATCH]
        for is_right, word_nats in _answer(model, batch):
            right += is_right
            nats += word_nats
        report(first + len(batch))
    number = len(questions)
    accuracy = right / number
    commonest = Counter(question.text for question in questions).most_common(1)[0][1]
    return Cloze(
        questions=number,
        accuracy=accuracy,
        standard_error=math.sqrt(accuracy * (1 - accuracy) / number),
        nats=nats / number,
        commonest=commonest / number,
    )


def _find_places(texts: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yield the text, start and end of each word that may be asked for."""
    for number, text in enumerate(texts):
        for match in _WORDS.finditer(text, LEAST_CONTEXT):
            yield number, match.start(), match.end()


def _make_question(
    text: str, start: int, stop: int, model: Decoder, tokenizer: Tokenizer
) -> _Question:
    word = tokenizer.encode(text[start:stop])
    before = tokenizer.encode(text[max(0, start - MOST_CHARS) : start])
    context = [tokenizer.end_of_text, *before]
    return _Question(context[-(model.spec.context - len(word)) :], word, text[start:stop])


@torch.inference_mode()
def _answer(model: Decoder, batch: Sequence[_Question]) -> Iterator[tuple[bool, float]]:
    """Yield for each question whether every token of its word is the likeliest, and its nats."""
    length = max(len(question.context) + len(question.word) for question in batch) - 1
    device = model.tok.weight.device
    tokens_BS = torch.zeros((len(batch), length), dtype=torch.long)
    for row, question in enumerate(batch):
        inputs = [*question.context, *question.word[:-1]]
        tokens_BS[row, : len(inputs)] = torch.tensor(inputs)
    states_BSD = model.hidden_states(tokens_BS.to(device))
    for row, question in enumerate(batch):
        first = len(question.context) - 1
        states_TD = states_BSD[row, first : first + len(question.word)]
        logits_TV = F.linear(states_TD, model.head_VD).float()
        word_T = torch.tensor(question.word, device=device)
        nats = F.cross_entropy(logits_TV, word_T, reduction="sum")
        yield bool((logits_TV.argmax(dim=1) == word_T).all()), float(nats)
