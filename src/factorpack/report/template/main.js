// Assembles the page.

function themeToggle() {
  const button = byId("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const label = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  dark.addEventListener("change", label);
  label();
}

function largestGroups() {
  const sums = new Map();
  for (const tensor of facts.tensors) sums.set(tensor.group, (sums.get(tensor.group) ?? 0) + tensor.bytes);
  const [[name, bytes]] = [...sums].sort((a, b) => b[1] - a[1]);
  const parts = sums.size === 1 ? "" : ` The largest part, ${name}, takes ${percent(bytes / facts.file_bytes)}.`;
  const tied = facts.aliases ? ` ${facts.aliases} more names refer to tied tensors.` : "";
  const summed = facts.summed ? ` The ${grouped(facts.summed)} smallest are not listed, but summed up by kind.` : "";
  return `${grouped(facts.count)} tensors; a tile's area is its bytes in the file.${summed}${parts}${tied}`;
}

function start() {
  themeToggle();
  streams();
  paretos();
  if (!facts.tensors.length) return;
  byId("bytes-lead").textContent = largestGroups();
  const select = (tensor, reveal = false) => {
    showLayer(tensor);
    markTile(tensor);
    rows.mark(tensor);
    if (reveal) byId("layer").scrollIntoView({ block: "center", behavior: calm.matches ? "auto" : "smooth" });
  };
  const rows = table(select);
  const markTile = treemap(select, rows.filter);
  curves(select);
  select(facts.tensors.reduce((best, tensor) => (tensor.bytes > best.bytes ? tensor : best)));
}

start();
