// Groups of documents that are alike, as buttons: one narrows the search to its documents.

import { ask } from "./api.js";
import { at, make, number } from "./text.js";

let chosen = null, choose = () => {};

/** `pick` is called with the number of a topic, or with null to search all of them. */
export async function setUp(pick) {
  choose = pick;
  try {
    const { topics } = await ask("/api/topics", { waiting: () => say("The server is busy; the topics will come.") });
    say(topics.length ? "" : "Too few documents to be grouped.");
    at("topic-list").replaceChildren(...topics.map(button));
    mark(chosen);
  } catch (error) {
    say(`There are no topics: ${error.message}`);
  }
}

function button({ number: topic, name, documents }) {
  return make("li", {}, make("button", {
    type: "button", className: "chip topic", dir: "auto",
    onclick: () => choose(chosen === topic ? null : topic),
    attributes: { "aria-pressed": "false", "data-topic": topic },
  }, make("b", { textContent: name }), ` ${number(documents)}`));
}

/** Show which topic the search is narrowed to; null is none. */
export function mark(topic) {
  chosen = topic;
  for (const each of document.querySelectorAll(".topic")) {
    each.setAttribute("aria-pressed", String(Number(each.dataset.topic) === topic));
  }
}

/** The name of a topic, or its number while the names are not there. */
export const nameOf = (topic) => document.querySelector(`.topic[data-topic="${topic}"] b`)?.textContent ?? `number ${topic}`;

const say = (text) => { at("topics-said").textContent = text; };
