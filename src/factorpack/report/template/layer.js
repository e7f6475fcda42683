// One tensor: a description, its streams, and a histogram of its errors.

function showLayer(tensor) {
  const shape = tensor.shape.length ? tensor.shape.join(" × ") : "scalar";
  const rows = [
    ["shape", shape],
    ["in FP32", inBytes(tensor.original_bytes)],
    ["in the file", inBytes(tensor.bytes)],
    ["times smaller", tensor.bytes ? threeDigits(tensor.original_bytes / tensor.bytes) : "-"],
    ["bits per weight", threeDigits(tensor.bits)],
  ];
  if (tensor.error !== null) rows.push(["weight error", percent(tensor.error)]);
  if (tensor.largest_error !== null) rows.push(["largest error", threeDigits(tensor.largest_error)]);
  const list = el("dl", {}, ...rows.flatMap(([label, value]) => [el("dt", {}, label), el("dd", {}, value)]));
  const stored = Object.entries(tensor.stored_bytes).sort((a, b) => b[1] - a[1]);
  const legend = stored.map(([item, count]) =>
    el("li", {}, swatch(itemColour(item)), facts.items[item], el("span", { class: "amount" }, inBytes(count))),
  );
  const bar = streamBar(tensor, tensor.bytes);
  bar.className = "streams";
  byId("layer").replaceChildren(
    ...[
      el("h3", {}, tensor.name),
      el("p", {}, `${capital(facts.kinds[tensor.kind])}: ${tensor.words}.`),
      tensor.note ? el("p", { class: "quiet" }, `Why: ${tensor.note}.`) : null,
      tensor.problem ? el("p", { class: "problem" }, capital(tensor.problem)) : null,
      bar,
      el("ul", { class: "legend" }, ...legend),
      list,
      ...histogram(tensor),
    ].filter(Boolean),
  );
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function histogram(tensor) {
  const counts = tensor.histogram;
  if (!counts.length) return [];
  const half = (counts.length - 1) / 2;
  const width = facts.bin_width;
  const sum = counts.reduce((a, b) => a + b, 0);
  const box = el("div", { class: "chart low" });
  whenSized(box, () => {
    const end = (half + 0.5) * width;
    const plot = chart(box, {
      label: `Histogram of errors: ${percent(counts[half] / sum)} are within 1/20 of the weight's standard deviation`,
      x: { from: -end, to: end, ticks: [-1, -0.5, 0, 0.5, 1], format: String, title: "in standard deviations" },
      y: { from: 0, to: Math.max(...counts), ticks: [], format: String },
      left: 8,
    });
    counts.forEach((count, place) => {
      const middle = (place - half) * width;
      const [left, right] = [plot.x(middle - width / 2), plot.x(middle + width / 2)];
      const bar = svg("rect", {
        class: "histogram",
        x: left + 0.5,
        width: Math.max(right - left - 1, 0.5),
        y: plot.y(count),
        height: plot.y(0) - plot.y(count),
      });
      const edge = place === 0 || place === counts.length - 1;
      const title = edge ? `beyond ${(half * width - width / 2).toFixed(2)}` : `around ${middle.toFixed(2)}`;
      const pairs = [["weights", grouped(count)], ["share", percent(count / sum)]];
      plot.svg.append(withTip(bar, () => [`error ${title}`, pairs]));
    });
  });
  return [el("h4", {}, "Errors of its weights"), box];
}
