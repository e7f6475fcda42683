// Rate-distortion curves of all weights in one chart, and the file's point on each.

function curves(select) {
  if (!facts.curves.length) return;
  byId("curves").hidden = false;
  const box = byId("curves-chart");
  const setItems = rover(box);
  const byName = new Map(facts.tensors.map((tensor) => [tensor.name, tensor]));
  const losses = facts.curves.flatMap((curve) => [...curve.losses, curve.loss_here]).filter((loss) => loss > 0);
  const [low, high] = losses.length ? ends(losses) : [1e-3, 1];
  const [floor, most] = [low / 1.5, high * 1.5];
  const widest = ends(facts.curves.flatMap((curve) => [...curve.bits, curve.here]))[1];
  whenSized(box, (width) => {
    const across = linearTicks(0, widest, width < 500 ? 5 : 9);
    const plot = chart(box, {
      label: "Loss against bits per weight, one line per tensor. Arrow keys move along the tensors.",
      x: { from: 0, to: widest * 1.02, ticks: across, format: threeDigits, title: "bits per weight" },
      y: { from: floor, to: most, log: true, ticks: logTicks(floor, most, 8), format: shortPower, title: "loss" },
    });
    const lines = svg("g");
    const places = facts.curves.map((curve) => {
      const down = (loss) => plot.y(Math.max(loss, floor));
      const points = curve.bits.map((bits, place) => [plot.x(bits), down(curve.losses[place])]);
      const line = svg("path", { class: "curve", d: path(points) });
      lines.append(line);
      const [x, y] = [plot.x(curve.here), down(curve.loss_here)];
      return { curve, line, x, y, mark: svg("circle", { class: "dot", cx: x, cy: y, r: 4.5 }) };
    });
    plot.svg.append(lines, ...places.map((place) => place.mark));
    explorable(plot.svg, setItems, places, {
      content: ({ curve }) => [
        curve.name,
        [["bits per weight", threeDigits(curve.here)], ["loss", threeDigits(curve.loss_here)]],
      ],
      choose: (chosen) => {
        for (const place of places) {
          place.line.classList.toggle("chosen", place === chosen);
          place.mark.classList.toggle("chosen", place === chosen);
        }
        if (chosen) lines.append(chosen.line);
      },
      open: ({ curve }) => select(byName.get(curve.name), true),
    });
  });
}

function shortPower(value) {
  return value >= 1e-3 && value < 1e4 ? threeDigits(value) : value.toExponential(0);
}
