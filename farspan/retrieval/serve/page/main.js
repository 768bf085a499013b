// The search page: what is asked stands in the address, so that back, forward and reload work.

import { ask } from "./api.js";
import * as passage from "./passage.js";
import * as results from "./results.js";
import { at, bytes, counted, make, number } from "./text.js";
import * as topics from "./topics.js";
import { setUp as setUpWriting, writeOn } from "./write.js";

const PAGE = 10;
const BEGIN_WITH = 8;
const TOPIC_DOCUMENTS = 50;
const OWN = ["q", "k", "offset", "system", "topic"];
//: A search that is quicker shows no sign of being busy.
const PATIENCE_MS = 150;
const seen = new Map();
let about = null, running = null, choice = [];

const state = () => new URLSearchParams(location.search);
const filters = (query = state()) => [...query].filter(([name]) => !OWN.includes(name));
const topic = (query = state()) => /^\d+$/.test(query.get("topic") ?? "") ? Number(query.get("topic")) : null;
const offset = (query = state()) => Math.max(0, Math.trunc(query.get("offset")) || 0);
const open = (result, from) => passage.open(result, from, writeOn);

/** Ask for something else, from the first result on unless `change` says otherwise. */
function go(change) {
  const query = state();
  query.delete("offset");
  change(query);
  history.pushState(null, "", `?${query}`);
  return search();
}

//: A field that is called like a parameter of a search has this before it.
const PREFIX = "where.";
const addFilter = (name, value) => go((query) => query.set(OWN.includes(name) ? PREFIX + name : name, value));
const clearFilters = () => go((query) => [...filters(query), ["topic"]].forEach(([name]) => query.delete(name)));
const setTopic = (number) => go((query) => number === null ? query.delete("topic") : query.set("topic", number));

async function search({ focus = false } = {}) {
  running?.abort();
  running = new AbortController();
  const mine = running, query = state(), words = query.get("q") ?? "";
  at("query").value = words;
  at("system").value = query.get("system") ?? "";
  showFilters();
  if (!words.trim()) return showStart();
  const busy = setTimeout(() => sayBusy("searching"), PATIENCE_MS);
  const waiting = (seconds) => {
    clearTimeout(busy);
    sayBusy(`The server is busy; asking again in ${counted(seconds, "second")}.`);
  };
  try {
    const answer = await ask("/api/search", { body: formOf(query), signal: mine.signal, waiting });
    if (mine !== running) return;
    show(answer);
    if (focus) titles()[0]?.focus();
  } catch (error) {
    if (mine === running && error.name !== "AbortError") fail(error);
  } finally {
    clearTimeout(busy);
    if (mine === running) at("results").removeAttribute("aria-busy");
  }
}

/** The search that an address stands for. It goes as a body: an address has bounds. */
function formOf(query) {
  const where = filters(query).map(([name, value]) => `${name.startsWith(PREFIX) ? name.slice(PREFIX.length) : name}=${value}`);
  return {
    q: query.get("q"), k: PAGE, offset: offset(query),
    system: query.get("system") || null, where, topic: topic(query),
  };
}

function sayBusy(text) {
  at("results").setAttribute("aria-busy", "true");
  say(text);
}

const say = (text) => { at("status").textContent = text; };

function show(answer) {
  learn(answer.results);
  document.title = `${answer.query} · ${document.querySelector("h1").textContent} · farspan`;
  say(results.told(answer, offset()));
  const fields = about?.fields ?? [];
  at("found").replaceChildren(answer.results.length
    ? results.hits(answer, offset(), { open, filter: addFilter, fields })
    : results.nothing(answer, filters().length > 0 || topic() !== null, clearFilters));
  const first = offset(), last = first + answer.results.length;
  at("pager").hidden = answer.total <= PAGE && !first;
  at("before").disabled = first === 0;
  at("after").disabled = last >= answer.total;
  at("pages").textContent = answer.results.length ? `${number(first + 1)} to ${number(last)} of ${number(answer.total)}` : "";
}

function fail(error) {
  say("");
  at("pager").hidden = true;
  const problem = error.problem ?? { what: "the page made a mistake", code: error.name, where: "", fact: error.message, remedy: "reload it" };
  at("found").replaceChildren(results.refusal(problem, () => search()));
}

function showStart() {
  say("");
  document.title = `${document.querySelector("h1").textContent} · farspan`;
  at("pager").hidden = true;
  at("results").removeAttribute("aria-busy");
  at("found").replaceChildren(about ? results.start(about, choice, open) : "");
  if (topic() !== null) showTopic(topic());
}

/** The documents of a topic, while nothing is searched for. */
async function showTopic(number) {
  try {
    const page = await ask(`/api/documents?${new URLSearchParams({ topic: number, k: TOPIC_DOCUMENTS })}`);
    if (number === topic() && !at("query").value.trim()) at("found").replaceChildren(results.listed(page, open));
  } catch (error) {
    if (number === topic()) fail(error);
  }
}

