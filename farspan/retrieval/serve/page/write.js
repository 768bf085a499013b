// The model's own words after a prompt.

import { ask } from "./api.js";
import { refusal } from "./results.js";
import { at, make } from "./text.js";

//: Characters of a passage that the model goes on from: its end.
const TAIL = 400;
let seed = 0;

export function setUp() {
  at("writing").addEventListener("submit", (event) => { event.preventDefault(); write(); });
}

/** Let it go on from the end of a passage. */
export function writeOn(passage) {
  const tail = Array.from(passage.trimEnd()).slice(-TAIL).join("");
  at("prompt").value = tail;
  at("write").scrollIntoView({ block: "nearest" });
  at("prompt").focus();
}

async function write() {
  const button = at("writing").querySelector("button"), written = at("written");
  const body = {
    prompt: at("prompt").value, tokens: at("tokens").valueAsNumber, temperature: at("temperature").valueAsNumber, seed: seed++,
  };
  button.disabled = true;
  written.replaceChildren(make("p", { className: "soft", textContent: "writing" }));
  try {
    const waiting = (seconds) => written.replaceChildren(make("p", { className: "soft", textContent: `The server is busy; asking again in ${seconds} s.` }));
    const { prompt, text } = await ask("/api/generate", { body, waiting });
    written.replaceChildren(make("pre", { dir: "auto" }, make("b", { textContent: prompt }), text.replace(/\n\s*\n/g, "\n\n")));
  } catch (error) {
    written.replaceChildren(refusal(error.problem ?? { what: String(error), code: "" }, null));
  } finally {
    button.disabled = false;
  }
}
