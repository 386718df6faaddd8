// The first screen: what, where, why, how sure, the effect at the outputs, what next; beside it the code that is meant.
const MARKS = { same: "M4 12.5l5 5L20 6.5", different: "M12 3.5v11M12 19.4v.2", undecided: "M8.5 9a3.5 3.5 0 1 1 5.2 3.1c-1.2.7-1.7 1.4-1.7 2.6M12 19.4v.2" };

function answer() {
  const h = DATA.head, a = DATA.answer, first = a.findings[0], place = a.status === "same" ? null : placeOf(0);
  const mark = svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" });
  const path = svg("path", { d: MARKS[a.status], fill: "none", "stroke-width": 3.2, "stroke-linecap": "round", "stroke-linejoin": "round" });
  path.style.stroke = "currentColor";
  mark.append(path);
  const w = h.where, dots = (parts) => parts.filter(Boolean).map((part, k) => [k ? " \u00b7 " : "", part]);
  const where = w.name && [el("div", {}, dots([el("code", {}, w.name), w.type, w.source && el("code", {}, w.source)])), el("div", { class: "soft" }, dots([...w.more, first?.call >= 0 && el("button", { class: "plain", type: "button", onclick: () => openCall(first.call) }, "open the call")]))];
  const rows = [["Where", where], ["Why", h.why.length && [el("div", {}, sentence(h.why[0])), h.why.length > 1 && el("div", { class: "soft" }, h.why.slice(1).map(sentence).join(" "))]],
    ["How sure", (h.sure.length || h.seen) && [el("div", {}, h.sure.map((text, k) => [k ? "; " : "", k || a.status === "same" || !first ? text : el("b", {}, text)])), h.seen && el("div", { class: "soft" }, `Would have seen: ${h.seen}`)]],
    ["Effect", h.effect.length && el("div", {}, sentence(h.effect.join("; ")))],
    ["Next", h.next.length && [h.next.slice(0, 2).map(nextStep), h.next.length > 2 && el("details", { class: "small" }, el("summary", {}, `${count(h.next.length - 2)} more`), h.next.slice(2).map(nextStep))]]];
  return el("section", { class: `answer${place ? " with-place" : ""}`, id: "answer", "aria-labelledby": "answer-title" },
    el("div", { class: `status ${a.status}` }, mark, h.kind, el("span", { class: "soft", style: { "font-weight": "400" } }, `${h.names[1]} against ${h.names[0]}`)),
    el("h1", { id: "answer-title", tabindex: -1 }, h.sentence),
    el("dl", { class: "six" }, rows.filter(([, value]) => value && value.length !== 0).map(([title, value]) => [el("dt", {}, title), el("dd", {}, value)])),
    place,
    el("div", { class: "rest" }, h.coverage.length ? el("div", { class: "tiles", role: "group", "aria-label": "Coverage, in calls" }, h.coverage.map(([n, what]) => el("div", { class: (what === "unmatched" || what === "incomparable") && n !== "0" ? "alarm" : "" }, el("b", {}, n), el("span", {}, what)))) : null,
      ran()));
}
function nextStep(step) { return el("div", { class: "next" }, copyable(step.command), el("div", { class: "soft" }, step.decides && sentence(step.decides), step.fill_in && " Words in capitals are yours to fill in.")); }
// A sentence of a report, as it stands below a heading: a capital, unless a name of code begins it, and a full stop.
function sentence(text) { const whole = /^[\w.]*[._]\w|^\w+: \w+ is .* in the reference/.test(text) ? text : text.charAt(0).toUpperCase() + text.slice(1); return /[.!?]$/.test(whole) ? whole : `${whole}.`; }
// What was compared, a line for each side: what differs is marked. All conditions stand at the end of the page.
const VERSIONS = ["torch", "paddlepaddle", "onnxruntime", "transformers"];
function ran() {
  const known = DATA.sides.map((side) => new Map(side.facts || []));
  if (!known.some((facts) => facts.size)) return null;
  const settings = (facts, end) => [...new Set([...facts].filter(([k]) => k.endsWith(`: ${end}`)).map(([, v]) => v))].join(", ");
  // Of two frameworks that are installed, the one that ran.
  const used = (f, name) => f.has(name) && !(name === "torch" && settings(f, "paddle")) && !(name === "paddlepaddle" && settings(f, "torch")) && !(name === "transformers" && !settings(f, name));
  const parts = [
    (f) => f.get("kind"), (f) => settings(f, "parameter_dtypes"), (f) => f.get("devices") || settings(f, "devices"),
    ...VERSIONS.map((name) => (f) => used(f, name) && `${name} ${f.get(name)}`), (f) => f.get("commit") && `commit ${f.get("commit").replace(/^([0-9a-f]{12})[0-9a-f]+/, "$1")}`,
    (f) => f.get("command") && el("code", {}, f.get("command")), (f) => f.get("observer effect") && `observer effect: ${f.get("observer effect")}`,
  ];
  const plain = (part, facts) => { const said = part(facts); return said instanceof Node ? said.textContent : said || ""; };
  const alike = (part, [a, b]) => plain(part, a) === plain(part, b) || [a, b].every((facts) => /^(observer effect: none.*)?$/.test(plain(part, facts)));
  return el("dl", { class: "facts ran", "aria-label": "What was compared" }, DATA.sides.map((side, k) => [el("dt", {}, k ? "target" : "reference"),
    el("dd", {}, el("code", {}, side.path), parts.map((part) => plain(part, known[k]) && [" \u00b7 ", el("span", { class: alike(part, known) ? "" : "differs" }, part(known[k]))]))]));
}

// Why it is believed: each finding with its evidence, the first one opened.
function findings() {
  const list = DATA.answer.findings;
  if (!list.length) return null;
  const body = el("div", { class: "panel" });
  const tabs = list.slice(0, 30).map((f, k) => el("button", { type: "button", role: "tab", "aria-selected": "false", onclick: () => setLink({ finding: k || "" }) }, glyph(f.verdict), " ", list.filter((other) => other.name === f.name).length > 1 ? `${f.name} ${f.slot || f.op_type}` : f.name));
  const shown = () => Math.max(0, linked("finding", tabs.length));
  let now = -1;
  function show(k) {
    const f = list[k];
    now = k;
    tabs.forEach((tab, n) => tab.setAttribute("aria-selected", String(n === k)));
    body.replaceChildren(f.call >= 0 ? callView(f.call) : el("div", { class: "call" }, el("h2", {}, el("code", {}, f.name), " ", f.op_type), el("p", {}, f.sentence)));
    if (f.also?.length) body.append(el("p", { class: "soft", style: { "margin-top": "10px" } }, `The same in ${f.also.slice(0, 12).join(", ")}${f.also.length > 12 ? ` and ${count(f.also.length - 12)} more` : ""}.`));
  }
  onLink(() => { if (shown() !== now) show(shown()); });
  return section("why", "Why we believe it", "The error of its inputs, what rounding in this operator explains, and the error of its outputs.", list.length > 1 && el("div", { class: "tabs", role: "tablist" }, tabs, list.length > 30 && el("span", { class: "soft" }, `and ${count(list.length - 30)} more`)), body);
}
