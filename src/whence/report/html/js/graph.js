// The calls of one run of a model as boxes: calls in one row do not depend on each other, lines are tensors that are handed on. A call that
// holds others opens in place. Only what is open is drawn. Where the runs differ in structure, both stand side by side.
const BESIDE = 40;  // calls of one container that are drawn around the one that matters
let flows = null;

// By container: `links`, pairs of calls in it of which one reads what the other made; `taken`, calls in it whose tensors its own code reads;
// `given`, calls in it that read what its own code made.
function lifted() {
  if (flows) return flows;
  flows = { links: new Map(), taken: new Map(), given: new Map() };
  const depth = new Int32Array(CALLS);
  const put = (map, key, value) => { if (!map.has(key)) map.set(key, new Set()); map.get(key).add(value); };
  for (let i = 0; i < CALLS; i++) depth[i] = C.parent[i] >= 0 ? depth[C.parent[i]] + 1 : 0;
  for (let i = 0; i < CALLS; i++) for (const maker of C.reads[i]) {
    let a = maker, b = i, belowA = -1, belowB = -1;
    while (depth[a] > depth[b]) { belowA = a; a = C.parent[a]; }
    while (depth[b] > depth[a]) { belowB = b; b = C.parent[b]; }
    if (a === b) { if (belowB >= 0) put(flows.given, a, belowB); else if (belowA >= 0) put(flows.taken, a, belowA); continue; }
    while (C.parent[a] !== C.parent[b]) { a = C.parent[a]; b = C.parent[b]; }
    put(flows.links, b, a);
  }
  return flows;
}

// What stands in a container. A box is a call of both runs (its place) or one that only this side has (-1 - its number).
function members(side, code) {
  const kids = code >= 0 ? KIDS[code] : [], alone = [];
  DATA.unpaired.forEach((u, k) => { if (u.side === side && (code >= 0 ? u.inside < 0 && u.parent === code : u.inside === -1 - code)) alone.push([u.after, -1 - k]); });
  if (!alone.length) return kids;
  const of = (after) => alone.filter(([at]) => at === after).map(([, k]) => k);
  const out = [...of(-1), ...kids.flatMap((kid) => [kid, ...of(kid)])];
  return [...out, ...alone.map(([, k]) => k).filter((k) => !out.includes(k))];
}

// Rows of boxes, and what each box reads: it stands below everything that it reads. What a container's own code makes comes from the calls
// whose tensors this code read since it last made something.
function rowsOf(side, code, list) {
  const here = new Set(list), { links, taken, given } = lifted(), reads = new Map(), level = new Map(), rows = [];
  let pending = [];
  for (const box of list) {
    const from = new Set(box >= 0 ? links.get(box) : DATA.unpaired[-1 - box].reads);
    if (box >= 0) {
      DATA.unpaired.forEach((u, k) => { if (u.side === side && u.readers.includes(box)) from.add(-1 - k); });
      if (given.get(code)?.has(box)) { for (const one of pending) from.add(one); pending = pending.slice(-1); }
      if (taken.get(code)?.has(box)) pending.push(box);
    }
    // What goes through a call that only this side has does not go directly.
    const detour = (maker) => DATA.unpaired.some((u, k) => u.side === side && from.has(-1 - k) && u.reads.includes(maker));
    reads.set(box, [...from].filter((maker) => here.has(maker) && maker !== box && !(maker >= 0 && detour(maker))));
  }
  const linked = [...reads.values()].some((makers) => makers.length);
  list.forEach((box, k) => {
    const above = reads.get(box).map((maker) => level.get(maker) ?? -1);
    const at = linked ? Math.max(-1, ...above) + 1 : k;  // of a dump that tells no data flow the order is all that is known
    level.set(box, at);
    (rows[at] = rows[at] || []).push(box);
  });
  return [rows.filter(Boolean), reads];
}

