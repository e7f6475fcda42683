// Accuracy against bytes, one colour and marker per method; the legend toggles methods.

const LINE_COLOURS = ["blue", "orange", "green", "violet", "pink", "teal", "grey"];
const CLOSE = 0.1; // in accuracy: a file that loses more than this is of little use
const LEAST_ERROR = 1e-9; // start of the log axis: a lossless file has no error at all
const MARKS = ["circle", "square", "up", "diamond", "down"];

function markAt(shape, x, y, size) {
  const by = {
    square: [[-1, -1], [1, -1], [1, 1], [-1, 1]],
    up: [[0, -1.25], [1.15, 0.9], [-1.15, 0.9]],
    down: [[0, 1.25], [1.15, -0.9], [-1.15, -0.9]],
    diamond: [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]],
  }[shape];
  if (!by) return svg("circle", { cx: x, cy: y, r: size * 1.1 });
  return svg("path", { d: `${path(by.map(([dx, dy]) => [x + dx * size, y + dy * size]))}Z` });
}

function paretos() {
  byId("pareto").hidden = facts.comparisons.length === 0;
  for (const comparison of facts.comparisons) byId("pareto-charts").append(paretoCard(comparison));
}

function paretoCard(comparison) {
  const names = [...new Set(comparison.points.map((point) => point.method))];
  const looks = new Map(names.map((name, place) => [name, lookOf(place)]));
  const near = closeViews(comparison);
  const shown = { without: new Set(), near };
  const box = el("div", { class: "chart tall" });
  const setItems = rover(box);
  const draw = () => drawPareto(box, setItems, comparison, looks, shown);
  const buttons = names.map((name) => {
    const button = el("button", { type: "button", "aria-pressed": "true" }, legendMark(looks.get(name)), name);
    button.addEventListener("click", () => {
      if (!shown.without.delete(name)) shown.without.add(name);
      button.setAttribute("aria-pressed", String(!shown.without.has(name)));
      draw();
    });
    return button;
  });
  const scored = comparison.measure === "top-1";
  const words = scored
    ? "Higher is more accurate, left is smaller. Click a method to hide it."
    : "Lower is closer to the weights, left is smaller: accuracy was not measured. Click a method to hide it.";
  whenSized(box, draw);
  const items = buttons.map((button) => el("li", {}, button));
  const legend = el("ul", { class: "legend", "aria-label": "Methods" }, ...items);
  const views = near ? viewButtons(shown, draw) : null;
  const lead = el("p", { class: "lead" }, words);
  return el("div", { class: "card pareto" }, el("h3", {}, comparison.title), lead, views, box, legend);
}

// Seven colours, with another marker each time they repeat.
function lookOf(place) {
  const round = Math.floor(place / LINE_COLOURS.length);
  return {
    colour: `var(--${LINE_COLOURS[place % LINE_COLOURS.length]})`,
    shape: MARKS[(place + round) % MARKS.length],
    first: place === 0,
  };
}

// Whether to offer a closer view of the top: some points are close to the original, some far.
function closeViews({ original, points }) {
  if (original === null) return false;
  const close = points.filter((point) => point.value > original - CLOSE).length;
  return close >= 3 && close < points.length;
}

function viewButtons(shown, draw) {
  const views = [[`within ${100 * CLOSE} points of FP32`, true], ["all points", false]];
  const buttons = views.map(([words, near]) => {
    const button = el("button", { type: "button", role: "radio", "aria-checked": String(near) }, words);
    button.addEventListener("click", () => {
      for (const each of buttons) each.setAttribute("aria-checked", String(each === button));
      shown.near = near;
      draw();
    });
    return button;
  });
  const group = el("div", { class: "controls", role: "radiogroup", "aria-label": "Range" }, ...buttons);
  rover(group)(buttons);
  return group;
}

function legendMark({ colour, shape }) {
  const mark = markAt(shape, 7, 7, 4.5);
  mark.style.fill = colour;
  return svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, mark);
}

