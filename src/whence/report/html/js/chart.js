// A canvas that knows its size, is drawn again when that or the theme changes, and can be looked at without sight.
// over: what is drawn on top and changes often; `touch` draws it anew on the picture that is there.
function canvas(height, words, draw, over) {
  const node = el("canvas", { role: "img", "aria-label": words, style: { height: `${height}px` } });
  let picture = null;
  function redraw() {
    const width = node.clientWidth;
    if (!width) return;
    const ratio = Math.max(1, devicePixelRatio || 1);
    node.width = Math.round(width * ratio);
    node.height = Math.round(height * ratio);
    const g = node.getContext("2d");
    g.scale(ratio, ratio);
    g.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    draw(g, width, height);
    if (!over) return;
    picture = el("canvas", { width: node.width, height: node.height });
    picture.getContext("2d").drawImage(node, 0, 0);
    over(g);
  }
  function touch() {
    if (!picture) { redraw(); return; }
    const g = node.getContext("2d");
    g.save(); g.resetTransform(); g.clearRect(0, 0, node.width, node.height); g.drawImage(picture, 0, 0); g.restore();
    over(g);
  }
  let last = 0;
  new ResizeObserver(() => { if (node.clientWidth && node.clientWidth !== last) { last = node.clientWidth; redraw(); } if (!node.isConnected) drawn.delete(redraw); }).observe(node);
  drawn.add(redraw);
  return { node, redraw, touch };
}

const LOG = Math.log10;
function decades(low, high, most = 8) {
  const step = Math.max(1, Math.ceil((high - low) / most)), out = [];
  for (let k = Math.ceil(low / step) * step; k <= high; k += step) out.push(k);
  return out;
}
function ten(power) { return power === 0 ? "1" : power === 1 ? "10" : `1e${power}`; }

// Axes in powers of ten: grid, ticks and titles. frame: {left, top, right, bottom}; x, y: [low, high] in logs, or null for none.
function axes(g, frame, x, y, xTitle, yTitle) {
  const at = scales(frame, x, y);
  g.strokeStyle = colour("grid"); g.fillStyle = colour("soft"); g.lineWidth = 1;
  if (y) for (const k of decades(y[0], y[1], Math.max(2, (frame.bottom - frame.top) / 34))) {
    line(g, frame.left, at.y(k), frame.right, at.y(k));
    g.textAlign = "right"; g.textBaseline = "middle"; g.fillText(ten(k), frame.left - 6, at.y(k));
  }
  if (x) for (const k of decades(x[0], x[1], Math.max(2, (frame.right - frame.left) / 52))) {
    line(g, at.x(k), frame.top, at.x(k), frame.bottom);
    g.textAlign = "center"; g.textBaseline = "top"; g.fillText(ten(k), at.x(k), frame.bottom + 5);
  }
  g.textBaseline = "top";
  if (xTitle) { g.textAlign = "right"; g.fillText(xTitle, frame.right, frame.bottom + 20); }
  if (yTitle) { g.textAlign = "left"; g.fillText(yTitle, 0, 0); }
  return at;
}
function scales(frame, x, y) {
  const over = (a, b) => (b - a) || 1;
  return {
    x: x && ((k) => frame.left + (k - x[0]) / over(x[0], x[1]) * (frame.right - frame.left)),
    y: y && ((k) => frame.bottom - (k - y[0]) / over(y[0], y[1]) * (frame.bottom - frame.top)),
  };
}
function line(g, x1, y1, x2, y2) { g.beginPath(); g.moveTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5); g.lineTo(Math.round(x2) + 0.5, Math.round(y2) + 0.5); g.stroke(); }
function range(values, least = 1) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v > 0) { low = Math.min(low, v); high = Math.max(high, v); }
  if (low === Infinity) return [-8, 0];
  const a = Math.floor(LOG(low) - 0.05), b = Math.ceil(LOG(high) + 0.05);
  return [a, Math.max(b, a + least)];
}
