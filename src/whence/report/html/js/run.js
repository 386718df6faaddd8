// The error along the run: every call in order, what rounding explains shaded, what is introduced marked, what is inherited faded.
function runChart() {
  const HEIGHT = 330;
  const KINDS = ["order", "layer", ...(GROUPS.steps.length > 1 ? ["step"] : [])];
  let off = new Set(), by = "order", step = -1, points = [], hovered = -1, groups = [];
  const present = VERDICTS.filter((v) => TALLY.has(v));
  const named = DATA.answer.findings.map((f) => f.call).filter((i) => i >= 0);
  const held = COUNTED.length - SHOWN.filter((i) => !WHOLE.has(i)).length;
  const words = `Error of ${count(SHOWN.length, "call")} in execution order, largest ${number(SHOWN.reduce((most, i) => Math.max(most, C.error[i] || 0), 0))}. The table of calls below holds the same figures.`;

  function placed() {
    const all = SHOWN.filter((i) => !off.has(verdict(i)) && (step < 0 || C.step[i] === step));
    if (by === "order") return all.map((i) => [i, i]);
    const names = nameOrder();
    if (by === "layer") return all.map((i) => [i, names.get(C.name[i])]);
    const at = new Map(GROUPS.steps.map((s, k) => [s, k]));
    return all.map((i) => [i, at.get(C.step[i]) + 0.08 + 0.84 * names.get(C.name[i]) / Math.max(1, names.size)]);
  }

  const chart = canvas(HEIGHT, words, (g, width, height) => {
    const frame = { left: 60, right: width - 12, top: 42, bottom: height - 56 };
    const list = placed();
    const positive = [];
    for (const [i] of list) positive.push(C.error[i], C.own[i]);
    const y = range(positive, 2);
    let lowX = Infinity, highX = -Infinity;
    for (const [, x] of list) { lowX = Math.min(lowX, x); highX = Math.max(highX, x); }
    if (!list.length) { lowX = 0; highX = 1; }
    const at = axes(g, frame, null, y, "", DATA.answer.evidence === "statistics" ? "how far the statistics of each call's outputs are off" : "relative error of each call's outputs (rel_l2)");
    const X = (x) => frame.left + 8 + (x - lowX) / (highX - lowX || 1) * (frame.right - frame.left - 16);
    const zero = frame.bottom + 13, none = frame.bottom + 28;
    g.strokeStyle = colour("line"); line(g, frame.left, frame.bottom, frame.right, frame.bottom);
    g.fillStyle = colour("soft"); g.textAlign = "right"; g.textBaseline = "middle";
    if (list.some(([i]) => C.error[i] === 0)) g.fillText("equal", frame.left - 6, zero);
    if (list.some(([i]) => C.error[i] === null)) g.fillText("unknown", frame.left - 6, none);

    // What rounding and what came in explain, call by call: half-way to the neighbours, and nothing where nothing is to be explained.
    const clamp = (v) => Math.max(y[0], Math.min(y[1], LOG(v)));
    const sorted = by === "order" ? list : [...list].sort((a, b) => a[1] - b[1]);
    const columns = [], dense = sorted.length > width;  // then a pixel is a column: paths of more parts take seconds to draw
    for (const [i, x] of sorted) {
      const last = columns[columns.length - 1], px = dense ? Math.round(X(x)) : X(x);
      if (last && last.x === px) last.noise = Math.max(last.noise, C.noise[i] || 0);
      else columns.push({ x: px, noise: C.noise[i] || 0 });
    }
    // Rectangles of whole pixels, each filled by itself: one path of all of them takes a hundred times as long.
    const edge = new Path2D();
    g.fillStyle = colour("band"); g.strokeStyle = colour("band-edge"); g.lineWidth = 1;
    columns.forEach((c, k) => {
      if (!c.noise) return;
      const before = columns[k - 1], behind = columns[k + 1], top = at.y(clamp(c.noise));
      const left = before ? Math.max(c.x - 12, (before.x + c.x) / 2) : c.x - 4, right = behind ? Math.min(c.x + 12, (behind.x + c.x) / 2) : c.x + 4;
      g.fillRect(Math.round(left), top, Math.round(right) - Math.round(left), frame.bottom - top);
      if (before?.noise && left > c.x - 12) edge.lineTo(left, top); else edge.moveTo(left, top);
      edge.lineTo(right, top);
    });
    g.stroke(edge);

    // Steps (and ranks) are told apart by lines where they begin.
    g.fillStyle = colour("soft"); g.textBaseline = "top";
    if (by === "layer") { g.textAlign = "right"; g.fillText("calls of one name share a place, in the order of their first", frame.right, height - 14); }
    if (by !== "layer" && GROUPS.steps.length > 1 && step < 0) {
      let before = null, lastText = -99;
      for (const [i, x] of sorted) {
        if (C.step[i] === before) continue;
        const px = X(by === "step" ? Math.floor(x) : x) - (before === null ? 0 : 1);
        g.strokeStyle = colour("grid"); if (before !== null) line(g, px, frame.top, px, none + 6);
        if (px - lastText > 44) { g.textAlign = "left"; g.fillText(before === null || by === "step" ? `step ${C.step[i]}` : String(C.step[i]), px + 2, height - 14); lastText = px; }
        before = C.step[i];
      }
    }

    points = list.map(([i, x]) => [X(x), C.error[i] === null ? none : C.error[i] > 0 ? at.y(LOG(C.error[i])) : zero, i]);
    const colours = Object.fromEntries(VERDICTS.map((v) => [v, colour(v)]));
    const big = list.length < 400 ? 5 : list.length < 3000 ? 4 : 3;
    // How far what is introduced stands above what is explained.
    for (const [px, py, i] of points) {
      if (!GUILTY.has(verdict(i)) || !(C.noise[i] > 0) || !(C.error[i] > C.noise[i])) continue;
      const foot = at.y(clamp(C.noise[i]));
      g.strokeStyle = colours[verdict(i)]; g.globalAlpha = 0.55; g.setLineDash([2, 3]); line(g, px, py, px, foot); g.setLineDash([]);
      g.globalAlpha = 1; g.strokeStyle = colour("band-edge"); g.lineWidth = 2; line(g, px - 5, foot, px + 5, foot); g.lineWidth = 1;
    }
    const marks = new Map(SEVERITY.map((v) => [v, new Map()]));
    for (const [px, py, i] of points) marks.get(verdict(i))?.set(Math.round(2 * px) * 16384 + Math.round(2 * py), [px, py]);  // what falls on one place is one mark
    for (const [v, places] of marks) if (places.size) stamped(g, width, height, v, colours[v], GUILTY.has(v) ? 5.5 : big, places.values());  // the worst on top
    // The name stands above the plot, where no point is, with a line down to its call.
    const first = points.find(([, , i]) => i === named[0]);
    if (first) {
      const [px, py, i] = first;
      g.save(); g.font = `600 ${g.font}`;
      const text = fitting(g, name(i), frame.right - frame.left), half = g.measureText(text).width / 2 + 2;
      const tx = Math.max(frame.left + half, Math.min(frame.right - half, px));
      g.strokeStyle = colours[verdict(i)]; g.globalAlpha = 0.6; line(g, px, frame.top - 7, px, py - 9); g.globalAlpha = 1;
      g.textAlign = "center"; g.textBaseline = "top"; g.fillStyle = colours[verdict(i)]; g.fillText(text, tx, 20);
      g.restore();
    }
  }, (g) => {
    const opened = linked("call", CALLS);
    for (const [which, ink] of [[opened, colour("accent")], [hovered, colour("ink")]]) {
      const point = which >= 0 && points.find(([, , i]) => i === which);
      if (!point) continue;
      g.strokeStyle = ink; g.lineWidth = 1.5; g.beginPath(); g.arc(point[0], point[1], 8, 0, 7); g.stroke();
    }
  });
  chart.node.id = "run-chart";

  function nearest(event) {
    const box = chart.node.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = -1, least = 26 ** 2;
    for (const [px, py, i] of points) {
      const d = (px - x) ** 2 + (py - y) ** 2 - (GUILTY.has(verdict(i)) ? 40 : 0);
      if (d < least) { least = d; best = i; }
    }
    return best;
  }
  chart.node.addEventListener("mousemove", (event) => {
    const i = nearest(event);
    if (i !== hovered) { hovered = i; chart.touch(); }
    chart.node.style.cursor = i >= 0 ? "pointer" : "default";
    if (i < 0) { hideTip(); return; }
    showTip(event, el("div", {}, el("b", {}, name(i)), " ", type(i)), el("div", {}, chip(verdict(i)), where(i) && `, ${where(i)}`),
      el("div", { class: "num" }, `error ${number(C.error[i])}`, C.added[i] !== null && `, introduced here ${number(C.added[i])}`, C.noise[i] !== null && `, explained up to ${number(C.noise[i])}`, C.incoming[i] !== null && `, in its inputs ${number(C.incoming[i])}`));
  });
  chart.node.addEventListener("mouseleave", () => { hovered = -1; hideTip(); chart.touch(); });
  chart.node.addEventListener("click", (event) => { const i = nearest(event); if (i >= 0) openCall(i); });

  // The legend counts all calls, as the table does; the marks of those that are not drawn are said below it.
  const legend = el("div", { class: "legend", role: "group", "aria-label": "Calls by verdict, shown or hidden" }, present.map((v) => el("button", { type: "button", "data-verdict": v, title: `${VERDICT_WORDS[v]}. Click to show or hide.`, onclick: () => {
    if (off.has(v)) off.delete(v); else off.add(v);
    setLink({ hide: [...off].join(" ") });
  } }, chip(v, `${v} ${count(TALLY.get(v))}`))), C.noise.some((n) => n > 0) && el("span", { class: "chip" }, bandGlyph(), "explained by rounding and by the call's inputs"),
  held > 0 && el("span", {}, `${count(held, "call")} that only ${held === 1 ? "holds" : "hold"} others ${held === 1 ? "is" : "are"} not drawn.`));

  groups = KINDS.map((kind) => el("button", { type: "button", onclick: () => setLink({ by: kind === "order" ? "" : kind }) }, `by ${kind}`));
  const picked = el("select", { onchange: () => setLink({ at: picked.value }) }, el("option", { value: "" }, "all"), GROUPS.steps.map((s) => el("option", { value: s }, s)));
  const steps = GROUPS.steps.length > 1 && el("label", {}, "step", picked);
  let known = "";
  onLink(() => {
    by = KINDS.includes(link.get("by")) ? link.get("by") : "order";
    step = GROUPS.steps.find((s) => String(s) === link.get("at")) ?? -1;
    off = new Set((link.get("hide") || "").split(" ").filter((v) => present.includes(v)));
    picked.value = step < 0 ? "" : step;
    groups.forEach((button, k) => button.setAttribute("aria-pressed", String(KINDS[k] === by)));
    for (const button of legend.querySelectorAll("button")) button.setAttribute("aria-pressed", String(!off.has(button.dataset.verdict)));
    const key = [by, step, ...off].join(" ");
    if (key === known) chart.touch(); else chart.redraw();
    known = key;
  });
  return [el("div", { class: "controls" }, groups, steps), el("figure", {}, chart.node), legend];
}