function paretoAxes(comparison, near, width) {
  const values = comparison.points.map((point) => point.value);
  if (comparison.original !== null) values.push(comparison.original);
  let [low, high] = ends(values);
  if (near) low = Math.max(low, comparison.original - CLOSE);
  const [least, most] = ends(comparison.points.map((point) => point.bytes));
  const x = { from: least / 1.1, to: most * 1.1, log: true, format: inBytes, title: "bytes on disk" };
  x.ticks = logTicks(x.from, x.to, width < 500 ? 4 : 8);
  if (comparison.measure === "top-1") {
    const room = (high - low) * 0.08 || 0.01;
    const y = { from: Math.max(low - room, 0), to: Math.min(high + room, 1), title: "top-1 accuracy" };
    return [x, { ...y, ticks: linearTicks(y.from, y.to, 6), format: (value) => `${threeDigits(100 * value)} %` }];
  }
  const y = { from: Math.max(low, LEAST_ERROR) / 1.3, to: Math.max(high, LEAST_ERROR) * 1.3, log: true };
  return [x, { ...y, ticks: logTicks(y.from, y.to, 6), format: shortPower, title: "relative squared weight error" }];
}

function drawPareto(box, setItems, comparison, looks, shown) {
  const points = comparison.points.filter((point) => !shown.without.has(point.method));
  const [x, y] = paretoAxes(comparison, shown.near, box.clientWidth);
  const label = `${comparison.measure} against bytes. Arrow keys move along the points.`;
  const plot = chart(box, { label, x, y, left: 58 });
  references(plot, comparison, x);
  const places = [];
  const lines = clipped(plot);
  for (const [name, { colour, shape, first }] of [...looks].reverse()) {
    const own = points.filter((point) => point.method === name).sort((a, b) => a.bytes - b.bytes);
    const high = ({ value }) => plot.y(y.log ? Math.max(value, LEAST_ERROR) : value);
    const at = own.map((point) => [plot.x(point.bytes), high(point)]);
    const line = svg("path", { class: first ? "method first" : "method", d: path(at) });
    line.style.stroke = colour;
    lines.append(line);
    own.forEach((point, place) => {
      if (!y.log && point.value < y.from) return;
      const mark = markAt(shape, ...at[place], first ? 5.5 : 4);
      mark.classList.add("mark");
      mark.style.fill = colour;
      places.push({ point, x: at[place][0], y: at[place][1], mark });
    });
  }
  plot.svg.append(...places.map((place) => place.mark));
  explorable(plot.svg, setItems, places, {
    content: ({ point }) => [point.method, pointPairs(point, comparison)],
    choose: (chosen) => {
      for (const place of places) place.mark.classList.toggle("chosen", place === chosen);
    },
    open: () => {},
  });
}

// A group clipped to the frame of the plot.
function clipped({ svg: picture, inside }) {
  const id = `frame-${document.querySelectorAll("clipPath").length}`;
  const [width, height] = [inside.right - inside.left + 8, inside.bottom - inside.top + 8];
  const frame = { x: inside.left, y: inside.top - 8, width, height };
  const group = svg("g", { "clip-path": `url(#${id})` });
  picture.append(svg("clipPath", { id }, svg("rect", frame)), group);
  return group;
}

function pointPairs(point, comparison) {
  const scored = comparison.measure === "top-1";
  return [
    [comparison.measure, scored ? `${(100 * point.value).toFixed(2)} %` : String(point.value)],
    ["bytes", grouped(point.bytes)],
    ["times smaller", point.ratio.toFixed(2)],
    ["settings", point.settings],
  ];
}

// The original's score as a horizontal line, and this file's size as a vertical one if it is the same model.
function references(plot, comparison, x) {
  const { left, right, top, bottom } = plot.inside;
  if (comparison.original !== null) {
    const at = plot.y(comparison.original);
    plot.svg.append(svg("line", { class: "reference", x1: left, x2: right, y1: at, y2: at }));
    const words = `FP32 ${(100 * comparison.original).toFixed(1)} %`;
    plot.svg.append(svg("text", { class: "title", x: left + 6, y: at - 5 }, words));
  }
  const same = Math.abs(comparison.original_bytes / facts.original_bytes - 1) < 0.005;
  if (same && facts.file_bytes > x.from && facts.file_bytes < x.to) {
    const at = plot.x(facts.file_bytes);
    plot.svg.append(svg("line", { class: "here", x1: at, x2: at, y1: top, y2: bottom }));
    plot.svg.append(svg("text", { x: at, y: top - 5, "text-anchor": "middle" }, "this file's size"));
  }
}
