"""Words of documents and queries: what the word index, marks, snippets and exports agree on.

Text is compared in one form: NFKC, casefolded, without points and invisible characters. Words
between spaces are stemmed in the document's language. Scripts without spaces give their characters
and pairs of them; Korean words also give pairs, as particles are glued to them. Names give their
parts and themselves (`torch.nn.CrossEntropyLoss`, `k-means`). C++, C#, F# and .NET are words.

Documents keep their stop words, which queries are searched without: a query of nothing else is
found too.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from farspan.retrieval.languages import detect_language as detect_language
from farspan.retrieval.languages import detect_languages as detect_languages
from farspan.retrieval.scripts import UNSPACED, script_of, script_of_language
from farspan.retrieval.stop_words import stop_words
from farspan.retrieval.word_parts import (
    WordPart,
    fold_letters,
    fold_word,
    is_unspaced,
    locate_units,
    split_token,
    split_units,
    token_pattern,
)

#: Snowball's name of a language by its ISO 639-1 code. Bosnian and Croatian have nearly all of
#: Serbian's endings, Malay of Indonesian's.
SNOWBALL = {
    "ar": "arabic",
    "bs": "serbian",
    "ca": "catalan",
    "cs": "czech",
    "da": "danish",
    "de": "german",
    "el": "greek",
    "en": "english",
    "eo": "esperanto",
    "es": "spanish",
    "et": "estonian",
    "eu": "basque",
    "fa": "persian",
    "fi": "finnish",
    "fr": "french",
    "ga": "irish",
    "hi": "hindi",
    "hr": "serbian",
    "hu": "hungarian",
    "hy": "armenian",
    "id": "indonesian",
    "it": "italian",
    "lt": "lithuanian",
    "ms": "indonesian",
    "nb": "norwegian",
    "ne": "nepali",
    "nl": "dutch",
    "nn": "norwegian",
    "no": "norwegian",
    "pl": "polish",
    "pt": "portuguese",
    "ro": "romanian",
    "ru": "russian",
    "sr": "serbian",
    "st": "sesotho",
    "sv": "swedish",
    "ta": "tamil",
    "tr": "turkish",
    "yi": "yiddish",
}
#: The language of words of a script that no language of the corpus is written in.
FALLBACK = {
    "Latin": "en",
    "Greek": "el",
    "Cyrillic": "ru",
    "Arabic": "ar",
    "Devanagari": "hi",
    "Armenian": "hy",
    "Tamil": "ta",
}
#: What stands for every language of the corpus.
_ANY = "*"
#: Shorter words have no ending to lose.
_MIN_STEMMED_CHARS = 3
#: Snowball takes some stems of these for inflected, as `остров`, `kapı`, `clocher`, and cuts them
#: further than their plurals.
_STEMMED_TWICE = ("el", "es", "fr", "ru", "tr")
#: Finnish stems that change within a word, which Snowball leaves: `saari`, `saare-`; `lähde`,
#: `lähtee-`; `kaivos`, `kaivokse-`. And words in -nen, with -s in other forms.
_FINNISH_STEMS = tuple(
    (re.compile(changed), kept)
    for changed, kept in (("(?<=[iuoaeyäö])se$", "s"), ("e$", "i"), ("d$", "t"), ("ks$", "s"))
)
_FINNISH_NEN = re.compile("nen$")
#: Stop words of a language in a query that show that the query is in it.
_MIN_STOP_WORDS = 2
#: Tokens whose words are kept, of each language, and words whose stems are.
_MAX_CACHED = 1 << 18
#: Rules whose tokens are kept: as many as an index compares, with and without stems.
_MAX_RULES = 4

_DIGIT = re.compile(r"\d")
#: Particles of Korean that stand behind a noun, the longer ones first.
_PARTICLES = re.compile(
    "(?<=.)(에서는|으로는|에게서|이라는|에서|에게|에는|으로|까지|부터|처럼|보다|이나|이라|라는|마다|조차|은|는|이|가|을|를|의"
    "|에|로|와|과|도|만)$"
)


class WordRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a corpus' text becomes words; chosen on tuning queries, kept in the index manifest."""

    #: Words are cut to their stems where Snowball has the language.
    stems: bool = True
    #: Queries are searched without stop words.
    stop_words: bool = True
    #: ISO 639-1 codes of the corpus' languages, the most frequent first.
    languages: tuple[str, ...] = ()


class Match(NamedTuple):
    """A span of a text, from its first character to the one after its last, and the words sought
    that it holds."""

    start: int
    stop: int
    words: frozenset[str]


