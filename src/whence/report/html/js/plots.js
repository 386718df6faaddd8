// Four looks at one tensor's error. Each is a figure with its name, a canvas and a sentence; none where there is nothing to draw.
const PLOT = 220;

function figure(title, chart, ...caption) {
  return el("figure", {}, el("div", { class: "name" }, title), chart.node, el("figcaption", {}, caption));
}

function histogram(d) {
  if (!d.counts?.length) return null;
  const total = d.counts.reduce((a, b) => a + b, 0), most = Math.max(...d.counts), low = d.edges[0], high = d.edges[d.edges.length - 1];
  const x = [d.noise ? Math.min(low, Math.floor(LOG(d.noise) - 0.3)) : low, d.noise ? Math.max(high, Math.ceil(LOG(d.noise) + 0.3)) : high];
  const chart = canvas(PLOT, `Histogram of the error of ${count(total, "element")}, from ${ten(low)} to ${ten(high)}`, (g, width, height) => {
    const frame = { left: 46, right: width - 14, top: 20, bottom: height - 38 };
    const at = axes(g, frame, x, null, "|error|", "elements");
    noiseLine(g, frame, d.noise && at.x(LOG(d.noise)), true);
    g.fillStyle = colour("accent");
    d.counts.forEach((n, k) => {
      const left = at.x(d.edges[k]), right = at.x(d.edges[k + 1]), tall = n / most * (frame.bottom - frame.top - 4);
      if (n) g.fillRect(left + 0.5, frame.bottom - Math.max(1, tall), Math.max(1, right - left - 1), Math.max(1, tall));
    });
    g.fillStyle = colour("soft"); g.textAlign = "right"; g.textBaseline = "middle"; g.fillText(count(most), frame.left - 6, frame.top + 6); g.fillText("0", frame.left - 6, frame.bottom);
  });
  return figure("Histogram of the error", chart, `${count(total)} of ${count(d.elements, "element")} ${total === 1 ? "differs" : "differ"}${d.zeros ? `, ${count(d.zeros)} ${d.zeros === 1 ? "is" : "are"} equal` : ""}`, noiseWords(d));
}

function magnitude(d) {
  const points = (d.magnitude || []).filter(([a, b]) => a > 0 && b > 0);
  if (points.length < 2) return null;
  const x = range(points.map((p) => p[0])), y = range([...points.map((p) => p[1]), d.noise]);
  const chart = canvas(PLOT, "Error against the magnitude of the reference", (g, width, height) => {
    const frame = { left: 46, right: width - 14, top: 20, bottom: height - 38 };
    const at = axes(g, frame, x, y, "|reference|", "|error|");
    noiseLine(g, frame, d.noise && at.y(LOG(d.noise)), false);
    g.save(); g.beginPath(); g.rect(frame.left, frame.top, frame.right - frame.left, frame.bottom - frame.top); g.clip();
    g.strokeStyle = colour("faint"); g.setLineDash([4, 3]); g.beginPath(); g.moveTo(at.x(x[0]), at.y(x[0])); g.lineTo(at.x(x[1]), at.y(x[1])); g.stroke(); g.restore();
    g.setLineDash([]); g.fillStyle = colour("accent"); g.globalAlpha = 0.55;
    for (const [a, b] of points) { g.beginPath(); g.arc(at.x(LOG(a)), at.y(LOG(b)), 2, 0, 7); g.fill(); }
    g.globalAlpha = 1;
  });
  return figure("Error against magnitude", chart, "Dashed: an error as large as the value", points.length < d.elements && `; ${count(points.length)} of ${count(d.elements, "element")}, the largest errors among them`);
}

function qq(d) {
  const points = (d.quantiles || []).filter(([a]) => a > 0);
  if (points.length < 3 || !points.some((p) => p[1] > 0)) return null;
  const both = range(points.flat());
  const chart = canvas(PLOT, "Quantiles of the error against those of rounding noise", (g, width, height) => {
    const frame = { left: 46, right: width - 14, top: 20, bottom: height - 38 };
    const x = range(points.map((p) => p[0])), at = axes(g, frame, x, both, "of rounding", "of the error");
    g.strokeStyle = colour("band-edge"); g.lineWidth = 1.5; g.beginPath(); g.moveTo(at.x(x[0]), at.y(x[0])); g.lineTo(at.x(x[1]), at.y(x[1])); g.stroke();
    g.fillStyle = colour("accent");
    for (const [a, b] of points) if (b > 0) { g.beginPath(); g.arc(at.x(LOG(a)), at.y(LOG(b)), 2.2, 0, 7); g.fill(); }
  });
  const last = points[points.length - 1], over = last[1] / last[0];
  return figure("Quantiles against the noise", chart, "Line: what rounding alone would give. The largest error here is ", over >= 1.5 ? `${number(over, 2)} times that` : "no more than that", ".");
}