function showFilters() {
  const chips = filters().map(([name, value]) => make("li", {}, make("button", {
    type: "button", className: "chip", dir: "auto", onclick: () => go((query) => query.delete(name)),
    attributes: { "aria-label": `Remove the filter ${name} = ${value}` },
  }, `${name} `, make("b", { textContent: value }))));
  const chosen = topic();
  topics.mark(chosen);
  if (chosen !== null) chips.push(make("li", {}, make("button", {
    type: "button", className: "chip", dir: "auto", onclick: () => setTopic(null),
    attributes: { "aria-label": `Remove the topic ${topics.nameOf(chosen)}` },
  }, "topic ", make("b", { textContent: topics.nameOf(chosen) }))));
  at("filters").replaceChildren(...chips);
  at("filters").hidden = chips.length === 0;
}

/** Values of fields that results had: what a filter may be. */
function learn(found) {
  for (const result of found) {
    for (const [name, value] of Object.entries({ title: result.title, origin: result.origin, ...result.metadata })) {
      if (!seen.has(name)) seen.set(name, new Set());
      if (seen.get(name).size < 50) seen.get(name).add(value);
    }
  }
  propose();
}

const propose = () => at("values").replaceChildren(
  ...[...(seen.get(at("field").value) ?? [])].map((value) => make("option", { value })));

const titles = () => [...document.querySelectorAll("#found .open")];
const typing = (element) => element.matches("input, textarea, select");

function pressed(event) {
  if (at("passage").open || event.altKey || event.ctrlKey || event.metaKey) return;
  const target = event.target, all = titles(), row = all.indexOf(target);
  if (event.key === "/" && !typing(target)) {
    event.preventDefault();
    at("query").select();
    at("query").focus();
  } else if (event.key === "Escape" && row >= 0) {
    at("query").focus();
  } else if (event.key === "ArrowDown" && (row >= 0 || target === at("query")) && all.length) {
    event.preventDefault();
    all[Math.min(row + 1, all.length - 1)].focus();
  } else if (event.key === "ArrowUp" && row >= 0) {
    event.preventDefault();
    (row ? all[row - 1] : at("query")).focus();
  }
}

async function learnAbout() {
  try {
    about = await ask("/api/about");
  } catch (error) {
    return fail(error);
  }
  const text = about.text ? `, ${bytes(about.text.bytes)} of text` : "", model = about.model ? ` · ${about.model.line}` : "";
  at("about").textContent = `${counted(about.index.documents, "document")}${text}${model}`;
  at("report").hidden = !about.report;
  at("write").hidden = !about.model;
  at("refine").querySelector("form").hidden = about.fields.length === 0;
  at("field").replaceChildren(...about.fields.map((name) => make("option", { value: name, textContent: name })));
  at("tokens").max = about.limits.tokens;
  if (about.trouble) {
    at("trouble").textContent = `There is a newer index, which cannot be opened: ${about.trouble.fact}. ${about.trouble.remedy}`;
    at("trouble").hidden = false;
  }
}

function setUp() {
  at("search").addEventListener("submit", (event) => {
    event.preventDefault();
    go((query) => query.set("q", at("query").value));
    scrollTo({ top: 0 });
  });
  at("filter").addEventListener("submit", (event) => {
    event.preventDefault();
    addFilter(at("field").value, at("value").value);
    at("value").value = "";
  });
  at("field").addEventListener("change", propose);
  at("system").addEventListener("change", () => go((query) => at("system").value ? query.set("system", at("system").value) : query.delete("system")));
  const turn = (by) => go((query) => query.set("offset", Math.max(0, by))).then(() => at("results").scrollIntoView());
  at("before").addEventListener("click", () => turn(offset() - PAGE));
  at("after").addEventListener("click", () => turn(offset() + PAGE));
  addEventListener("popstate", () => search());
  addEventListener("keydown", pressed);
  passage.setUp(writeOn);
  setUpWriting();
}

/** Some documents to begin with, evenly over the index. */
async function learnChoice() {
  const page = (more) => ask(`/api/documents?${new URLSearchParams(more)}`);
  const step = Math.max(1, Math.floor(about.index.documents / BEGIN_WITH));
  const offsets = [...Array(BEGIN_WITH).keys()].map((row) => row * step).filter((row) => row < about.index.documents);
  try {
    const pages = await Promise.all(offsets.map((row) => page({ k: 1, offset: row })));
    choice = pages.flatMap(({ documents }) => documents).filter(({ id }) => id);
    if (at("found").querySelector(".start")) showStart();
  } catch (error) {
    if (!error.problem) throw error;
  }
}

setUp();
await learnAbout();
await search();
if (about) await Promise.all([learnChoice(), topics.setUp(setTopic).then(showFilters)]);
