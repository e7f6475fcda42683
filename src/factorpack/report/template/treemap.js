// Tensors as tiles: area shows bytes, and neighbours belong to the same part of the model.

const KIND_COLOURS = coloured(
  Object.keys(facts.kinds), ["blue", "teal", "green", "orange", "violet", "grey", "pink"],
);
const LEAST_AREA = 90; // in pixels; smaller tensors share a tile

// Rectangles of these areas, largest first, that fill the box in rows and are as square as possible.
function squarify(sizes, box) {
  let { x, y, width, height } = box;
  const scale = (width * height) / sizes.reduce((sum, size) => sum + size, 0);
  const placed = [];
  for (let first = 0; first < sizes.length; ) {
    const side = Math.min(width, height);
    let area = 0;
    let last = first;
    for (let worst = Infinity; last < sizes.length; last++) {
      const more = area + scale * sizes[last];
      const strip = (more / side) ** 2;
      const next = Math.max((scale * sizes[first]) / strip, strip / (scale * sizes[last]));
      if (next > worst) break;
      worst = next;
      area = more;
    }
    const thick = area / side;
    let along = 0;
    for (; first < last; first++) {
      const long = (scale * sizes[first]) / thick;
      placed.push(
        width >= height
          ? { x, y: y + along, width: thick, height: long }
          : { x: x + along, y, width: long, height: thick },
      );
      along += long;
    }
    if (width >= height) [x, width] = [x + thick, width - thick];
    else [y, height] = [y + thick, height - thick];
  }
  return placed;
}

function total(tensors) {
  return tensors.reduce((sum, tensor) => sum + tensor.bytes, 0);
}

// [{name, tensors, small}], largest first; tensors too small for their own tile are in `small`.
function treemapGroups(area) {
  const least = (LEAST_AREA / area) * facts.file_bytes;
  const byName = new Map();
  for (const tensor of facts.tensors) {
    if (!byName.has(tensor.group)) byName.set(tensor.group, []);
    byName.get(tensor.group).push(tensor);
  }
  const groups = [];
  const rest = { name: "others", tensors: [], small: [] };
  for (const [name, members] of byName) {
    if (total(members) < 4 * least) rest.small.push(...members);
    else {
      const large = members.filter((tensor) => tensor.bytes >= least).sort((a, b) => b.bytes - a.bytes);
      groups.push({ name, tensors: large, small: members.filter((tensor) => tensor.bytes < least) });
    }
  }
  groups.sort((a, b) => groupBytes(b) - groupBytes(a));
  return rest.small.length ? [...groups, rest] : groups;
}

function groupBytes(group) {
  return total(group.tensors) + total(group.small);
}

function tensorTip(tensor) {
  const pairs = [
    [facts.kinds[tensor.kind], tensor.words],
    ["in the file", `${inBytes(tensor.bytes)}, ${percent(tensor.bytes / facts.file_bytes)}`],
    ["bits per weight", threeDigits(tensor.bits)],
  ];
  if (tensor.error !== null) pairs.push(["error", percent(tensor.error)]);
  return [tensor.name, pairs];
}

function treemap(select, filter) {
  const box = byId("treemap");
  const setItems = rover(box);
  const colourOf = colouring(() => {
    for (const [tile, tensor] of tiles) paint(tile, tensor);
  });
  let tiles = new Map();
  let chosen = null;

  function paint(tile, tensor) {
    tile.style.background = tensor ? colourOf(tensor) : "var(--tint-grey)";
    tile.setAttribute("aria-pressed", String(tensor !== null && tensor === chosen));
  }

  function tensorTile(group, tensor, first) {
    const short = tensor.name.startsWith(`${group.name}.`) ? tensor.name.slice(group.name.length + 1) : tensor.name;
    const lines = [first && short !== tensor.name ? group.name : null, short, inBytes(tensor.bytes)];
    const tile = tileButton(`${tensor.name}, ${inBytes(tensor.bytes)}`);
    tile.addEventListener("click", () => select(tensor));
    return [withTip(tile, () => tensorTip(tensor)), lines];
  }

  function smallTile(group) {
    const words = `${group.small.length} small`;
    const amount = inBytes(total(group.small));
    const label = `${words} ${group.small.length > 1 ? "tensors" : "tensor"} of ${group.name}, ${amount}`;
    const tile = tileButton(label);
    tile.addEventListener("click", () => filter(group.name === "others" ? "" : group.name));
    const pairs = group.small.slice(0, 5).map((tensor) => [tensor.name, inBytes(tensor.bytes)]);
    if (group.small.length > 5) pairs.push([`and ${group.small.length - 5} more`, ""]);
    return [withTip(tile, () => [label, pairs]), [null, words, amount]];
  }

  whenSized(box, (width, height) => {
    tiles = new Map();
    const groups = treemapGroups(width * height);
    squarify(groups.map(groupBytes), { x: 0, y: 0, width, height }).forEach((rectangle, place) => {
      const group = groups[place];
      // A white line of 3 pixels between groups, and of 1 pixel between tiles of a group.
      const [wide, high] = [Math.max(rectangle.width - 2, 1), Math.max(rectangle.height - 2, 1)];
      const small = total(group.small);
      const sizes = group.tensors.map((tensor) => tensor.bytes);
      const entries = group.tensors.map((tensor, index) => [tensor, ...tensorTile(group, tensor, index === 0)]);
      if (small) {
        const at = sizes.findIndex((size) => size < small);
        sizes.splice(at < 0 ? sizes.length : at, 0, small);
        entries.splice(at < 0 ? entries.length : at, 0, [null, ...smallTile(group)]);
      }
      squarify(sizes, { ...rectangle, width: wide, height: high }).forEach((where, index) => {
        const [tensor, tile, lines] = entries[index];
        arrange(tile, where, lines);
        paint(tile, tensor);
        tiles.set(tile, tensor);
      });
    });
    box.replaceChildren(...tiles.keys());
    setItems([...tiles.keys()]);
  });

  return (tensor) => {
    chosen = tensor;
    for (const [tile, each] of tiles) paint(tile, each);
  };
}

