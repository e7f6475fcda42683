// Axes and scales, drawn at display size so that text keeps its size.

function linearTicks(from, to, count) {
  const rough = (to - from) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const ticks = [];
  for (let at = Math.ceil(from / step); at * step <= to + 1e-9 * step; at++) ticks.push(at * step);
  return ticks;
}

function logTicks(from, to, most) {
  const [first, last] = [Math.floor(Math.log10(from)), Math.ceil(Math.log10(to))];
  const powers = Array.from({ length: last - first + 1 }, (_, place) => 10 ** (first + place));
  const inside = (tick) => tick >= from && tick <= to;
  for (const digits of [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = powers.flatMap((power) => digits.map((digit) => digit * power)).filter(inside);
    if (ticks.length <= most) return ticks;
  }
  return powers.filter((_, place) => place % Math.ceil(powers.length / most) === 0).filter(inside);
}

function scale({ from, to, log }, start, end) {
  const bend = log ? Math.log : (value) => value;
  const [low, high] = [bend(from), bend(to)];
  return (value) => start + ((bend(value) - low) / (high - low || 1)) * (end - start);
}

// Replaces the box's content. Returns {svg, x, y, inside}: the scales to pixels, and the plot's frame.
function chart(box, { label, x, y, left = 52 }) {
  const [width, height] = [box.clientWidth, box.clientHeight];
  const inside = { left, right: width - 12, top: y.title ? 26 : 8, bottom: height - (x.title ? 42 : 24) };
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
  const [toX, toY] = [scale(x, inside.left, inside.right), scale(y, inside.bottom, inside.top)];
  const grid = svg("g", { class: "grid", "aria-hidden": "true" });
  for (const tick of x.ticks) {
    const at = toX(tick);
    const anchor = at > inside.right - 14 ? "end" : "middle";
    grid.append(svg("line", { x1: at, x2: at, y1: inside.top, y2: inside.bottom }));
    grid.append(svg("text", { x: at, y: inside.bottom + 17, "text-anchor": anchor }, x.format(tick)));
  }
  for (const tick of y.ticks) {
    const at = toY(tick);
    grid.append(svg("line", { x1: inside.left, x2: inside.right, y1: at, y2: at }));
    grid.append(svg("text", { x: inside.left - 8, y: at + 4, "text-anchor": "end" }, y.format(tick)));
  }
  if (x.title) {
    const middle = (inside.left + inside.right) / 2;
    grid.append(svg("text", { class: "title", x: middle, y: height - 6, "text-anchor": "middle" }, x.title));
  }
  if (y.title) grid.append(svg("text", { class: "title", x: 0, y: 12 }, y.title));
  picture.append(grid);
  box.replaceChildren(picture);
  return { svg: picture, x: toX, y: toY, inside };
}

function path(points) {
  return points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// The point {x, y} nearest to the pointer within `reach` pixels, or null.
function nearest(picture, event, places, reach) {
  const box = picture.getBoundingClientRect();
  let best = null;
  let least = reach;
  for (const place of places) {
    const away = Math.hypot(place.x - (event.clientX - box.left), place.y - (event.clientY - box.top));
    if (away < least) [best, least] = [place, away];
  }
  return best;
}

// Pointer, focus and keys on a chart's points: `choose` highlights one (or none), `open` handles a click.
function explorable(picture, setItems, places, { content, choose, open }) {
  picture.classList.add("nearest");
  const over = (event) => {
    const place = nearest(picture, event, places, 48);
    choose(place);
    if (place) showTip(content(place), event.clientX, event.clientY);
    else hideTip();
  };
  picture.addEventListener("pointermove", over);
  picture.addEventListener("pointerdown", over);
  picture.addEventListener("pointerleave", () => {
    choose(null);
    hideTip();
  });
  picture.addEventListener("click", (event) => {
    const place = places.find((each) => each.mark === event.target) ?? nearest(picture, event, places, 48);
    if (place) open(place);
  });
  for (const place of places) {
    const [title, pairs] = content(place);
    place.mark.setAttribute("role", "img");
    place.mark.setAttribute("aria-label", [title, ...pairs.map((pair) => pair.join(" "))].join(", "));
    place.mark.addEventListener("focus", () => {
      choose(place);
      const box = picture.getBoundingClientRect();
      showTip(content(place), box.left + place.x, box.top + place.y);
    });
    place.mark.addEventListener("blur", () => {
      choose(null);
      hideTip();
    });
  }
  setItems([...places].sort((a, b) => a.x - b.x || a.y - b.y).map((place) => place.mark));
}
