// Values under the pointer, read from the points that each figure offers as CSV. Arrow keys move from point to point.
for (const figure of document.querySelectorAll("figure:not(.chartless)")) {
  const csv = figure.querySelector("a[download$='.csv']").getAttribute("href");
  const cells = (line) => [...line.matchAll(/(?:^|,)("(?:[^"]|"")*"|[^,]*)/g)].map((m) => m[1].replace(/^"|"$/g, "").replaceAll('""', '"'));
  const [names, ...rows] = decodeURIComponent(csv.slice(csv.indexOf(",") + 1)).trim().split("\n").map(cells);
  const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip"), cursor = svg.querySelector(".cursor");
  const { low, high, left, right, log } = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, Number(v)]));
  const flat = (value) => log ? Math.log(value) : value;
  const pixel = (row) => left + (flat(row[0]) - flat(low)) / (flat(high) - flat(low)) * (right - left);
  let at = -1;
  const show = (index) => {
    at = Math.max(0, Math.min(rows.length - 1, index));
    const x = pixel(rows[at]), box = svg.viewBox.baseVal;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.display = "";
    const say = (v) => Number(v).toLocaleString("en", Math.abs(v) < 0.01 ? { notation: "scientific", maximumSignificantDigits: 3 } : { maximumSignificantDigits: 4 });
    tip.textContent = names.map((name, i) => rows[at][i] && `${name}  ${i ? say(rows[at][i]) : Number(rows[at][0]).toLocaleString("en")}`).filter(Boolean).join("\n");
    tip.hidden = false;
    const place = svg.offsetLeft || svg.getBoundingClientRect().left - figure.getBoundingClientRect().left;
    const spot = place + x / box.width * svg.getBoundingClientRect().width;
    tip.style.left = `${spot + (x > box.width / 2 ? -tip.offsetWidth - 12 : 12)}px`;
  };
  const hide = () => { tip.hidden = true; cursor.style.display = "none"; };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    let first = 0, last = rows.length - 1;
    while (first < last) {
      const middle = (first + last) >> 1;
      if (pixel(rows[middle]) < x) first = middle + 1; else last = middle;
    }
    show(first && x - pixel(rows[first - 1]) < pixel(rows[first]) - x ? first - 1 : first);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { event.preventDefault(); show(at + step); }
  });
}