function graph() {
  if (CALLS < 2 || !ROOTS.length || ROOTS.length === CALLS) return null;
  let first = DATA.answer.findings[0]?.call ?? -1;
  if (first < 0) for (let i = 0; i < CALLS; i++) if (TELLING.has(verdict(i)) && (first < 0 || severity(verdict(i)) > severity(verdict(first)) || (verdict(i) === verdict(first) && C.parent[i] === first))) first = i;
  const rootOf = (i) => { while (C.parent[i] >= 0) i = C.parent[i]; return i; };
  const roots = ROOTS.filter((i) => KIDS[i].length);
  if (!roots.length) return null;
  let root = first >= 0 && KIDS[rootOf(first)].length ? rootOf(first) : roots[0];
  const open = new Map(), range = new Map();
  const box = el("div", { class: "graphs" });
  const worst = new Map();
  function inside(i) {
    if (!worst.has(i)) { let v = severity(verdict(i)); for (const kid of KIDS[i]) v = Math.max(v, inside(kid)); worst.set(i, v); }
    return worst.get(i);
  }
  function reset() { open.clear(); range.clear(); open.set(root, true); for (let up = first; up >= 0; up = C.parent[up]) if (KIDS[up].length && rootOf(up) === root) open.set(up, true); }

  function node(side, code) {
    if (code < 0) {
      const u = DATA.unpaired[-1 - code];
      return el("div", { class: "box alone" }, el("div", { class: "line" }, el("code", {}, last(u.name, u.parent >= 0 ? name(u.parent) : "")), el("span", { class: "soft" }, u.op_type)), el("div", { class: "soft" }, `only in the ${side}`), inner(side, code));
    }
    const kids = KIDS[code].length, isOpen = kids > 0 && open.get(code), v = verdict(code), state = kids && !isOpen ? SEVERITY[inside(code)] : v;
    const label = side === "target" && S[C.target_name[code]] ? S[C.target_name[code]] : name(code);
    const paint = () => { item.style.setProperty("--tint", kids && isOpen ? "var(--line)" : GUILTY.has(state) && !GUILTY.has(v) ? alarming(1000) : callColour(code)); };
    const words = kids && !isOpen && state !== v ? `${state} inside` : v;
    const item = el("div", { class: `box${isOpen ? " open" : ""}${GUILTY.has(state) && !isOpen ? " fault" : ""}${code === first ? " first" : ""}`, "data-box": `${side}${code}` },
      el("div", { class: "line" }, kids > 0 && el("button", { type: "button", class: "fold", "aria-expanded": String(Boolean(isOpen)), "aria-label": `${isOpen ? "Fold" : "Unfold"} ${label}`, onclick: () => { open.set(code, !isOpen); draw(`${side}${code}`); } }, isOpen ? "\u25be" : "\u25b8"),
        glyph(state), el("button", { class: "plain", type: "button", onclick: () => openCall(code) }, el("code", {}, last(label, C.parent[code] >= 0 ? name(C.parent[code]) : ""))), el("span", { class: "soft" }, type(code))),
      !isOpen && el("div", { class: "soft" }, words, C.error[code] > 0 && ` \u00b7 error ${number(C.error[code])}`, kids > 0 && ` \u00b7 ${count(members(side, code).length, "call")}`), isOpen && inner(side, code));
    paint(); paints.push(paint);
    return item;
  }
  function last(whole, outer) { return outer && whole.startsWith(`${outer}.`) ? whole.slice(outer.length + 1) : whole; }
  function inner(side, code) {
    const every = members(side, code);
    if (!every.length) return null;
    // Of a long list what is drawn lies around the call that matters.
    let list = every, from = 0, to = every.length;
    if (every.length > 2 * BESIDE) {
      const at = Math.max(0, every.findIndex((k) => k >= 0 && GUILTY.has(SEVERITY[inside(k)])));
      [from, to] = range.get(`${side}${code}`) || [Math.max(0, at - BESIDE / 2), Math.min(every.length, at + BESIDE)];
      list = every.slice(from, to);
    }
    const more = (hidden, words, change) => hidden > 0 && el("button", { type: "button", class: "plain more", onclick: () => { range.set(`${side}${code}`, change()); draw(); } }, `${count(hidden)} more ${words}`);
    const [rows, reads] = rowsOf(side, code, list), shape = el("div", { class: "inner" });
    const nodes = new Map();
    const lines = svg("svg", { class: "wires", "aria-hidden": "true" });
    add(shape, [lines, more(from, "before", () => [Math.max(0, from - BESIDE), to]), rows.map((row) => el("div", { class: "layer" }, row.map((k) => { const one = node(side, k); nodes.set(k, one); return one; }))), more(every.length - to, "after", () => [from, Math.min(every.length, to + BESIDE)])]);
    wires.push(() => wire(shape, lines, nodes, reads));
    return shape;
  }
  // Lines from the foot of who made a tensor to the head of who reads it; around what stands between.
  function wire(shape, lines, nodes, reads) {
    const frame = shape.getBoundingClientRect();
    if (!frame.width) return;
    lines.setAttribute("width", frame.width); lines.setAttribute("height", frame.height);
    lines.replaceChildren();
    for (const [to, makers] of reads) for (const from of makers) {
      const a = nodes.get(from)?.getBoundingClientRect(), b = nodes.get(to)?.getBoundingClientRect();
      if (!a || !b) continue;
      const x1 = a.left + a.width / 2 - frame.left, y1 = a.bottom - frame.top, x2 = b.left + b.width / 2 - frame.left, y2 = b.top - frame.top;
      const far = [...nodes.values()].some((n) => { const r = n.getBoundingClientRect(); return r.top - frame.top > y1 && r.bottom - frame.top < y2 && r.left - frame.left < Math.max(x1, x2) && r.right - frame.left > Math.min(x1, x2); });
      const bend = Math.min(24, Math.max(6, (y2 - y1) / 2)), side = Math.min(...[...nodes.values()].map((n) => n.getBoundingClientRect().left)) - frame.left - 8;
      const d = far ? `M${a.left - frame.left},${y1 - 12}C${side},${y1 - 12} ${side},${y1} ${side},${y1 + 12}V${y2 - 4}C${side},${y2 + 8} ${side},${y2 + 12} ${b.left - frame.left},${y2 + 12}` : `M${x1},${y1}C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`;
      const bad = from >= 0 && (GUILTY.has(verdict(from)) || verdict(from) === "inherited");
      lines.append(svg("path", { d, class: bad ? "bad" : "" }));
    }
  }
  let wires = [], paints = [];
  const differs = DATA.unpaired.length > 0;
  function draw(focus) {
    wires = []; paints = [];
    const sides = differs ? ["reference", "target"] : ["both"];
    box.replaceChildren(...sides.map((side) => el("div", { class: "graph", tabindex: 0, role: "group", "aria-label": side === "both" ? "Module graph" : `Module graph of the ${side}` }, side !== "both" && el("h3", {}, side), node(side, root))));
    if (focus) box.querySelector(`[data-box="${focus}"] .fold`)?.focus();
    rewire();
  }
  function rewire() { for (const one of wires) one(); }
  reset();
  const pick = roots.length > 1 && el("select", { "aria-label": "model call", onchange: () => { root = Number(pick.value); reset(); draw(); } }, roots.slice(0, 400).map((i) => el("option", { value: i, selected: i === root }, `${name(i)}${where(i) ? `, ${where(i)}` : ""}`)));
  // Nothing is drawn before it comes into view.
  let begun = false;
  new IntersectionObserver((seen, once) => { if (seen.some((s) => s.isIntersecting) && !begun) { begun = true; once.disconnect(); draw(); } }, { rootMargin: "400px" }).observe(box);
  new ResizeObserver(() => { if (begun) rewire(); }).observe(box);
  drawn.add(() => { for (const one of paints) one(); });
  addEventListener("beforeprint", () => { if (!begun) { begun = true; draw(); } });
  return section("graph", "Module graph", `${differs ? "Both runs, side by side: they differ in structure. " : ""}Calls from top to bottom; a line is a tensor that one hands to another. The fault is lit, and what only inherits its error is shaded.`,
    el("div", { class: "controls" }, pick && el("label", {}, "call of the model ", pick), el("button", { type: "button", onclick: () => { reset(); draw(); } }, "Unfold to the fault"), el("button", { type: "button", onclick: () => { open.clear(); open.set(root, true); draw(); } }, "Fold all")), scaleLegend(["equal", "calm", "passed", "alarm", "unknown"]), box);
}
