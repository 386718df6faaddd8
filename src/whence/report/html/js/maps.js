// Rank by layer, and step by layer: the largest error of each name there, with a frame where something is introduced.
function maps() {
  const out = [];
  if (C.error.every((e) => e === 0)) return null;
  if (GROUPS.ranks.length > 1) out.push(layerMap("rank", C.rank, GROUPS.ranks));
  if (GROUPS.steps.length > 1) out.push(layerMap("step", C.step, GROUPS.steps));
  return out.length ? section("maps", GROUPS.ranks.length > 1 ? "By rank, step and layer" : "By step and layer", "The worst call of every name there, in the colours of the scale; framed where an error is introduced. A click opens the call.", scaleLegend(["equal", "calm", "passed", "alarm", "unknown"]), out) : null;
}

function layerMap(what, column, values) {
  const names = nameOrder();
  const wide = Math.min(names.size, 480), per = Math.ceil(names.size / wide), columns = Math.ceil(names.size / per);
  const tall = Math.min(values.length, 64), each = Math.ceil(values.length / tall), rows = Math.ceil(values.length / each);
  const place = new Map(values.map((v, k) => [v, Math.floor(k / each)]));
  const cells = new Array(rows * columns).fill(-1);
  const worse = (a, b) => b < 0 || GUILTY.has(verdict(a)) - GUILTY.has(verdict(b)) > 0 || (GUILTY.has(verdict(a)) === GUILTY.has(verdict(b)) && (C.error[a] || 0) > (C.error[b] || 0));
  for (const i of SHOWN) {
    const k = place.get(column[i]) * columns + Math.floor(names.get(C.name[i]) / per);
    if (worse(i, cells[k])) cells[k] = i;
  }
  const known = cells.filter((i) => i >= 0 && C.error[i] > 0).map((i) => C.error[i]);
  const height = Math.max(90, Math.min(420, rows * 22 + 44));
  let at = null;
  const chart = canvas(height, `Largest error by ${what} (${rows}) and layer (${columns})`, (g, width, full) => {
    const frame = { left: 54, right: width - 8, top: 6, bottom: full - 22 }, w = (frame.right - frame.left) / columns, t = (frame.bottom - frame.top) / rows;
    at = { frame, w, t };
    cells.forEach((i, k) => {
      const x = frame.left + (k % columns) * w, y = frame.top + Math.floor(k / columns) * t;
      g.fillStyle = i < 0 ? colour("bg") : callColour(i);
      g.fillRect(x, y, Math.max(1, w - (w > 5 ? 1 : 0)), Math.max(1, t - (t > 5 ? 1 : 0)));
    });
    g.strokeStyle = colour("introduced"); g.lineWidth = 2;
    cells.forEach((i, k) => { if (i >= 0 && GUILTY.has(verdict(i))) g.strokeRect(frame.left + (k % columns) * w - 0.5, frame.top + Math.floor(k / columns) * t - 0.5, Math.max(4, w), Math.max(4, t)); });
    g.fillStyle = colour("soft"); g.textAlign = "right"; g.textBaseline = "middle";
    const skip = Math.ceil(14 / t);
    for (let r = 0; r < rows; r += skip) g.fillText(`${what} ${values[r * each]}`, frame.left - 6, frame.top + (r + 0.5) * t);
    g.textBaseline = "top"; g.textAlign = "left"; g.fillText("first layer", frame.left, frame.bottom + 6); g.textAlign = "right"; g.fillText(`last of ${count(names.size, "name")}`, frame.right, frame.bottom + 6);
  });
  const under = (event) => {
    const box = chart.node.getBoundingClientRect(), c = Math.floor((event.clientX - box.left - at.frame.left) / at.w), r = Math.floor((event.clientY - box.top - at.frame.top) / at.t);
    return c >= 0 && r >= 0 && c < columns && r < rows ? cells[r * columns + c] : -1;
  };
  chart.node.addEventListener("mousemove", (event) => { const i = under(event); chart.node.style.cursor = i >= 0 ? "pointer" : "default"; if (i < 0) hideTip(); else showTip(event, el("b", {}, name(i)), ` ${what} ${column[i]}: ${verdict(i)}, error ${number(C.error[i])}${units(i) === null ? "" : `, ${number(units(i), 2)} times what is explained`}`); });
  chart.node.addEventListener("mouseleave", hideTip);
  chart.node.addEventListener("click", (event) => { const i = under(event); if (i >= 0) openCall(i); });
  return figure(`${what} by layer`, chart, known.length ? `Relative errors from ${number(Math.min(...known), 2)} to ${number(Math.max(...known), 2)}.` : "No call differs.");
}