function heatmap(d) {
  const h = d.heatmap;
  if (!h || !h.values.some((v) => v > 0)) return null;
  const [rows, columns] = h.shape, known = h.values.filter((v) => v > 0);
  const most = Math.max(...known), unit = explainedIn(d);
  const rowSize = Math.ceil(h.rows / rows), columnSize = Math.ceil(h.channels / columns);
  let at = null;
  const chart = canvas(PLOT, `Heatmap of the error over ${h.rows} rows and ${h.channels} channels. ${h.sentence || ""}`, (g, width, height) => {
    const frame = { left: 46, right: width - 14, top: 20, bottom: height - 38 };
    const w = (frame.right - frame.left) / columns, t = (frame.bottom - frame.top) / rows;
    at = { frame, w, t };
    h.values.forEach((v, k) => {
      const r = Math.floor(k / columns), c = k % columns;
      g.fillStyle = v === null ? unjudged() : v > 0 ? (unit ? byUnits(v / unit) : calm(1 + LOG(v / most) / 4)) : colour("grid");
      g.fillRect(frame.left + c * w, frame.top + r * t, Math.ceil(w), Math.ceil(t));
    });
    g.strokeStyle = colour("ink"); g.lineWidth = 2;
    for (const [axis, from, to] of h.hit || []) {
      if (axis === "row") g.strokeRect(frame.left, frame.top + from / rowSize * t, frame.right - frame.left, Math.max(3, (to + 1 - from) / rowSize * t));
      else g.strokeRect(frame.left + from / columnSize * w, frame.top, Math.max(3, (to + 1 - from) / columnSize * w), frame.bottom - frame.top);
    }
    g.fillStyle = colour("soft"); g.textBaseline = "top"; g.textAlign = "left"; g.fillText("rows", 0, 0); g.fillText("0", frame.left, frame.bottom + 5);
    g.textAlign = "right"; g.fillText(`channels ${h.channels - 1}`, frame.right, frame.bottom + 5); g.fillText("0", frame.left - 6, frame.top); g.textBaseline = "bottom"; g.fillText(String(h.rows - 1), frame.left - 6, frame.bottom);
  });
  chart.node.addEventListener("mousemove", (event) => {
    const box = chart.node.getBoundingClientRect();
    const c = Math.floor((event.clientX - box.left - at.frame.left) / at.w), r = Math.floor((event.clientY - box.top - at.frame.top) / at.t);
    if (c < 0 || r < 0 || c >= columns || r >= rows) { hideTip(); return; }
    const span = (k, size, end) => (size === 1 ? k : `${k * size}-${Math.min(end, (k + 1) * size) - 1}`);
    showTip(event, `row ${span(r, rowSize, h.rows)}, channel ${span(c, columnSize, h.channels)}: rms error ${number(h.values[r * columns + c])}${unit && h.values[r * columns + c] ? `, ${number(h.values[r * columns + c] / unit, 2)} times what is explained` : ""}`);
  });
  chart.node.addEventListener("mouseleave", hideTip);
  return figure("Where in the tensor", chart, unit ? `Root mean square error in units of what is explained, ${number(unit, 2)}: blue up to 1, orange to red from 1 to 1000; the largest is ${number(most / unit, 2)}` : `Root mean square error up to ${number(most, 2)}; nothing says what is explained`, h.sentence ? `. Framed: ${h.sentence}.` : ".");
}

// The root mean square error of an element that rounding and the inputs of its call explain. Of an input all is explained that came in.
function explainedIn(d) {
  const norm = d.reference?.[4], rms = norm > 0 && d.elements ? norm / Math.sqrt(d.elements) : 0;
  const share = d.slot.startsWith("input") ? C.incoming[d.call] : d.slot.includes(":") || d.slot.startsWith("param") ? 0 : C.noise[d.call];
  return Math.max(3 * (d.noise || 0), (share || 0) * rms);
}

function noiseLine(g, frame, at, upright) {
  if (!at) return;
  g.fillStyle = colour("band");
  if (upright) g.fillRect(frame.left, frame.top, Math.max(0, Math.min(at, frame.right) - frame.left), frame.bottom - frame.top);
  else { const top = Math.max(frame.top, at); g.fillRect(frame.left, top, frame.right - frame.left, Math.max(0, frame.bottom - top)); }
  g.strokeStyle = colour("band-edge"); g.lineWidth = 1.5;
  if (upright && at < frame.right) line(g, at, frame.top, at, frame.bottom);
  if (!upright && at > frame.top && at < frame.bottom) line(g, frame.left, at, frame.right, at);
}
function noiseWords(d) { return d.noise ? `; shaded: up to one standard deviation of rounding, ${number(d.noise, 2)} (${d.noise_from})` : ""; }
