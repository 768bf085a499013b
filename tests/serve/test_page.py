"""The page in a real browser: types, filters, opens, pages, waits and fails, with the keyboard
alone and on a phone."""

from __future__ import annotations

import json

import pytest

from tests.serve import chromium
from tests.serve.conftest import Held
from tests.serve.library import NASTY
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(
    chromium.found() is None, reason="needs chromium: apt-get install chromium"
)

#: Elements that stick out of the window to the right.
SPILLS = """[...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && !e.closest(".unseen, .skip")
  && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + "." + e.className)"""  # noqa: E501
#: Text whose contrast with what is behind it is below 4.5 (3 for what is large).
FAINT = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0.5) return c; } return [255, 255, 255]; };
  const texts = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && !e.closest("[disabled]")
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && !e.closest(".unseen, .skip"));
  return texts.map((e) => { const s = getComputedStyle(e), [a, b] = [light(rgb(s.color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), large = parseFloat(s.fontSize) >= 18.6;
    return ratio < (large ? 3 : 4.5) && `${e.tagName}.${e.className} ${ratio.toFixed(2)} ${e.textContent.slice(0, 30)}`;
  }).filter(Boolean);
})()"""  # noqa: E501


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser, server):
    """The page as it is first seen; the test may leave no complaint in the console."""
    # The page before may still ask a server that has ended: it is left first.
    browser.go("about:blank")
    browser.until("location.href === 'about:blank'")
    browser.complaints.clear()
    browser.show()
    browser.go(f"{server.url}/")
    browser.until("document.querySelector('.begin li')")
    yield browser
    assert browser.complaints == []


def ask(page: chromium.Browser, words: str) -> None:
    page.press("/")
    page.until("document.activeElement.id === 'query'")
    page.run("document.activeElement.select()")
    page.type(words)
    page.press("Enter")
    page.until(
        f"document.title.startsWith({json.dumps(words)}) && document.querySelector('.hit, .empty')"
    )


def focused(page: chromium.Browser) -> str:
    return str(page.run("document.activeElement.innerText || document.activeElement.id"))


def titles(page: chromium.Browser) -> list[str]:
    return page.run("[...document.querySelectorAll('.hit .open')].map((e) => e.innerText)")


def test_page_begins_with_the_corpus_summary_and_example_passages(page):
    assert page.run("document.title") == "papers · farspan"
    assert "29 documents" in page.text("#about") and "llama-like" in page.text("#about")
    assert page.run("document.activeElement.id") == "query"
    assert page.run("document.getElementById('report').hidden") is False
    page.click(".begin .open")
    page.until("document.querySelector('.near')")
    assert page.text("#passage-title") == "The Rhine source"


def test_a_search_shows_passages_with_their_marks_place_and_reasons(page):
    ask(page, "rhine barge")
    assert page.text("#status").startswith("1 to 10 of 24 documents, ranked by words")
    assert titles(page)[0] == "The Rhine mouth"
    assert page.text(".place") == "rivers/rhine.md, line 13 · Rivers of Europe › Rhine"
    assert page.text(".also") == (
        "also in old/1.md, line 1; old/2.md, line 2; old/3.md, line 3 and 2 more"
    )
    marks = page.run(
        "[...document.querySelector('.excerpt').querySelectorAll('mark')].map((e) => e.innerText)"
    )
    assert {mark.lower() for mark in marks} == {"rhine", "barge"}
    assert "words 4.00" in page.text(".why") and "vector 0." in page.text(".why")


def test_pages_turn_and_the_address_follows(page):
    ask(page, "river")
    first = titles(page)
    page.click("#after")
    page.until("document.querySelector('#pages').innerText.startsWith('11 to')")
    second = titles(page)
    assert len(first) == len(second) == 10 and not {*first} & {*second}
    assert "offset=10" in page.run("location.search")
    page.run("history.back()")
    page.until("document.querySelector('#pages').innerText.startsWith('1 to')")
    assert titles(page) == first and page.run("document.getElementById('before').disabled")


def test_filters_are_set_from_a_result_and_by_name_and_taken_away(page):
    ask(page, "river")
    page.run(
        "[...document.querySelectorAll('.hit .chip')].find((e) => e.innerText === 'kind "
        "essay').click()"
    )
    page.until("document.querySelector('#status').innerText.includes('12 documents')")
    assert page.text("#filters") == "kind essay" and "kind=essay" in page.run("location.search")
    page.click("#filters .chip")
    page.until("document.querySelector('#status').innerText.includes('24 documents')")
    page.click("#refine summary")
    page.run(
        "document.getElementById('field').value = 'kind'; document.getElementById('value').value = "
        "'note'"
    )
    page.run("document.getElementById('filter').requestSubmit()")
    page.until("document.querySelector('#status').innerText.includes('12 documents')")
    page.run(
        "const s = document.getElementById('system'); s.value = 'model'; s.dispatchEvent(new "
        "Event('change'))"
    )
    page.until("document.querySelector('#status').innerText.includes('ranked by vectors')")


def test_nothing_found_offers_to_search_without_filters(page, server):
    page.go(f"{server.url}/?q=barge&lang=he")
    page.until("document.querySelector('.empty')")
    assert "Nothing found for “barge”" in page.text(".empty")
    page.click(".empty button")
    page.until("document.querySelector('.hit')")
    ask(page, "zzzz")
    assert page.run("document.querySelector('.empty button')") is None


def test_a_query_of_unknown_words_says_so(page):
    ask(page, "zzzz")
    assert "No word of it is in the documents." in page.text(".empty")
    assert "no word of the query is in the documents" in page.text("#status")


def test_the_key_that_a_hint_names_is_not_hinted_at_while_it_is_a_character(page):
    """A query may begin with the key: paths do."""
    assert page.run("document.activeElement.id") == "query"
    assert page.run("document.querySelector('.slash').checkVisibility()") is False
    page.type("/etc")
    assert page.run("document.getElementById('query').value") == "/etc"
    page.run("document.activeElement.blur()")
    assert page.run("document.querySelector('.slash').checkVisibility()") is True


def test_a_passage_opens_leads_to_others_and_closes(page):
    ask(page, "danube")
    page.click(".open")
    page.until("document.querySelectorAll('.near li').length === 5")
    assert "A barge takes grain" in page.text(".whole") and page.text("#passage-place").startswith(
        "rivers/danube.md"
    )
    first = page.text("#passage-title")
    page.click(".near .open")
    page.until(
        f"document.querySelector('#passage-title').innerText !== {first!r} && "
        "document.querySelector('.near')"
    )
    page.click("#back")
    page.until(f"document.querySelector('#passage-title').innerText === {first!r}")
    page.press("Escape")
    page.until("!document.getElementById('passage').open")
    assert focused(page) == first


def test_the_keyboard_is_enough(page):
    ask(page, "river water")
    page.press("ArrowDown")
    assert focused(page) == titles(page)[0]
    page.press("ArrowDown", "ArrowDown", "ArrowUp")
    assert focused(page) == titles(page)[1]
    outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.press("Enter")
    page.until("document.getElementById('passage').open && document.querySelector('.near')")
    page.press("Tab")
    page.press("Escape")
    page.until("!document.getElementById('passage').open")
    assert focused(page) == titles(page)[1]
    page.press("Escape")
    assert focused(page) == "query"
    # Every control can be reached: what Tab comes by, from the first element on.
    page.run("document.activeElement.blur()")
    reached = set()
    for _ in range(90):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id"))
    assert {"query", "report", "after", "prompt", "tokens", "temperature"} <= reached


def test_topics_narrow_the_search_and_can_be_taken_away(page):
    ask(page, "river heron")
    page.until("document.querySelectorAll('.topic').length > 1")
    whole = page.text("#status")
    page.click(".topic")
    page.until(f"document.querySelector('#status').innerText !== {whole!r}")
    assert "topic=0" in page.run("location.search")
    assert page.run("document.querySelector('.topic').getAttribute('aria-pressed')") == "true"
    name = page.text(".topic b")
    assert page.text("#filters") == f"topic {name}"
    page.click(".topic")
    page.until(f"document.querySelector('#status').innerText === {whole!r}")
    assert page.run("document.querySelector('.topic').getAttribute('aria-pressed')") == "false"
    page.run("history.back()")
    page.until("document.querySelector('.topic[aria-pressed=true]')")
    page.click("#filters .chip")
    page.until("!document.querySelector('.topic[aria-pressed=true]')")


def test_topic_without_words_lists_its_documents(page):
    page.until("document.querySelector('.topic')")
    count = int(page.text(".topic").split()[-1])
    page.click(".topic")
    page.until(f"document.querySelector('.start h2')?.innerText === '{count} documents'")
    assert page.run("document.querySelectorAll('.begin li').length") == count


def test_model_generates_text_from_a_passage_prompt(page):
    ask(page, "volga")
    page.click(".open")
    page.until("document.querySelector('.actions')")
    page.click(".actions button")
    page.until("document.activeElement.id === 'prompt'")
    assert page.run("document.getElementById('prompt').value").endswith("salt on its way back.")
    page.run(
        "document.getElementById('tokens').value = 4; "
        "document.getElementById('writing').requestSubmit()"
    )
    page.until("document.querySelector('#written pre')")
    assert page.text("#written pre").endswith("word0 word1 word2 word3")


def test_text_of_documents_is_only_ever_text(page):
    ask(page, "hostile kayak")
    assert f"Hostile {NASTY}" in titles(page)
    page.run(
        "[...document.querySelectorAll('.open')].find((e) => "
        "e.innerText.startsWith('Hostile')).click()"
    )
    page.until("document.querySelector('.near')")
    assert NASTY in page.text(".whole")
    page.press("Escape")
    ask(page, "<script>document.title=1</script>")
    assert (
        page.run(
            "document.querySelectorAll('main img, main script, dialog img, dialog script').length"
        )
        == 0
    )
    assert "farspan" in page.run("document.title")


def test_other_scripts_run_their_own_way_and_marks_follow_emoji(page):
    ask(page, "הנהר")
    assert page.run("getComputedStyle(document.querySelector('.excerpt')).direction") == "rtl"
    assert page.run("getComputedStyle(document.getElementById('query')).direction") == "rtl"
    ask(page, "kayak heron")
    marks = page.run("""[...[...document.querySelectorAll('.hit')].find((e) => e.innerText.includes('emoji'))
      .querySelectorAll('mark')].map((e) => e.innerText)""")  # noqa: E501
    assert marks == ["kayak", "heron"]
    assert "untitled.txt" in titles(page)


def test_page_fits_a_phone_screen_without_overflow(page, server):
    page.show(360, 740)
    for address in ("/", "/?q=kayak", "/?q=river&lang=en", "/?q=zzz", "/?q=heron"):
        page.go(server.url + address)
        page.until("document.querySelector('.begin li, .hit, .empty')")
        page.run("document.getElementById('refine').open = true")
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.run(SPILLS) == []
    page.go(f"{server.url}/?q=kayak")
    page.click(".open")
    page.until("document.querySelector('.near')")
    assert page.run(SPILLS) == [] and page.run(
        "document.getElementById('passage').scrollWidth <= innerWidth"
    )


@pytest.mark.parametrize("dark", [False, True])
def test_both_themes_can_be_read(page, server, dark):
    page.show(dark=dark)
    page.go(f"{server.url}/?q=river&lang=en")
    page.until("document.querySelector('.hit')")
    light = page.run(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    )
    assert (light < 60) == dark
    assert page.run(FAINT) == []
    page.click(".open")
    page.until("document.querySelector('.near')")
    assert page.run(FAINT) == []
    page.run("document.documentElement.style.setProperty('--soft', '#808080')")
    assert page.run(FAINT) != [], "what is faint is found"


def test_page_shows_a_refused_search_with_its_remedy(browser, server):
    browser.show()
    browser.go(f"{server.url}/?q=river&langg=en")
    browser.until("document.querySelector('.failed')")
    told = browser.text(".failed")
    assert "There is no field 'langg'" in told and "filter by lang" in told and "Try again" in told
    # The browser's own word on a request that failed, and nothing of the page's.
    assert all("422" in complaint for complaint in browser.complaints)
    browser.complaints.clear()


def test_page_sends_a_long_search_as_a_body(page, server):
    """In an address it would be above 32 kB."""
    page.run("document.getElementById('query').value = 'danube ' + '🚣'.repeat(1900)")
    title = "é" * 3000
    page.run(f"history.replaceState(null, '', '?title=' + {json.dumps(title)})")
    page.run("document.getElementById('search').requestSubmit()")
    page.until("document.querySelector('.empty')")
    assert len(page.run("location.search")) > 32_000


def test_page_retries_a_busy_server_and_reports_one_that_does_not_answer(browser, start):
    server = start(limits={"searching_waiting": 0, "look_s": 60.0})
    browser.show()
    browser.go(f"{server.url}/")
    browser.until("document.querySelector('.begin li')")
    held = Held(server, "first").wait_until_begun()
    browser.type("danube")
    browser.press("Enter")
    browser.until(
        "document.querySelector('#status').innerText.includes('The server is busy; asking again "
        "in')"
    )
    held.free()
    browser.until("document.querySelector('.hit')")
    held.answer()
    server.process.terminate()
    server.process.wait(LIMIT_S)
    browser.run("document.getElementById('search').requestSubmit()")
    browser.until("document.querySelector('.failed')")
    assert "The server does not answer" in browser.text(".failed")
    assert all("503" in told or "ERR_CONNECTION" in told for told in browser.complaints), (
        browser.complaints
    )
    browser.complaints.clear()


def test_a_browser_enters_with_the_token_and_keeps_it(browser, start):
    server = start(token="a-token-of-24-characters")
    browser.show()
    browser.go(f"{server.url}/")
    assert "wants its token" in browser.text("h1")
    browser.go(f"{server.url}/?token=a-token-of-24-characters&q=danube")
    browser.until("document.querySelector('.hit')")
    assert browser.run("location.search") == "?q=danube" and browser.run("document.cookie") == ""
    browser.go(f"{server.url}/?q=rhine")
    browser.until("document.querySelector('.hit')")
    assert all("401" in told for told in browser.complaints), browser.complaints
    browser.complaints.clear()


def test_the_report_opens(page, server):
    page.go(f"{server.url}/report")
    assert page.run("document.body.innerText").strip() == "it went well"
