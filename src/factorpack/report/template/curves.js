// Rate-distortion curves of all weights in one picture, and where the file stands on each.

function curves(select) {
  if (!facts.curves.length) return;
  byId("curves").hidden = false;
  const box = byId("curves-chart");
  const setItems = rover(box);
  const byName = new Map(facts.tensors.map((tensor) => [tensor.name, tensor]));
  const losses = facts.curves.flatMap((curve) => [...curve.losses, curve.loss_here]).filter((loss) => loss > 0);
  const [least, most] = [Math.min(...losses), Math.max(...losses)];
  const widest = Math.max(...facts.curves.flatMap((curve) => [...curve.bits, curve.here]));
  whenSized(box, (width) => {
    const plot = chart(box, {
      label: "Loss against bits a number, a line a weight. Arrow keys move along the weights.",
      x: { from: 0, to: widest * 1.02, ticks: linearTicks(0, widest, width < 500 ? 5 : 9), format: threeDigits, title: "bits a number" },
      y: { from: least / 1.5, to: most * 1.5, log: true, ticks: logTicks(least / 1.5, most * 1.5, 8), format: shortPower, title: "loss" },
    });
    const lines = svg("g");
    const places = facts.curves.map((curve) => {
      const points = curve.bits.map((bits, place) => [plot.x(bits), plot.y(Math.max(curve.losses[place], least / 1.5))]);
      const line = svg("path", { class: "curve", d: path(points) });
      lines.append(line);
      const [x, y] = [plot.x(curve.here), plot.y(Math.max(curve.loss_here, least / 1.5))];
      return { curve, line, x, y, mark: svg("circle", { class: "dot", cx: x, cy: y, r: 4.5 }) };
    });
    plot.svg.append(lines, ...places.map((place) => place.mark));
    explorable(plot.svg, setItems, places, {
      content: ({ curve }) => [
        curve.name,
        [["bits a number", threeDigits(curve.here)], ["loss", threeDigits(curve.loss_here)]],
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