function fitting(g, text, width) {
  if (g.measureText(text).width <= width) return text;
  while (text.length > 4 && g.measureText(`\u2026${text}`).width > width) text = text.slice(1);
  return `\u2026${text}`;
}

// Many marks of one kind: drawn once, stamped on a layer, which is laid over the chart as a whole, so that faded marks do not add up.
function stamped(g, width, height, verdict, ink, size, places) {
  const ratio = Math.max(1, devicePixelRatio || 1), reach = Math.ceil(1.5 * size) + 1;
  const [mark, layer] = [[2 * reach, 2 * reach], [width, height]].map(([w, h]) => el("canvas", { width: Math.round(w * ratio), height: Math.round(h * ratio) }));
  const one = mark.getContext("2d"), all = layer.getContext("2d"), path = new Path2D(shape(SHAPES[verdict], reach, reach, size));
  one.scale(ratio, ratio);
  if (SHAPES[verdict] === "ring") { one.strokeStyle = ink; one.stroke(path); } else { one.fillStyle = ink; one.fill(path); }
  for (const [x, y] of places) all.drawImage(mark, Math.round((x - reach) * ratio), Math.round((y - reach) * ratio));
  g.globalAlpha = FADED[verdict] || 1;
  g.drawImage(layer, 0, 0, width, height);
  g.globalAlpha = 1;
}

function bandGlyph() {
  const rect = svg("rect", { x: 0, y: 3, width: 12, height: 9 }), edge = svg("path", { d: "M0,3H12" });
  rect.style.fill = "var(--band)"; edge.style.stroke = "var(--band-edge)";
  return svg("svg", { viewBox: "0 0 12 12", class: "mark", "aria-hidden": "true" }, rect, edge);
}
