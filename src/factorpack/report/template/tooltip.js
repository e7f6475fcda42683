// One tooltip for the page: under the pointer, or beside the focused element. Escape hides it.

const tip = byId("tip");
const tipped = new WeakMap();

// `content` returns [title, [[label, value], ...]] on demand.
function withTip(element, content) {
  tipped.set(element, content);
  return element;
}

function showTip([title, pairs], x, y) {
  const list = el("dl");
  for (const [label, value] of pairs) list.append(el("dt", {}, label), el("dd", {}, value));
  tip.replaceChildren(el("b", {}, title), list);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(x + 14, 8), innerWidth - width - 8);
  const above = y + 18 + height > innerHeight;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${Math.max(above ? y - height - 12 : y + 18, 8)}px`;
}

function hideTip() {
  tip.hidden = true;
}

function tippedAbove(node) {
  for (let at = node; at && at !== document; at = at.parentNode) if (tipped.has(at)) return at;
  return null;
}

document.addEventListener("pointermove", (event) => {
  const found = tippedAbove(event.target);
  if (found) showTip(tipped.get(found)(), event.clientX, event.clientY);
  else if (!event.target.closest?.(".nearest")) hideTip();
});
document.addEventListener("focusin", (event) => {
  const found = tippedAbove(event.target);
  if (!found || !event.target.matches(":focus-visible")) return hideTip();
  const box = found.getBoundingClientRect();
  showTip(tipped.get(found)(), box.left + Math.min(box.width, 40), box.top + Math.min(box.height, 24));
});
document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
addEventListener("scroll", hideTip, { passive: true, capture: true });
