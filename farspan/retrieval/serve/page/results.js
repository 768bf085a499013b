// A page of results, and what stands there instead: the start, nothing found, a refusal.

import { alsoAt, counted, excerptStart, make, marked, number, place } from "./text.js";

const SYSTEMS = { bm25: "words", model: "vectors of the run's model", encoder: "vectors of the encoder", fused: "words and vectors" };
const KINDS = { title: "titles", asked: "titles asked for", question: "questions", opening: "openings", own: "own queries" };
//: Means over fewer queries than this say nothing (MIN_REPORTED in evaluate.py).
const MIN_REPORTED = 5;

export function hits(answer, offset, { open, filter, fields }) {
  const most = (name) => Math.max(...answer.results.map((result) => result[name] ?? 0), 1e-9);
  const top = { word: most("word_score"), vector: most("vector_score") };
  const list = answer.results.map((result, row) => make("li", { className: "hit" },
    make("h3", {}, make("button", {
      type: "button", className: "open", dir: "auto", textContent: result.title || result.origin,
      onclick: (event) => open(result, event.currentTarget),
    })),
    make("p", { className: "place", dir: "auto", textContent: place(result) }),
    result.copies ? make("p", { className: "place also", dir: "auto", textContent: alsoAt(result, 3) }) : null,
    make("p", { className: "excerpt", dir: "auto" }, ...marked(result, excerptStart(result))),
    make("div", { className: "why", attributes: { "aria-label": `Why this is number ${offset + row + 1}` } },
      score("words", "words", result.word_score, top.word),
      score("vector", "vector", result.vector_score, top.vector),
      chips(result.metadata, fields, filter)),
  ));
  return make("ol", { className: "hits", start: offset + 1 }, ...list);
}

function score(kind, name, value, most) {
  if (value === null || value === undefined) return null;
  const meter = make("meter", { className: kind, min: 0, max: 1, value: Math.max(0, value) / most });
  meter.setAttribute("aria-hidden", "true");
  const title = kind === "words" ? "BM25: how much the words of the query say about the document"
    : "cosine of the query's vector and the passage's";
  return make("span", { className: "score", title }, `${name} ${value.toFixed(2)}`, meter);
}

/** The document's metadata; a click narrows the search to it. */
function chips(metadata, fields, filter) {
  const shown = Object.entries(metadata).filter(([name, value]) => fields.includes(name) && value.length < 80);
  if (!shown.length) return null;
  return make("ul", { className: "chips" }, ...shown.slice(0, 6).map(([name, value]) => make("li", {},
    make("button", {
      type: "button", className: "chip", dir: "auto", title: `only ${name} = ${value}`, onclick: () => filter(name, value),
    }, `${name} `, make("b", { textContent: value })))));
}

/** "12 documents, ranked by words". */
export function told(answer, offset) {
  const shown = answer.results.length;
  const range = answer.total > shown && shown ? `${number(offset + 1)} to ${number(offset + shown)} of ` : "";
  const unknown = answer.unknown_words ? "; no word of the query is in the documents" : "";
  return `${range}${counted(answer.total, "document")}, ranked by ${SYSTEMS[answer.system]}${unknown}`;
}

export function nothing(answer, narrowed, clear) {
  const unknown = answer.unknown_words ? "No word of it is in the documents. " : "";
  return make("div", { className: "empty" },
    make("h2", { dir: "auto", textContent: `Nothing found for “${answer.query}”` }),
    make("p", { textContent: narrowed ? "No document with these filters has such words." : `${unknown}Try other words, or a whole sentence.` }),
    narrowed ? make("button", { type: "button", onclick: clear, textContent: "Search without filters" }) : null);
}

export function start(about, begin, open) {
  const index = about.index, evaluation = index.evaluation;
  const sizes = Object.values(index.sets).map(({ dim }) => number(dim)), tiles = [
    ["Documents", number(index.documents), about.text ? `from ${about.text.source}` : ""],
    ["Passages", number(index.chunks), sizes.length ? `vectors of ${sizes.join(" and ")} numbers` : ""],
  ];
  if (evaluation) {
    for (const [kind, { reported, systems }] of Object.entries(evaluation.kinds)) {
      if (reported < MIN_REPORTED) continue;
      // An index without vectors has words alone.
      const best = systems.fused || systems.bm25;
      tiles.push([`nDCG@10, ${KINDS[kind]}`, best.ndcg_at_10.toFixed(3), `words ${systems.bm25.ndcg_at_10.toFixed(3)}`]);
    }
  }
  return make("div", { className: "start" },
    make("dl", { className: "tiles" }, ...tiles.map(([name, value, more]) => make("div", {},
      make("dt", { textContent: name }), make("dd", { textContent: value }), make("dd", { textContent: more, dir: "auto" })))),
    begin.length ? make("h2", { textContent: "Or begin with one of these" }) : null,
    titles(begin, open));
}

/** The documents of a topic. */
export function listed({ documents, total }, open) {
  const range = total > documents.length ? `The first ${number(documents.length)} of ${counted(total, "document")}` : counted(total, "document");
  return make("div", { className: "start" }, make("h2", { textContent: range }), titles(documents.filter(({ id }) => id), open));
}

const titles = (documents, open) => make("ul", { className: "begin" }, ...documents.map(({ title, origin, id }) => make("li", {},
  make("button", {
    type: "button", className: "open", dir: "auto", textContent: title || origin, onclick: (event) => open(id, event.currentTarget),
  }))));

/** What the server refuses, and why; `again` asks once more. */
export function refusal(problem, again) {
  const rows = [["where", problem.where], ["fact", problem.fact], ["fix", problem.remedy]].filter(([, text]) => text);
  return make("div", { className: "notice failed", attributes: { role: "alert" } },
    make("h2", {}, problem.what.charAt(0).toUpperCase() + problem.what.slice(1),
      make("span", { className: "code", textContent: problem.code })),
    make("dl", {}, ...rows.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text, dir: "auto" })])),
    again ? make("button", { type: "button", onclick: again, textContent: "Try again" }) : null);
}