class _TokenCache(dict[str, tuple[str, ...]]):
    """The words of tokens, read as they are asked for."""

    def __init__(self, read_token: Callable[[str], tuple[str, ...]]) -> None:
        super().__init__()
        self._read_token = read_token

    def __missing__(self, token: str) -> tuple[str, ...]:
        if len(self) >= _MAX_CACHED:
            self.clear()
        terms = self._read_token(token)
        # Runs of scripts without spaces are sentences, which do not come again.
        if not is_unspaced(token):
            self[token] = terms
        return terms


class Words:
    """Texts and queries as words, by the rules of one corpus."""

    def __init__(self, rules: WordRules = WordRules()) -> None:
        self.rules = rules
        self._caches = _token_caches(rules.stems, rules.languages)
        self._languages: dict[str, tuple[str, ...]] = {}

    def of_text(self, text: str, language: str = "") -> list[str]:
        """Return the words of a document, in order.

        A language that the corpus' rules do not name, and words of another script than the
        language's, are read as the corpus' most frequent language of their script.
        """
        cache = self._cache(language if language in self.rules.languages else "")
        terms = map(cache.__getitem__, token_pattern(text.isascii()).findall(text))
        return list(itertools.chain.from_iterable(terms))

    def of_query(self, query: str) -> list[str]:
        """Return the words that a query is searched by, in each language of the corpus; its stop
        words only where there are no others."""
        return self._read_query(query, without_stop_words=self.rules.stop_words)

    def content_of(self, query: str) -> frozenset[str]:
        """Return the words of a query that are marked: its stop words only without others."""
        return frozenset(self._read_query(query, without_stop_words=True))

    def matches(self, text: str, sought: frozenset[str]) -> Iterator[Match]:
        """Yield the spans of words in a text of any language that are among those sought.

        A name is a span if a part of it is sought; of scripts without spaces what is sought alone.
        """
        cache = self._cache(_ANY)
        for match in token_pattern(text.isascii()).finditer(text):
            token = match[0]
            if is_unspaced(token):
                yield from _match_run(token, match.start(), sought)
                continue
            shared = sought.intersection(cache[token])
            if shared:
                yield Match(match.start(), match.end(), shared)

    def _cache(self, language: str) -> _TokenCache:
        cache = self._caches.get(language)
        if cache is None:
            read = functools.partial(self._read_token, language)
            cache = self._caches.setdefault(language, _TokenCache(read))
        return cache

    def _read_token(self, language: str, token: str) -> tuple[str, ...]:
        """Return the words that a document's token is found by."""
        terms: list[str] = []
        for part in split_token(token):
            if part.kind == "word":
                terms += self._stems(part.text, language)
            elif part.kind == "name":
                terms.append(part.text)
            elif part.kind == "hangul":
                noun = _PARTICLES.sub("", part.text)
                terms += dict.fromkeys((noun, *_pairs(part.text)))
            else:
                units = split_units(part.text)
                terms += units
                terms += _pairs(units)
        return tuple(terms)

    def _read_query(self, query: str, *, without_stop_words: bool) -> list[str]:
        tokens = token_pattern(query.isascii()).findall(query)
        parts = list(itertools.chain.from_iterable(map(split_token, tokens)))
        stops = self._stop_words_of(parts)
        terms: list[str] = []
        content: list[str] = []
        for part in parts:
            asked = self._query_terms(part)
            terms += asked
            if part.kind == "run":
                content += [term for term in asked if term not in stops]
            elif part.text not in stops:
                content += asked
        return content if content and without_stop_words else terms

    def _query_terms(self, part: WordPart) -> list[str]:
        """Return the words that a part of a query asks for."""
        if part.kind == "word":
            return self._stems(part.text, _ANY)
        if part.kind == "name":
            return [part.text]
        if part.kind == "hangul":
            noun = _PARTICLES.sub("", part.text)
            return list(dict.fromkeys((noun, *_pairs(noun))))
        units = split_units(part.text)
        return units if len(units) == 1 else _pairs(units)

    def _stems(self, word: str, language: str) -> list[str]:
        """Return the stems of a word in a language, or in all of the corpus' languages."""
        languages = self._languages_of(script_of(word[0]))
        if language != _ANY:
            languages = (language,) if language in languages else languages[:1]
        if not self.rules.stems or not _is_stemmed(word) or not languages:
            return [fold_letters(word)]
        stems = itertools.chain.from_iterable(stems_of(word, code) for code in languages)
        return list(dict.fromkeys(map(fold_letters, stems)))

    def _languages_of(self, script: str) -> tuple[str, ...]:
        """Return the languages that a word of a script may be in, the most frequent first."""
        if script not in self._languages:
            languages = self.rules.languages
            written = [code for code in languages if script_of_language(code) == script]
            if not written and script in FALLBACK:
                written = [FALLBACK[script]]
            self._languages[script] = tuple(written)
        return self._languages[script]

    def _stop_words_of(self, parts: Iterable[WordPart]) -> frozenset[str]:
        """Return the stop words of the languages that a query seems to be in, one for each script.

        That is the language with the most stop words in the query; where they are fewer than two,
        the corpus' most frequent one: `war` alone does not make `war crimes` German.
        """
        texts: dict[str, list[str]] = {}
        for part in parts:
            if part.kind != "name":
                texts.setdefault(script_of(part.text[0]), []).append(part.text)
        stops: frozenset[str] = frozenset()
        for script, words in texts.items():
            if script in UNSPACED or script == "Hangul":
                for language in ("zh", "ja", "ko"):
                    if language in self.rules.languages:
                        stops |= folded_stop_words(language)
                continue
            languages = self._languages_of(script)
            if languages:
                stops |= _likely_stop_words(words, languages)
        return stops


