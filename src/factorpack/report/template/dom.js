// Elements, number formatting and keyboard navigation, shared by all parts of the page.

const facts = JSON.parse(document.getElementById("facts").textContent);
const SVG = "http://www.w3.org/2000/svg";
const calm = matchMedia("(prefers-reduced-motion: reduce)");

function byId(id) {
  return document.getElementById(id);
}

// Text is always set as text: names come from files of unknown origin.
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function swatch(colour) {
  const mark = el("span", { class: "swatch" });
  mark.style.background = colour;
  return mark;
}

// One colour per key, in order; with more keys than colours, colours repeat.
function coloured(keys, colours) {
  return Object.fromEntries(keys.map((key, place) => [key, colours[place % colours.length]]));
}

function ends(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function inBytes(count) {
  let amount = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (amount < 1000) return unit === "B" ? `${amount.toFixed(0)} B` : `${threeDigits(amount)} ${unit}`;
    amount /= 1000;
  }
  return `${threeDigits(amount)} TB`;
}

function threeDigits(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 999.5 || size < 1e-3) return size >= 999.5 && size < 1e7 ? grouped(value) : value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

function grouped(value) {
  return Math.round(value).toLocaleString("en");
}

function percent(share) {
  const amount = 100 * share;
  if (amount === 0) return "0 %";
  if (amount < 0.01) return "< 0.01 %";
  return `${amount.toFixed(amount < 1 ? 2 : amount < 99.95 ? 1 : 0)} %`;
}

// Calls `draw` with the element's width and height, now and whenever the width changes.
function whenSized(element, draw) {
  let last = 0;
  new ResizeObserver(() => {
    const width = element.clientWidth;
    if (width && width !== last) draw((last = width), element.clientHeight);
  }).observe(element);
}

// Makes a container one tab stop with arrow keys between its items. Returns a function that sets the items.
function rover(container) {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  let items = [];
  let stop = null;
  const moveStop = (item) => {
    if (stop) stop.setAttribute("tabindex", "-1");
    stop = item;
    if (stop) stop.setAttribute("tabindex", "0");
  };
  container.addEventListener("keydown", (event) => {
    const place = items.indexOf(document.activeElement);
    if (place < 0) return;
    if (event.key in steps) {
      event.preventDefault();
      items[Math.min(Math.max(place + steps[event.key], 0), items.length - 1)].focus();
    } else if (event.key === "Enter" && !(items[place] instanceof HTMLButtonElement)) {
      items[place].dispatchEvent(new MouseEvent("click", { bubbles: true }));
    }
  });
  container.addEventListener("focusin", (event) => {
    if (items.includes(event.target)) moveStop(event.target);
  });
  return (next) => {
    items = next;
    for (const item of items) item.setAttribute("tabindex", "-1");
    stop = null;
    moveStop(items[0] ?? null);
  };
}
