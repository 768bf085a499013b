// What a bar, a cross or a dot says, under the pointer or a touch.
for (const figure of document.querySelectorAll("figure.marks")) {
  const tip = figure.querySelector(".tip");
  const show = (mark) => {
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const box = figure.getBoundingClientRect(), spot = mark.getBoundingClientRect();
    const left = spot.left - box.left + spot.width / 2;
    tip.style.left = `${Math.max(4, Math.min(box.width - tip.offsetWidth - 4, left - tip.offsetWidth / 2))}px`;
    tip.style.top = `${Math.max(4, spot.top - box.top - tip.offsetHeight - 8)}px`;
  };
  for (const mark of figure.querySelectorAll("[data-tip]")) {
    for (const kind of ["pointerenter", "click"]) mark.addEventListener(kind, () => show(mark));
    mark.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
}
