// The passages as points in a plane: pointer and arrow keys go from one to the next.

import { ask } from "./api.js";
import { at, make } from "./text.js";

const LISTED = 100;
const REACH = 18;
//: Of the plane, in pixels; a legend or a point at its edge keeps clear of it.
const MARGIN = 12;
let corpus = null, bounds = null, found = new Set(), chosen = -1, listed = 0, openPassage = () => {}, arrived = () => {};

/** Mark the points of these passages. */
export function highlight(ids) {
  found = new Set(ids);
  draw();
}

/** `open` opens a passage; `come` is told the map, once it is there. */
export function setUp(open, come) {
  openPassage = open;
  arrived = come;
  const canvas = at("plane");
  new IntersectionObserver((entries, observer) => {
    if (entries.some((entry) => entry.isIntersecting)) { observer.disconnect(); load(); }
  }).observe(canvas);
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  canvas.addEventListener("pointermove", (event) => choose(nearestTo(event.offsetX, event.offsetY)));
  canvas.addEventListener("pointerleave", () => choose(-1));
  canvas.addEventListener("blur", () => choose(-1));
  canvas.addEventListener("click", (event) => { choose(nearestTo(event.offsetX, event.offsetY)); openChosen(); });
  canvas.addEventListener("keydown", pressed);
  at("map-list").addEventListener("toggle", () => { if (!listed) more(); });
  at("map-more").addEventListener("click", more);
}

async function load() {
  try {
    corpus = await ask("/api/map", { waiting: () => { at("map-said").textContent = "The server is busy; the map will come."; } });
    bounds = boundsOf(corpus.xy);
    arrived(corpus);
    at("map-said").textContent = corpus.ids.length ? "Passages that are alike lie close together." : "The index has no passages.";
    draw();
    if (at("map-list").open) more();
  } catch (error) {
    at("map-said").textContent = `There is no map: ${error.message}`;
  }
}

/** The least and the largest of each coordinate. */
function boundsOf(points) {
  const bounds = [[Infinity, -Infinity], [Infinity, -Infinity]];
  for (const point of points) {
    point.forEach((value, axis) => { bounds[axis] = [Math.min(bounds[axis][0], value), Math.max(bounds[axis][1], value)]; });
  }
  return bounds;
}

/** Where a point is drawn: the points fill the plane. */
function spot([x, y]) {
  const { clientWidth: width, clientHeight: height } = at("plane"), [[left, right], [low, high]] = bounds;
  const across = (width - 2 * MARGIN) / (right - left || 1), up = (height - 2 * MARGIN) / (high - low || 1);
  return [width / 2 + (x - (left + right) / 2) * across, height / 2 - (y - (low + high) / 2) * up];
}

function draw() {
  const canvas = at("plane"), scale = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(name).trim();
  pen.scale(scale, scale);
  pen.fillStyle = colour("--grid");
  pen.fillRect(0, 0, width, height);
  if (!corpus) return;
  const dot = (row, radius) => {
    pen.beginPath();
    pen.arc(...spot(corpus.xy[row]), radius, 0, 2 * Math.PI);
    pen.fill();
  };
  const hits = [], many = corpus.ids.length > 1000;
  pen.fillStyle = colour("--soft");
  pen.globalAlpha = many ? 0.35 : 0.6;
  corpus.ids.forEach((id, row) => { if (found.has(id)) hits.push(row); else dot(row, many ? 1.7 : 2.2); });
  pen.globalAlpha = 1;
  pen.fillStyle = colour("--val");
  hits.forEach((row) => dot(row, 4.2));
  if (chosen < 0) return;
  pen.strokeStyle = colour("--ink");
  pen.lineWidth = 2;
  pen.beginPath();
  pen.arc(...spot(corpus.xy[chosen]), 7, 0, 2 * Math.PI);
  pen.stroke();
}

function nearestTo(x, y) {
  let best = -1, least = REACH ** 2;
  corpus?.xy.forEach((point, row) => {
    const [px, py] = spot(point), distance = (px - x) ** 2 + (py - y) ** 2;
    if (distance < least) [best, least] = [row, distance];
  });
  return best;
}

/** The nearest point in a direction: steps aside count double. */
function nextTo(from, dx, dy) {
  const [x, y] = spot(corpus.xy[from]);
  let best = from, least = Infinity;
  corpus.xy.forEach((point, row) => {
    const [px, py] = spot(point), along = (px - x) * dx + (py - y) * dy;
    const aside = Math.abs((px - x) * dy) + Math.abs((py - y) * dx), cost = along + 2 * aside;
    if (row !== from && along > 0.5 && cost < least) [best, least] = [row, cost];
  });
  return best;
}

function choose(row) {
  if (row === chosen) return;
  chosen = row;
  const tip = at("map-tip");
  tip.hidden = row < 0;
  if (row >= 0) {
    const [x, y] = spot(corpus.xy[row]), left = x > at("plane").clientWidth / 2;
    tip.textContent = corpus.titles[row] || corpus.origins[row];
    tip.dir = "auto";
    tip.style.left = left ? "auto" : `${x + 12}px`;
    tip.style.right = left ? `${at("plane").clientWidth - x + 12}px` : "auto";
    const low = y > at("plane").clientHeight / 2;
    tip.style.top = low ? "auto" : `${y - 6}px`;
    tip.style.bottom = low ? `${at("plane").clientHeight - y - 6}px` : "auto";
  }
  draw();
}

function pressed(event) {
  const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
  if (!corpus?.ids.length || (!way && event.key !== "Enter")) return;
  event.preventDefault();
  if (!way) return openChosen();
  const first = corpus.ids.findIndex((id) => found.has(id));
  choose(chosen < 0 ? Math.max(first, 0) : nextTo(chosen, ...way));
  at("map-said").textContent = `${corpus.titles[chosen]}, ${corpus.origins[chosen]}`;
}

function openChosen() {
  if (chosen >= 0) openPassage(corpus.ids[chosen], at("plane"));
}

function more() {
  if (!corpus) return;
  const next = corpus.ids.slice(listed, listed + LISTED);
  at("map-titles").append(...next.map((id, row) => make("li", {}, make("button", {
    type: "button", className: "open", dir: "auto", textContent: corpus.titles[listed + row] || corpus.origins[listed + row],
    onclick: (event) => openPassage(id, event.currentTarget),
  }))));
  listed += next.length;
  at("map-more").hidden = listed >= corpus.ids.length;
}
