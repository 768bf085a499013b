"""Topics: the groups that a corpus was made with come out, named by their words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.retrieval.topics import MAX_TOPICS, find_topics, group_vectors, words_of

SUBJECTS = {
    "river": "river water bank boat stream delta",
    "bread": "bread flour oven yeast dough crust",
    "stars": "telescope planet orbit galaxy comet nebula",
    "music": "violin concert melody rhythm orchestra tune",
}


def corpus(each: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    rng = np.random.default_rng(seed)
    texts = []
    labels = []
    for label, words in enumerate(SUBJECTS.values()):
        for _ in range(each):
            own = rng.choice(words.split(), 5)
            common = rng.choice(["the", "and", "with", "this", "that", "from", "there", "about"], 8)
            texts.append(" ".join([*own, *common]))
            labels.append(label)
    order = rng.permutation(len(texts))
    return [texts[row] for row in order], np.array(labels)[order]


def same_groups(a: np.ndarray, b: np.ndarray) -> float:
    """The share of pairs of documents that both put together, or both apart."""
    return float(((a[:, None] == a) == (b[:, None] == b)).mean())


@pytest.mark.parametrize("with_vectors", [False, True])
def test_groups_of_a_corpus_come_out_and_are_named_by_their_words(with_vectors):
    texts, labels = corpus(6)
    vectors = None
    if with_vectors:
        centres = np.eye(8)[labels] + 5  # A common direction hides none of them.
        noise = np.random.default_rng(1).standard_normal((len(texts), 8)) * 0.05
        vectors = (centres + noise).astype(np.float32)
    topics, numbers = find_topics(vectors, texts)
    assert len(topics.topics) == 4 and same_groups(numbers, labels) > 0.97
    for topic in topics.topics:
        (subject,) = {labels[row] for row in np.flatnonzero(numbers == topic.number)} or {None}
        own = [*SUBJECTS.values()][subject].split()
        assert set(topic.words) <= set(own) and topic.name == ", ".join(topic.words)
        assert topic.documents == (numbers == topic.number).sum()


def test_topics_are_the_same_each_time_and_the_largest_comes_first():
    texts, _ = corpus(20)
    first = find_topics(None, texts)
    again = find_topics(None, texts)
    assert first[0] == again[0] and np.array_equal(first[1], again[1])
    sizes = [topic.documents for topic in first[0].topics]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == len(texts)


def test_few_documents_have_no_topics():
    topics, numbers = find_topics(None, ["a river"] * 11)
    assert topics.topics == () and set(numbers.tolist()) == {-1}


@pytest.mark.property
@given(st.lists(st.text(max_size=40), max_size=60), st.booleans(), st.integers(0, 9))
def test_every_document_has_one_topic_whatever_it_holds(texts, with_vectors, seed):
    vectors = None
    if with_vectors:
        vectors = np.random.default_rng(seed).standard_normal((len(texts), 3)).astype(np.float32)
        vectors[::3] = 0
    topics, numbers = find_topics(vectors, texts, seed)
    assert len(numbers) == len(texts) and len(topics.topics) <= MAX_TOPICS
    for topic in topics.topics:
        assert topic.documents == (numbers == topic.number).sum() > 0
        assert topic.name


def test_equal_vectors_are_one_group():
    labels = group_vectors(np.ones((30, 4), np.float32), 5, 0)
    assert len(set(labels.tolist())) == 1


def test_words_of_scripts_without_spaces_are_pairs_of_characters():
    assert {"図書", "書館"} <= {*words_of("図書館で本を読む")}
    assert {*words_of("हिन्दी किताबें 123 ab_cd")} == {"हिन्दी", "किताबें"}
