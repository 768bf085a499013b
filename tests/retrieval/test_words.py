"""Inflected, decomposed and unspaced words meet; marks lie where a sought word is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.retrieval.names import query_form, spread
from farspan.retrieval.word_parts import MAX_WORD_CHARS
from farspan.retrieval.words import (
    WordRules,
    Words,
    choose_languages,
    detect_language,
    detect_languages,
)

ENGLISH = Words()
#: Of each language what is asked for and what a text has of it.
INFLECTED = {
    "ar": "مكتبة المكتبة, منارة المنارة, قارب القارب, نحلة بالنحلة, مسرح المسرح, كتاب الكتابين",
    "de": "Bibliothek Bibliotheken, Haus Häuser, Leuchtturm Leuchtturms, Schiff Schiffe, "
    "Straße STRASSEN, Garten Gärten, Biene Bienen, Insel Inseln",
    "el": "βιβλίο βιβλίου, ΘΑΛΑΣΣΑ θάλασσες, φάρος φάρου, νησί νησιά, δρόμος ΔΡΟΜΟΙ, πόλη πόλεις",
    "en": "teapot teapots, library libraries, volcano volcanoes, theatre theatres, "
    "stamp stamped, GPU GPUs",
    "fi": "talo talossa, kirja kirjan, majakka majakat, saari saarella, laiva laivat, "
    "kirjasto kirjastoa, kaivos kaivokset, lähde lähteet, nainen naiset",
    "fr": "clocher clochers, théâtre théâtres, journal journaux, abeille abeilles",
    "hi": "किताब किताबें, लड़का लड़के, नाव नावों, हिन्दी हिंदी, पुस्तक पुस्तकों, बाँस बांस",
    "ja": "灯台 古い灯台を見た, 図書館 図書館で, 壁 港の壁のそば, 温泉 温泉に入る, "
    "コンピュータ ｺﾝﾋﾟｭｰﾀです",
    "ko": "등대 등대를, 책 책을, 도서관 도서관에서, 화산 화산은, 온천 온천이, 찻주전자 찻주전자에",
    "ru": "книга книги, маяк маяка, ёлка елки, библиотека библиотеке, остров острова, пчела пчелы",
    "th": "ประภาคาร เราเห็นประภาคารเก่า, ผึ้ง เห็นผึ้งใน, น้ำ น้ํา, ว่าว เรื่องว่าวอยู่",
    "tr": "kitap kitaplar, İstanbul istanbul, ISPARTA Isparta, ev evlerde, kapı kapıları, "
    "ada adalar",
    "zh": "灯塔 看见了灯塔然后, 图书馆 在图书馆里, 墙 墙边, 火山 火山的历史",
}


@pytest.mark.parametrize("language", INFLECTED)
def test_other_forms_of_a_word_are_found(language):
    words = Words(WordRules(languages=("en", language)))
    for pair in INFLECTED[language].split(", "):
        asked, held = pair.split(" ")
        for query, text in ((asked, held), (held, asked)):
            if query == asked or language not in ("ja", "th", "zh"):
                assert {*words.of_query(query)} & {*words.of_text(text, language)}, pair


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("théière", "the\u0301ie\u0300re"),
        ("العَرَبِيَّة", "العربية"),
        ("ﬁnding", "finding"),
        ("co\u00adoperate", "cooperate"),
        ("zero\u200bwidth", "zerowidth"),
        ("ＡＢＣ", "abc"),
        ("C++", "c++"),
        ("ΟΔΟΣ", "οδός"),
        ("pre-trained", "pretraining"),
        ("reader's", "readers"),
        ("l'eau", "eau"),
        ("کتاب\u200cها", "کتاب"),
        ("항구의", "\u1112\u1161\u11bc\u1100\u116e"),
        ("e-mail", "email"),
        ("torch.nn.CrossEntropyLoss", "cross entropy losses"),
        ("ﾊﾟﾝ", "パン"),
    ],
)
def test_forms_of_one_word_meet(one, other):
    assert {*ENGLISH.of_text(one)} & {*ENGLISH.of_query(other)}
    assert {*ENGLISH.of_text(other)} & {*ENGLISH.of_query(one)}


def test_names_are_split_and_kept_whole():
    assert ENGLISH.of_text("torch.nn.CrossEntropyLoss") == [
        *("torch", "nn", "cross", "entropi", "loss"),
        "torch.nn.crossentropyloss",
    ]
    assert Words(WordRules(stems=False)).of_text("HTTPServer _private_name x2Y plain. GPUs") == [
        *("http", "server", "httpserver", "private", "name", "private_name"),
        *("x2", "y", "x2y", "plain", "gpu"),
    ]


def test_names_of_languages_stay_whole():
    for text in ("C++", "C#", "F#", ".NET", "Objective-C"):
        assert "c" not in ENGLISH.of_text(text) and "net" not in ENGLISH.of_text(text)
        assert ENGLISH.of_query(text) == ENGLISH.of_text(text)
    assert ENGLISH.of_text("C") == ["c"]
    assert ".net" in ENGLISH.of_text("ASP.NET")


def test_queries_lose_stop_words_unless_there_are_no_others():
    assert ENGLISH.of_query("what is the port of it") == ["port"]
    assert ENGLISH.of_query("to be or not") == ["to", "be", "or", "not"]
    kept = Words(WordRules(stop_words=False))
    assert kept.of_query("the ports") == ["the", "port"]
    assert kept.content_of("the ports") == {"port"}
    both = Words(WordRules(languages=("en", "de")))
    assert both.of_query("wie ist der Name") == ["name", "nam"]
    assert "war" in both.of_query("war crimes")


def test_a_word_is_stemmed_in_each_language_of_its_script():
    words = Words(WordRules(languages=("de", "ru", "en")))
    for language in ("de", "en"):
        assert {*words.of_text("houses", language)} <= {*words.of_query("houses")}
    # A Latin word of a Russian text is read as the most frequent language of Latin letters.
    assert words.of_text("Häuser", "ru") == words.of_text("Häuser", "de")


PIECES = [
    *("the ports", "港の壁", "กินข้าว", "Straße", "C++", "e\u0301", "ﾊﾟ", "\u200c", "र्", "\ud83d"),
    *("👩\u200d🔬", "도서관에서", "a.b_C", "l'x", "x-y", " ", "\n", "İ", "العَ", "GPUs", "½"),
]
texts = st.text(st.characters(exclude_categories=()))
texts |= st.lists(st.sampled_from(PIECES)).map("".join)


@given(texts, texts)
def test_marks_lie_within_the_text_and_share_a_word_with_the_query(text, query):
    words = Words(WordRules(languages=("en", "ar", "ja", "tr")))
    sought = words.content_of(query)
    end = 0
    for match in words.matches(text, sought):
        assert end <= match.start < match.stop <= len(text)
        assert match.words and match.words <= sought
        end = match.stop
    for word in (*words.of_text(text, "ar"), *words.of_query(query)):
        assert word and len(word) <= 4 * MAX_WORD_CHARS
    spread(text)
    query_form(text)
    detect_language(text)


@given(texts)
def test_a_text_holds_what_it_is_asked_by(text):
    words = Words(WordRules(languages=("tr", "hi", "fa")))
    for language in ("tr", "fa", ""):
        assert {*words.of_query(text)} & {*words.of_text(text, language)} or not words.of_query(
            text
        )
    if words.content_of(text):
        assert [*words.matches(text, words.content_of(text))]


def test_marks_of_unspaced_text_hold_what_was_asked_alone():
    text = "昨日わたしたちは谷で図書館を見て、とても嬉しかった。"
    (match,) = ENGLISH.matches(text, ENGLISH.content_of("図書館"))
    assert text[match.start : match.stop] == "図書館"
    halves = "ﾎﾟｽﾄとﾊﾟﾝ"
    (match,) = ENGLISH.matches(halves, ENGLISH.content_of("パン"))
    assert halves[match.start : match.stop] == "ﾊﾟﾝ"


def test_languages_are_detected_by_script_and_letters():
    expected = {
        "en": "The lighthouse stands on the rock by the harbour, and it is old.",
        "de": "Der Leuchtturm steht auf dem Felsen am Hafen und ist schon sehr alt.",
        "fi": "Majakka seisoo kalliolla sataman vieressä, ja se on hyvin vanha rakennus.",
        "tr": "Deniz feneri limanın yanındaki kayanın üzerinde duruyor ve çok eskidir.",
        "ru": "Маяк стоит на скале у гавани, и он очень старый.",
        "uk": "Маяк стоїть на скелі біля гавані, і він дуже старий, як і її мури.",
        "el": "Ο φάρος στέκεται στον βράχο.",
        "ja": "灯台は港のそばの岩の上に立っている。",
        "zh": "灯塔矗立在港口旁边的岩石上。",
        "ko": "등대는 항구 옆 바위 위에 서 있다.",
        "th": "ประภาคารตั้งอยู่บนโขดหิน",
        "hi": "प्रकाशस्तंभ बंदरगाह के पास चट्टान पर खड़ा है और बहुत पुराना है।",
        "ar": "تقف المنارة على الصخرة بجانب الميناء وهي قديمة جدا.",
        "": "1 + 2 = 3",
    }
    assert detect_languages(expected.values()) == list(expected)


def test_languages_of_few_documents_are_left_out():
    languages = ["en"] * 90 + ["de"] * 9 + ["mt", "", ""]
    assert choose_languages(languages) == ("en", "de")
    assert choose_languages(["", ""]) == ()