function tileButton(label) {
  return el("button", { type: "button", class: "tile", "aria-label": label });
}

function arrange(tile, { x, y, width, height }, [group, name, amount]) {
  Object.assign(tile.style, {
    left: `${x}px`, top: `${y}px`, width: `${Math.max(width - 1, 1)}px`, height: `${Math.max(height - 1, 1)}px`,
  });
  if (width < 44 || height < 22) {
    tile.style.padding = "0";
    return;
  }
  const room = Math.floor((height - 6) / 17);
  const lines = group ? [el("span", { class: "group" }, group)] : [];
  if (lines.length < room) lines.push(el("span", {}, name));
  if (lines.length < room) lines.push(el("span", {}, amount));
  tile.append(...lines);
}

// Buttons that choose what colours mean, and their legend. Returns tensor -> colour.
function colouring(changed) {
  const coded = facts.tensors.filter((tensor) => tensor.kind !== "keep" && tensor.kind !== "constant");
  const ways = { kind: kindColours() };
  if (coded.length) ways["bits per weight"] = scaleColours(coded, (tensor) => tensor.bits, threeDigits);
  if (coded.some((tensor) => tensor.error !== null))
    ways.error = scaleColours(coded, (tensor) => tensor.error, percent);
  let current = ways.kind;
  const buttons = Object.entries(ways).map(([name, way], place) => {
    const button = el("button", { type: "button", role: "radio", "aria-checked": String(place === 0) }, name);
    button.addEventListener("click", () => {
      for (const each of buttons) each.setAttribute("aria-checked", String(each === button));
      current = way;
      byId("treemap-legend").replaceChildren(...way.legend());
      changed();
    });
    return button;
  });
  const group = byId("colour-by");
  group.append("Colour by", ...buttons);
  group.hidden = buttons.length < 2;
  rover(group)(buttons);
  byId("treemap-legend").replaceChildren(...current.legend());
  return (tensor) => current.colour(tensor);
}

function kindColours() {
  const colour = (tensor) => `var(--tint-${KIND_COLOURS[tensor.kind]})`;
  return {
    colour,
    legend: () =>
      Object.entries(facts.kinds).flatMap(([kind, words]) => {
        const members = facts.tensors.filter((tensor) => tensor.kind === kind);
        if (!members.length) return [];
        const count = members.reduce((sum, tensor) => sum + tensor.count, 0);
        const amount = `${grouped(count)}, ${inBytes(total(members))}`;
        return [el("li", {}, swatch(colour(members[0])), words, el("span", { class: "amount" }, amount))];
      }),
  };
}

// Five shades at the quintiles of the coded tensors' values.
function scaleColours(coded, value, format) {
  const sorted = coded.map(value).filter((each) => each !== null).sort((a, b) => a - b);
  const bounds = [0.2, 0.4, 0.6, 0.8].map((share) => sorted[Math.floor(share * (sorted.length - 1))]);
  const known = new Set(coded);
  const shade = (each) => bounds.filter((bound) => each > bound).length;
  return {
    colour: (tensor) =>
      known.has(tensor) && value(tensor) !== null ? `var(--scale-${shade(value(tensor))})` : "var(--tint-grey)",
    legend: () => {
      const lines = [...new Set(sorted.map(shade))].map((place) => {
        const [least, most] = ends(sorted.filter((each) => shade(each) === place)).map(format);
        return el("li", {}, swatch(`var(--scale-${place})`), least === most ? least : `${least} to ${most}`);
      });
      return [...lines, el("li", {}, swatch("var(--tint-grey)"), "not coded")];
    },
  };
}
