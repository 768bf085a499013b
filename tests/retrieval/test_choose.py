"""How an index answers is chosen on tuning queries: the usual choice stays unless another one is
better for certain."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.retrieval.bm25 import K1, B
from farspan.retrieval.choose import (
    ENCODER_SHARE,
    MAX_OWN_SHARE,
    Bodies,
    LexicalChoice,
    MixChoice,
    choose_mix,
    choose_words,
    measure_mixes,
    score_queries,
)
from farspan.retrieval.hybrid_ranking import (
    DEPTH,
    WORDS_ALONE,
    Mix,
    VoiceScores,
    best_by_document,
    cosine_deviation,
    fuse_scores,
    normalize_scores,
    vector_scores,
)
from farspan.retrieval.queries import Query
from farspan.retrieval.words import WordRules

VOICES = ("bm25", "model", "encoder")


@st.composite
def mixes(draw) -> Mix:
    parts = draw(st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any))
    total = sum(parts)
    return Mix(**{voice: part / total for voice, part in zip(VOICES, parts, strict=True)})


@given(mixes())
def test_weights_add_up_to_one_and_voices_are_those_that_count(mix):
    assert sum(mix.weights.values()) == pytest.approx(1)
    assert set(mix.voices) == {voice for voice in VOICES if getattr(mix, voice) > 0}
    weights = [mix.weights[voice] for voice in mix.voices]
    assert weights == sorted(weights, reverse=True)
    assert all(f"{mix.weights[voice]:.2g}" in str(mix) for voice in mix.voices)


@given(mixes(), st.sampled_from(VOICES))
def test_mix_without_a_voice_keeps_the_others_proportions(mix, voice):
    rest = mix.without(voice)
    assert getattr(rest, voice) == 0 or (voice == "bm25" and rest == WORDS_ALONE)
    assert sum(rest.weights.values()) == pytest.approx(1)
    others = [name for name in VOICES if name != voice]
    total = sum(getattr(mix, name) for name in others)
    for name in others if total else ():
        assert getattr(rest, name) == pytest.approx(getattr(mix, name) / total)
    assert total or rest == WORDS_ALONE


@given(mixes())
def test_mix_is_read_back_as_it_was_written(mix):
    assert msgspec.json.decode(msgspec.json.encode(mix), type=Mix) == mix


@pytest.mark.parametrize(
    "weights",
    [
        {"bm25": 0.5},
        {"model": 0.5},
        {"bm25": -0.5, "model": 1.5},
        {"bm25": 0.5, "magic": 0.5},
        {"bm25": "1"},
    ],
)
def test_weights_that_are_no_mix_are_refused(weights):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(weights), type=Mix)


def floats(values) -> np.ndarray:
    return np.array(values, np.float32)


def test_fusion_by_hand():
    words = VoiceScores(floats([4, 2, 0, 0]), 2.0)
    cosines = VoiceScores(floats([0, 0.5, 0.9, 0]), 0.2)
    np.testing.assert_allclose(normalize_scores("bm25", words), [2, 1, 0, 0])
    # Cosines count from the lowest that was found.
    np.testing.assert_allclose(normalize_scores("encoder", cosines), [0, 0, 2, 0], atol=1e-6)
    scores = {"bm25": words, "encoder": cosines}
    fused = fuse_scores(scores, Mix(bm25=0.4, encoder=0.6))
    np.testing.assert_allclose(fused, [0.8, 0.4, 1.2, 0], atol=1e-6)
    # What any voice of the mix found stays above 0.
    alone = fuse_scores(scores, Mix(bm25=0.0, encoder=1.0))
    np.testing.assert_allclose(alone, [0, 1e-6, 2, 0], atol=1e-7)
    assert (alone > 0).tolist() == [False, True, True, False]


def test_voice_that_finds_all_alike_says_nothing():
    same = VoiceScores(floats([1, 1, 1]), 0.0)
    assert not normalize_scores("bm25", same).any()
    words = VoiceScores(floats([0, 0, 3]), 1.0)
    fused = fuse_scores({"bm25": words, "model": same}, Mix(bm25=0.5, model=0.5))
    np.testing.assert_allclose(fused, [1e-6, 1e-6, 1.5])


@pytest.mark.parametrize("seed", range(5))
def test_deviation_of_cosines_is_that_of_every_passage(seed):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(300, 12)).astype(np.float32) + 0.3
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    covariance = np.cov(vectors, rowvar=False, bias=True)
    query = vectors[7]
    expected = np.std([float(vector @ query) for vector in vectors])
    assert cosine_deviation(covariance, query) == pytest.approx(expected, rel=1e-4)
    assert cosine_deviation(-covariance, query) == 0


@pytest.mark.parametrize("seed", range(3))
def test_documents_have_the_cosine_of_their_nearest_passage(seed):
    rng = np.random.default_rng(seed)
    owners = np.sort(rng.integers(0, 3 * DEPTH, 900))
    cosines = rng.uniform(-1, 1, 900).astype(np.float32)
    expected = np.zeros(3 * DEPTH)
    for owner, cosine in zip(owners, cosines, strict=True):
        expected[owner] = max(expected[owner], cosine)
    least = sorted(expected)[-DEPTH]
    expected[expected < least] = 0

    def nearest(vector, k):
        best = np.argsort(-cosines)[:k]
        return owners[best], cosines[best]

    np.testing.assert_allclose(best_by_document(owners, cosines, 3 * DEPTH), expected)
    found = vector_scores(nearest, floats([1]), 3 * DEPTH)
    np.testing.assert_allclose(found, expected)


def english(texts) -> Bodies:
    return Bodies(texts, ["en"] * len(texts))


USUAL = LexicalChoice(rules=WordRules(languages=("en",)))


def test_words_are_the_usual_ones_without_tuning_queries():
    assert choose_words(english(["a b", "c d"]), [], ("en",), 0) == USUAL
    assert (USUAL.k1, USUAL.b, USUAL.rules.stems, USUAL.rules.stop_words) == (K1, B, True, True)


def test_words_stay_the_usual_ones_where_nothing_is_better_for_certain():
    bodies = [f"word{n} of its own" for n in range(30)]
    tuning = [Query(f"word{n}", (n,)) for n in range(30)]
    assert choose_words(english(bodies), tuning, ("en",), 0) == USUAL
    # One query alone makes nothing certain.
    bodies = ["it is listed", "it is a list of lists and lists"]
    assert choose_words(english(bodies), [Query("listed", (0,))], ("en",), 0) == USUAL


def test_stems_are_left_where_endings_tell_documents_apart():
    """Each query is a word whose stem is in two documents, the other of which has it twice."""
    names = ["point", "print", "paint", "plant", "count", "mount", "shift", "start"]
    names += ["sound", "train", "learn", "clean", "float", "treat", "climb", "blend"]
    bodies = [f"the {name}ed thing lies here" for name in names]
    bodies += [f"{name}ing {name}ing" for name in names]
    tuning = [Query(f"{name}ed", (n,)) for n, name in enumerate(names)]
    chosen = choose_words(english(bodies), tuning, ("en",), 0)
    assert not chosen.rules.stems and chosen.rules.languages == ("en",)
    assert choose_words(english(bodies), tuning[:1], ("en",), 0) == USUAL


def scored(bm25, encoder=None, model=None, relevant=0):
    """A query of ten documents: the scores of each voice."""
    voices = {"bm25": bm25, "encoder": encoder, "model": model}
    rows = {name: list(scores) for name, scores in voices.items() if scores is not None}
    scorers = {
        name: lambda _, scores=scores: VoiceScores(floats(scores), 1.0)
        for name, scores in rows.items()
    }
    (query,) = score_queries([Query("q", (relevant,))], scorers)
    return query


#: The right document is the first: found, and second best.
RIGHT = [3, 2, *[1] * 8]
WRONG = [2, 3, *[1] * 8]
LOST = [1, *[2] * 9]
#: The right document is far ahead.
AHEAD = [6, 2, *[1] * 8]


def test_scores_of_mixes_are_those_of_a_plain_loop():
    rng = np.random.default_rng(0)
    voices = ("bm25", "encoder", "model")
    queries = []
    for relevant in range(10):
        rows = [rng.random(10) * (rng.random(10) < 0.6) for _ in voices]
        queries.append((rows, relevant))
    tried = [Mix(), Mix(bm25=0.5, encoder=0.5), Mix(bm25=0.2, encoder=0.3, model=0.5)]
    weights = np.array([[getattr(mix, voice) for voice in voices] for mix in tried])
    made = [scored(*rows, relevant=relevant) for rows, relevant in queries]
    found = measure_mixes(made, weights)
    for number, mix in enumerate(tried):
        for column, (rows, relevant) in enumerate(queries):
            total = [0.0] * 10
            for voice, row in zip(voices, rows, strict=True):
                lowest = 0.0 if voice == "bm25" else min(score for score in row if score > 0)
                for document, score in enumerate(row):
                    if score > 0:
                        total[document] += getattr(mix, voice) * (score - lowest)
            others = [score for n, score in enumerate(total) if n != relevant]
            rank = 1 + sum(score >= total[relevant] - 1e-6 for score in others)
            candidates = {n for row in rows for n in range(10) if row[n] > 0} | {relevant}
            rank -= sum(
                total[n] >= total[relevant] - 1e-6 for n in range(10) if n not in candidates
            )
            expected = 1 / np.log2(1 + rank) if rank <= 10 else 0
            assert found[number, column] == pytest.approx(expected, abs=1e-6)


def test_encoder_has_its_usual_share_where_no_question_says_otherwise():
    """Titles, which words find as well, do not move it."""
    queries = [scored(RIGHT, RIGHT) for _ in range(40)]
    chosen = choose_mix(queries, ["title"] * 40, ("bm25", "encoder"), 0)
    assert chosen.mix.encoder == pytest.approx(ENCODER_SHARE)
    assert (chosen.gain, chosen.interval) == (0, (0, 0))


def test_few_questions_move_the_share_little_and_many_move_it_far():
    """Words find every question, the encoder puts another document before it from a share on."""
    questions = [scored([3, 0, *[1] * 8], [1, 3, *[2] * 8]) for _ in range(200)]
    few = choose_mix(questions[:1], ["question"], ("bm25", "encoder"), 0)
    many = choose_mix(questions, ["question"] * 200, ("bm25", "encoder"), 0)
    assert many.mix.encoder < few.mix.encoder <= ENCODER_SHARE
    assert many.gain == 0, "words find them all"


def test_encoder_that_is_worse_for_certain_is_refused_by_titles_too():
    queries = [scored(RIGHT, LOST) for _ in range(60)]
    chosen = choose_mix(queries, ["title"] * 60, ("bm25", "encoder"), 0)
    assert chosen.gain == 0 and chosen.mix.encoder < ENCODER_SHARE / 2


@pytest.mark.parametrize("kind", ["title", "question"])
def test_own_vectors_stay_only_where_they_find_more_for_certain(kind):
    better = [scored(WRONG, model=AHEAD) for _ in range(40)]
    worse = [scored(RIGHT, model=WRONG) for _ in range(40)]
    alike = [scored(RIGHT, model=RIGHT) for _ in range(40)]
    voices = ("bm25", "model")

    def chosen(queries) -> MixChoice:
        return choose_mix(queries, [kind] * len(queries), voices, 0)

    assert chosen(better).mix.model > 0 and chosen(better).interval[0] > 0
    assert chosen(worse).mix == chosen(alike).mix == WORDS_ALONE
    # Of two queries one that finds more is chance.
    assert chosen([better[0], alike[0], worse[0]]).mix == WORDS_ALONE


def test_own_vectors_have_half_at_most():
    """Titles, which they were fitted to, would leave words out."""
    queries = [scored([1, 6, 6, *[1] * 7], model=[6, 2, 4, *[1] * 7]) for _ in range(40)]
    alone = measure_mixes(queries, floats([[0.5, 0.5], [0, 1]]))
    assert (alone[1] > alone[0]).all()
    chosen = choose_mix(queries, ["title"] * 40, ("bm25", "model"), 0)
    assert chosen.mix.model <= MAX_OWN_SHARE == 0.5


def test_beside_an_encoder_titles_say_nothing_of_own_vectors():
    """They were fitted to such pairs."""
    queries = [scored(WRONG, WRONG, AHEAD) for _ in range(40)]
    voices = ("bm25", "encoder", "model")
    titles = choose_mix(queries, ["title"] * 40, voices, 0)
    asked = choose_mix(queries, ["question"] * 40, voices, 0)
    assert titles.mix.model == 0 and titles.mix.encoder > 0
    assert asked.mix.model > 0 and asked.interval[0] > 0


def test_index_that_nothing_was_measured_on_has_the_encoders_usual_share():
    """A handful of documents leaves no tuning queries: the encoder is not left out for that."""
    for voices in (("bm25", "encoder"), ("bm25", "encoder", "model")):
        chosen = choose_mix([], [], voices, 0)
        assert chosen.mix == Mix(bm25=1 - ENCODER_SHARE, encoder=ENCODER_SHARE)
        assert chosen.gain is None
    assert choose_mix([], [], ("bm25", "model"), 0).mix == WORDS_ALONE
