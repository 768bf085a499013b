// Elements and words. Text of documents only ever becomes text nodes.

export const at = (id) => document.getElementById(id);

/** An element with properties, attributes (in `aria` and `attributes`), listeners (`on...`) and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "attributes") for (const [key, text] of Object.entries(value)) element.setAttribute(key, text);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Put children in the place of those that there are; null is none. */
export const fill = (element, ...children) => element.replaceChildren(...children.filter((child) => child !== null));

export const number = (value) => value.toLocaleString("en-US");
export const counted = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;

export function bytes(value) {
  const step = value < 1e3 ? 0 : Math.min(3, Math.floor(Math.log10(value) / 3));
  return `${Number((value / 1000 ** step).toPrecision(3))} ${["B", "kB", "MB", "GB"][step]}`;
}

/** Where a passage stands: file, page, line, and the headings above it. */
export function place(result) {
  const where = [result.origin];
  if (result.page) where.push(`page ${number(result.page)}`);
  if (result.line) where.push(`line ${number(result.line)}`);
  const headings = result.headings.join(" › ");
  return headings ? `${where.join(", ")} · ${headings}` : where.join(", ");
}

/** Where else exactly this text stands: the first places, and how many more. */
export function alsoAt(result, most) {
  const shown = (result.also ?? []).slice(0, most);
  if (!shown.length) return "";
  const more = result.copies - shown.length;
  return `also in ${shown.map((one) => place({ ...one, headings: [] })).join("; ")}${more > 0 ? ` and ${number(more)} more` : ""}`;
}

/** The passage with its marks. They count characters as Python does: an emoji is one. `from`: the first to show. */
export function marked(result, from = 0) {
  const characters = Array.from(result.passage), nodes = [];
  const text = (start, stop) => characters.slice(start, stop).join("");
  let shown = from;
  for (const [start, stop] of result.marks) {
    if (start < shown) continue;
    nodes.push(text(shown, start), make("mark", { textContent: text(start, stop) }));
    shown = stop;
  }
  nodes.push(text(shown, characters.length));
  if (from) nodes.unshift("… ");
  return nodes;
}

/** The character that an excerpt begins with: a word or two before the first mark. */
export function excerptStart(result) {
  const first = result.marks.length ? result.marks[0][0] : 0;
  if (first < 120) return 0;
  const before = Array.from(result.passage).slice(0, first - 40).join("");
  const blank = before.search(/\s\S*$/u);
  return blank < 0 ? 0 : Array.from(before.slice(0, blank + 1)).length;
}
