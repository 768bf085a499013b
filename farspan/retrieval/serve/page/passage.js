// One passage, whole, with those of other documents that are like it; one leads to the next, and back.

import { ask } from "./api.js";
import { refusal } from "./results.js";
import { alsoAt, at, fill, make, marked, place } from "./text.js";

const trail = [];
let asked = 0;

/** Open a passage: a result, or an id of which the rest is asked for. */
export async function open(passage, from, writeOn) {
  if (!at("passage").open) {
    // It gets the focus back; some browsers give none to a button that is clicked.
    from?.focus({ preventScroll: true });
    trail.length = 0;
    at("passage").showModal();
  }
  const mine = ++asked;
  at("back").hidden = trail.length === 0;
  try {
    const whole = typeof passage === "string" ? await ask(`/api/passages/${passage}`) : passage;
    if (mine !== asked) return;
    show(whole, writeOn);
    await similar(whole, mine, writeOn);
  } catch (error) {
    if (mine !== asked || !error.problem) return;
    at("passage-body").append(refusal(error.problem, null));
  }
}

function show(result, writeOn) {
  at("passage-place").textContent = place({ ...result, headings: [] });
  const headings = result.headings.join(" › ");
  fill(at("passage-body"),
    make("h2", { id: "passage-title", dir: "auto", textContent: result.title || result.origin }),
    headings ? make("p", { className: "soft", dir: "auto", textContent: headings }) : null,
    result.copies ? make("p", { className: "soft also", dir: "auto", textContent: alsoAt(result, 100) }) : null,
    make("p", { className: "whole", dir: "auto" }, ...marked(result)),
    make("div", { className: "actions" },
      make("button", { type: "button", textContent: "Let the model write on", onclick: () => { at("passage").close(); writeOn(result.passage); } }),
      make("button", { type: "button", textContent: "Copy with its place", onclick: (event) => copy(result, event.currentTarget) })),
    make("h3", { textContent: "Similar passages" }),
    make("div", { id: "near", className: "soft", attributes: { "aria-live": "polite" }, textContent: "looking" }),
  );
  at("passage-body").scrollTop = 0;
  at("passage-body").focus();
}

async function similar(result, mine, writeOn) {
  const { results } = await ask(`/api/passages/${result.id}/similar?k=5`);
  if (mine !== asked) return;
  at("near").className = "";
  at("near").replaceChildren(results.length ? make("ol", { className: "near" }, ...results.map((other) => make("li", {},
    make("button", {
      type: "button", className: "open", dir: "auto", textContent: other.title || other.origin,
      onclick: () => { trail.push(result); open(other, null, writeOn); },
    }),
    make("p", { dir: "auto", textContent: `${place(other)} · ${other.score.toFixed(2)}` }),
    make("p", { dir: "auto", textContent: other.text }),
  ))) : make("p", { className: "soft", textContent: "no other document has any" }));
}

async function copy(result, button) {
  try {
    await navigator.clipboard.writeText(`${result.passage.trim()}\n(${result.title}, ${place(result)})`);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser does not allow it";
  }
}

export function setUp(writeOn) {
  at("close").addEventListener("click", () => at("passage").close());
  at("back").addEventListener("click", () => open(trail.pop(), null, writeOn));
  at("passage").addEventListener("click", (event) => { if (event.target === at("passage")) at("passage").close(); });
  at("passage").addEventListener("close", () => { asked++; });
}
