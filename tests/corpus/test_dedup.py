"""Near duplicates against a brute-force Jaccard over word triples, on random corpora with planted
copies."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest

from farspan.corpus import dedup
from farspan.corpus.documents import write_documents
from farspan.domain.corpus import Document


def triples(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


def true_jaccard(a: str, b: str) -> float:
    one = triples(a)
    two = triples(b)
    return len(one & two) / len(one | two)


def planted(seed: int, documents: int = 60) -> list[str]:
    """Random texts, half of them copies of earlier ones with a share of their words changed."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(400)]
    texts: list[str] = []
    for _ in range(documents):
        if texts and rng.random() < 0.5:
            copy = rng.choice(texts).split()
            for _ in range(rng.randrange(1 + len(copy) // 12)):
                copy[rng.randrange(len(copy))] = rng.choice(words)
            texts.append(" ".join(copy).upper() if rng.random() < 0.2 else " ".join(copy))
        else:
            texts.append(" ".join(rng.choices(words, k=rng.randrange(3, 120))))
    return texts


def signed(texts: list[str], folder: Path, shards: int = 3) -> dedup.Shards:
    folder.mkdir(exist_ok=True)
    stems = []
    for number, part in enumerate(np.array_split(np.array(texts, object), shards)):
        stems.append(folder / f"{number:05}")
        write_documents(
            stems[-1].with_suffix(".docs"),
            (Document(title="", text=text, origin="") for text in part),
        )
        dedup.sign(stems[-1])
    return dedup.Shards(stems)


@pytest.mark.parametrize("seed", range(12))
def test_clusters_are_the_connected_components_of_the_brute_force_graph(
    seed: int, tmp_path: Path
) -> None:
    texts = planted(seed)
    expected = list(range(len(texts)))
    for i, j in itertools.combinations(range(len(texts)), 2):
        if true_jaccard(texts[i], texts[j]) >= dedup.THRESHOLD and expected[i] != expected[j]:
            low, high = sorted((expected[i], expected[j]))
            expected = [low if e == high else e for e in expected]
    assert len(set(expected)) < len(texts)
    assert dedup.find_duplicate_clusters(signed(texts, tmp_path)).tolist() == expected


def test_jaccard_is_exact_for_short_and_close_for_long_documents() -> None:
    rng = random.Random(1)
    for length, tolerance in ((40, 0.0), (1500, 0.0), (30_000, 0.02)):
        words = [f"w{rng.randrange(10**6)}" for _ in range(length)]
        changed = [w if rng.random() > 0.03 else "x" for w in words] + words[: length // 20]
        a = " ".join(words)
        b = " ".join(changed)
        found = dedup.jaccard(
            *(dedup.shingle_hashes(text)[: dedup.MAX_SHINGLES] for text in (a, b))
        )
        assert abs(found - true_jaccard(a, b)) <= tolerance


def test_long_near_duplicates_are_found_across_shards(tmp_path: Path) -> None:
    rng = random.Random(2)
    words = [f"w{rng.randrange(10**6)}" for _ in range(20_000)]
    near = [*words[:10_000], "changed", *words[10_001:], *words[:500]]
    other = [f"w{rng.randrange(10**6)}" for _ in range(20_000)]
    shards = signed([" ".join(words), " ".join(other), " ".join(near)], tmp_path)
    assert dedup.find_duplicate_clusters(shards).tolist() == [0, 1, 0]


def test_texts_without_words_or_spaces_are_compared_too(tmp_path: Path) -> None:
    chinese = "".join(chr(0x4E00 + i * 7 % 5000) for i in range(300))
    texts = ["!!! ???", "!!! ???", "--- ###", chinese, chinese[:150] + "一" + chinese[151:]]
    assert dedup.find_duplicate_clusters(signed(texts, tmp_path, 1)).tolist() == [0, 0, 2, 3, 3]
