// Bytes by stream: one bar for the file, and a small one for each tensor.

const ITEM_COLOURS = coloured(
  Object.keys(facts.items), ["blue", "violet", "orange", "teal", "pink", "green", "grey"],
);

function itemColour(item) {
  return `var(--${ITEM_COLOURS[item]})`;
}

function streams() {
  const sums = Object.keys(facts.items).map((item) => [
    item,
    facts.tensors.reduce((sum, tensor) => sum + (tensor.stored_bytes[item] ?? 0), 0),
  ]);
  const present = sums.filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
  for (const [item, count] of present) {
    const part = el("span");
    part.style.flex = `${count} 0 0`;
    part.style.background = itemColour(item);
    const pairs = [["bytes", grouped(count)], ["of the file", percent(count / facts.file_bytes)]];
    byId("streams").append(withTip(part, () => [facts.items[item], pairs]));
    const amount = `${inBytes(count)}, ${percent(count / facts.file_bytes)}`;
    byId("streams-legend").append(
      el("li", {}, swatch(itemColour(item)), facts.items[item], el("span", { class: "amount" }, amount)),
    );
  }
}

// A bar of a tensor's streams, with a length relative to the largest tensor.
function streamBar(tensor, largest) {
  const bar = el("i");
  let from = 0;
  const stops = Object.entries(tensor.stored_bytes).map(([item, count]) => {
    const to = from + (100 * count) / tensor.bytes;
    const stop = `${itemColour(item)} ${from.toFixed(2)}% ${to.toFixed(2)}%`;
    from = to;
    return stop;
  });
  bar.style.width = `${((100 * tensor.bytes) / largest).toFixed(2)}%`;
  bar.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
  return bar;
}
