// One row per tensor; headings sort, and the filter matches words.

const largestBytes = ends(facts.tensors.map((tensor) => tensor.bytes))[1];
const order = new Intl.Collator("en", { numeric: true });
const compared = facts.tensors.some((tensor) => tensor.error !== null);

const bytesOf = (tensor) => tensor.bytes;
const zeros = { value: (tensor) => tensor.zeros, show: (tensor) => `${Math.round(100 * tensor.zeros)} %` };
const error = { value: (tensor) => tensor.error, show: (tensor) => percent(tensor.error) };

// `value` sorts; `show` makes a cell's content. A tensor without a value has an empty cell.
const COLUMNS = [
  { title: "tensor", value: (tensor) => tensor.name },
  { title: "bytes", class: "figure", value: bytesOf, show: (tensor) => grouped(tensor.bytes) },
  { title: "streams", class: "parts", value: bytesOf, show: (tensor) => streamBar(tensor, largestBytes) },
  { title: "stored as", class: "words", value: kindAndWords, show: swatchAndWords },
  { title: "shape", class: "figure", value: (tensor) => tensor.original_bytes, show: shapeOf },
  { title: "smaller", class: "figure", value: ratioOf, show: (tensor) => `${ratioOf(tensor).toFixed(1)}×` },
  { title: "bits", class: "figure", value: (tensor) => tensor.bits, show: (tensor) => tensor.bits.toFixed(2) },
  { title: "zeros", class: "figure", ...zeros },
  ...(compared ? [{ title: "error", class: "figure", ...error }] : []),
  { title: "why", class: "note", value: (tensor) => [tensor.problem, tensor.note].filter(Boolean).join("; ") },
];

function kindAndWords(tensor) {
  return `${facts.kinds[tensor.kind]}: ${tensor.words}`;
}

function swatchAndWords(tensor) {
  const mark = swatch(`var(--tint-${KIND_COLOURS[tensor.kind]})`);
  mark.title = facts.kinds[tensor.kind];
  return el("span", {}, mark, tensor.words);
}

function shapeOf(tensor) {
  return tensor.shape.join("×") || "1";
}

function ratioOf(tensor) {
  return tensor.bytes ? tensor.original_bytes / tensor.bytes : 0;
}

function rowOf(tensor, select) {
  const row = el("tr", { tabindex: "-1" });
  COLUMNS.forEach((column, place) => {
    const value = column.value(tensor);
    const content = value === null ? "" : column.show ? column.show(tensor) : value;
    const cell = el(place ? "td" : "th", place ? {} : { scope: "row", title: tensor.name }, content);
    if (column.class) cell.className = column.class;
    if (column.class === "note") cell.title = content;
    row.append(cell);
  });
  row.addEventListener("click", () => select(tensor, true));
  return row;
}

// Numbers by size, words alphabetically; missing values come last either way.
function comparing(value, direction) {
  return (a, b) => {
    const [left, right] = [value(a), value(b)];
    if (left === null || right === null) return (left === null) - (right === null);
    return direction * (typeof left === "string" ? order.compare(left, right) : left - right);
  };
}

function table(select) {
  const body = el("tbody");
  const rows = new Map(facts.tensors.map((tensor) => [tensor, rowOf(tensor, select)]));
  const worded = COLUMNS.filter((column) => !["figure", "parts"].includes(column.class));
  const texts = new Map(
    facts.tensors.map((tensor) => [tensor, worded.map((column) => column.value(tensor)).join(" ").toLowerCase()]),
  );
  const setItems = rover(body);
  const filter = byId("filter");
  const nothing = el("tr", {}, el("td", { class: "empty", colspan: COLUMNS.length }, "No tensor matches all these words."));
  let sorted = [...facts.tensors];

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = sorted.filter((tensor) => words.every((word) => texts.get(tensor).includes(word)));
    body.replaceChildren(...(found.length ? found.map((tensor) => rows.get(tensor)) : [nothing]));
    setItems(found.map((tensor) => rows.get(tensor)));
    const counts = `${grouped(found.length)} of ${grouped(facts.tensors.length)} ${facts.summed ? "rows" : "tensors"}`;
    byId("shown").textContent = `${counts}, ${inBytes(total(found))}`;
  }

  function sortBy(place, direction) {
    heads.forEach((head, each) => {
      if (each === place) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    sorted = [...facts.tensors].sort(comparing(COLUMNS[place].value, direction));
    show();
  }

  const heads = COLUMNS.map((column, place) => {
    const button = el("button", { type: "button" }, column.title);
    const head = el("th", { scope: "col", class: column.class ?? "" }, button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const numbers = column.class === "figure" || column.class === "parts";
      sortBy(place, now ? (now === "ascending" ? -1 : 1) : numbers ? -1 : 1);
    });
    return head;
  });
  byId("table").append(el("caption", {}, "Tensors of the file"), el("thead", {}, el("tr", {}, ...heads)), body);
  filter.addEventListener("input", show);
  sortBy(COLUMNS.findIndex((column) => column.title === "bytes"), -1);

  return {
    mark: (tensor) => {
      for (const [each, row] of rows) row.setAttribute("aria-current", String(each === tensor));
    },
    filter: (words) => {
      filter.value = words;
      show();
      filter.scrollIntoView({ block: "center", behavior: calm.matches ? "auto" : "smooth" });
      filter.focus({ preventScroll: true });
    },
  };
}