@functools.lru_cache(_MAX_RULES)
def _token_caches(stems: bool, languages: tuple[str, ...]) -> dict[str, _TokenCache]:
    """Return the caches of a corpus' rules by language: an index reads the same tokens many
    times."""
    return {}


def choose_languages(languages: Sequence[str]) -> tuple[str, ...]:
    """Return the languages of a corpus from those of its documents, the most frequent first.

    Languages of fewer than 2 % of the documents are left out: short texts and code are taken for
    all kinds of languages. At most eight remain, as each makes queries longer.
    """
    counts = Counter(filter(None, languages))
    least = 0.02 * counts.total()
    return tuple(code for code, count in counts.most_common(8) if count >= least)


@functools.lru_cache(_MAX_CACHED)
def stems_of(word: str, language: str) -> tuple[str, ...]:
    """Return the stem of a folded word; where two letters remain, which may be another word, also
    the word. It is the word where Snowball does not have the language."""
    stemmer = _stemmer(language)
    stemmed = stemmer().stemWord(word) if stemmer else word
    if language == "fi":
        stemmed = stemmer().stemWord(_FINNISH_NEN.sub("s", word))
        for changed, kept in _FINNISH_STEMS:
            stemmed = changed.sub(kept, stemmed)
    if len(stemmed) == 1 or stemmed in folded_stop_words(language):
        return (word,)
    if len(stemmed) < _MIN_STEMMED_CHARS:
        return (stemmed, word)
    if language in _STEMMED_TWICE:
        again = stemmer().stemWord(stemmed)
        stemmed = again if len(again) >= _MIN_STEMMED_CHARS else stemmed
    return (stemmed,)


@functools.cache
def _stemmer(language: str) -> Any:
    """Return the class of a language's stemmer: its objects hold the word at work, so that threads
    need one each.

    It is the one in Python: `snowballstemmer.stemmer` takes PyStemmer's, of another version, where
    that is installed.
    """
    name = SNOWBALL.get(language)
    if name is None:
        return None
    module = importlib.import_module(f"snowballstemmer.{name}_stemmer")
    return getattr(module, f"{name.title()}Stemmer")


def _is_stemmed(word: str) -> bool:
    return len(word) >= _MIN_STEMMED_CHARS and not _DIGIT.search(word)


@functools.cache
def folded_stop_words(language: str) -> frozenset[str]:
    """Return the stop words of a language in the compared form."""
    return frozenset(map(fold_word, stop_words(language)))


def _likely_stop_words(words: Sequence[str], languages: Sequence[str]) -> frozenset[str]:
    """Return the stop words of the language that a query's words seem to be in."""
    counts = {}
    for language in languages:
        counts[language] = sum(word in folded_stop_words(language) for word in words)
    likely = max(languages, key=counts.__getitem__)
    if counts[likely] < _MIN_STOP_WORDS:
        likely = languages[0]
    return folded_stop_words(likely)


def _pairs(text: Sequence[str]) -> list[str]:
    """Return neighbouring characters, two by two."""
    return list(map("".join, itertools.pairwise(text)))


def _match_run(run: str, offset: int, sought: frozenset[str]) -> Iterator[Match]:
    """Yield the spans of a run without spaces, which stands at `offset`, that hold what is sought.

    Pairs that overlap or touch make one span.
    """
    units = locate_units(run)
    start = stop = 0
    words: set[str] = set()
    for number, (unit, begin, end) in enumerate(units):
        shared = {unit} & sought
        last = end
        if number + 1 < len(units):
            pair = unit + units[number + 1][0]
            if pair in sought:
                shared.add(pair)
                last = units[number + 1][2]
        if not shared:
            continue
        if words and begin > stop:
            yield Match(offset + start, offset + stop, frozenset(words))
            words.clear()
        if not words:
            start = begin
        words |= shared
        stop = last
    if words:
        yield Match(offset + start, offset + stop, frozenset(words))
