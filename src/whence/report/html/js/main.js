// The page in the order of its answers: same or not; where it starts; why we believe it; how far it matters; what else was seen.
function start() {
  const band = C.noise.some((n) => n > 0);
  if (CALLS && C.error.every((e) => e === 0)) return section("start", "The error along the run", "", el("p", {}, `${COUNTED.length === 1 ? "The only call" : `Each of ${count(COUNTED.length, "call")}`} returned what the reference returned, bit for bit.`));
  return CALLS ? section("start", DATA.answer.findings.length ? "Where it starts" : "The error along the run", `Every call in the order of execution.${band ? " The shaded band is the error explained by rounding and by the call's inputs." : ""} Hover for numbers, click for details.`, runChart()) : null;
}

function matters() {
  const first = DATA.answer.findings[0]?.call ?? -1, lines = DATA.head.effect.map(sentence);
  if (first >= 0) {
    const behind = downstream(first), hit = [...behind].filter((i) => C.error[i] > 0), unknown = [...behind].filter((i) => C.error[i] === null).length, inherit = hit.filter((i) => verdict(i) === "inherited").length;
    const depends = behind.size === 1 ? "depends" : "depend", differ = hit.length === 1 ? "differs" : "differ";
    lines.push(behind.size ? `${count(behind.size, "call")} ${depends} on ${name(first)} of step ${C.step[first]}. ${count(hit.length)} of them ${differ}, ${count(inherit)} only because of ${inherit === 1 ? "its" : "their"} inputs${unknown ? `; ${count(unknown)} could not be measured` : ""}.` : `No other call depends on ${name(first)} of step ${C.step[first]}.`);
  }
  const tally = VERDICTS.filter((v) => TALLY.has(v)).map((v) => chip(v, `${v} ${count(TALLY.get(v))}`));
  return lines.length || tally.length ? section("matters", "How far it matters", "", el("ul", { class: "bullets" }, lines.map((text) => el("li", {}, text))), el("div", { class: "legend", style: { "margin-top": "6px" } }, tally)) : null;
}

// The quantised layers, what costs most first: their own loss, and what leaving each in float brings.
function quantised() {
  const costs = DATA.answer.layer_costs;
  if (!costs.length) return null;
  const share = (part) => (part === undefined || part === null ? "" : `${number(100 * part, 3)} %`);
  const call = (layer) => { const names = new Set([layer.name, ...layer.name.split("+")]); return COUNTED.find((i) => names.has(name(i))) ?? -1; };
  const row = (layer) => { const at = call(layer), title = el("code", {}, layer.node || layer.name); return el("tr", {}, el("td", {}, at < 0 ? title : el("button", { class: "plain", type: "button", onclick: () => openCall(at) }, title)), el("td", {}, layer.op_type), [number(layer.sqnr_db, 3), share(layer.explains), share(layer.weights_explain), share(layer.measured), share(layer.saturated || 0), share(layer.range_used)].map((text) => el("td", { class: "r" }, text)), el("td", {}, layer.left_in_float && "leave in float")); };
  const omitted = DATA.omitted_layers;
  return section("quantised", "Quantised layers", "What leaving a layer in float removes of the squared error at the outputs: by replay, by replay where only the quantiser leaves it out, and measured by whence recipe.", scroller("Quantised layers", el("table", { class: "flat" }, headRow(["layer", "type", "SQNR, dB", "removes", "left out", "measured", "clipped", "range used", "(chosen)"], (k) => k > 1 && k < 8), el("tbody", {}, costs.map(row)))), omitted > 0 && el("p", { class: "soft small" }, `${count(omitted)} more in layers.csv`));
}

function seen() {
  const a = DATA.answer, items = [];
  const put = (title, list, most = 12) => { if (list?.length) items.push(el("div", {}, el("h3", {}, title), el("ul", { class: "bullets" }, list.slice(0, most).map((text) => el("li", {}, text)), list.length > most && el("li", { class: "soft" }, `${count(list.length - most)} more in summary.json`)))); };
  put("Inputs that differ", a.inputs_differ);
  put("Not on this page", DATA.missing);
  put("Conditions that differ", a.environment);
  put("Programs", a.programs);
  put("Notes", a.notes);
  put("Declared or lost precision", a.declared.map((d) => `${d.declared ? "declared" : "not declared"}: ${count(d.calls, "call")}, ${d.what}${d.sqnr_db !== null && d.sqnr_db !== undefined ? `; SQNR from ${number(d.sqnr_db)} dB, worst ${d.worst}` : ""}`));
  if (a.repetition) put("Repetition of the reference", [`${count(a.repetition.runs.length, "further run")}: ${a.repetition.calls ? `${count(a.repetition.calls, "call")} do not repeat (${a.repetition.names.slice(0, 6).join(", ")}), by ${number(a.repetition.own)}` : "every call repeats on equal inputs"}`]);
  if (a.third) put("Third run", [`the target is off by ${number(a.third.target_err)}, the reference by ${number(a.third.reference_err)}; closer in ${count(a.third.closer)} of ${count(a.third.calls, "region")}`]);
  for (const [side, names] of Object.entries(a.without_partner)) put(side === "ambiguous" ? "Several partners, none chosen" : `Only in the ${side}`, names, 20);
  put("Nearest to those", a.nearest.map((n) => `${n.name}: ${n.candidate} (${n.why})`));
  put("Alignment", DATA.aligned, 6);
  return items.length ? section("seen", "What else was seen", "", el("div", { class: "split" }, items)) : null;
}

function sides() {
  const [left, right] = DATA.sides, names = [...new Map([...(left.facts || []), ...(right.facts || [])])].map(([k]) => k);
  const of = (side) => new Map(side.facts || []), a = of(left), b = of(right), differing = new Set(left.differing || []);
  const row = (k) => el("tr", {}, el("td", { class: "soft" }, k), el("td", {}, a.get(k) || ""), el("td", { class: differing.has(k) ? "differs" : "" }, b.get(k) || "", differing.has(k) && el("span", { class: "soft" }, " (differs)")));
  const main = names.filter((k) => (differing.has(k) && a.has(k) && b.has(k)) || ["kind", "command", "commit", "seed", "devices", "torch", "started", "capture ended", "observer effect"].includes(k) || / (parameter_dtypes|devices|attention|autocast)$/.test(k)), rest = names.filter((k) => !main.includes(k));
  const table = (list, head) => scroller("What was compared", el("table", { class: "flat" }, head, el("tbody", {}, list.map(row))));
  const head = [headRow(["(condition)", "reference", "target"]), el("tbody", {}, el("tr", {}, el("td", { class: "soft" }, "path"), el("td", {}, el("code", {}, left.path)), el("td", {}, el("code", {}, right.path))))];
  return section("sides", "What was compared", "", el("div", { class: "panel" }, table(main, head), rest.length ? el("details", { class: "small" }, el("summary", {}, `${count(rest.length)} more conditions, equal on both sides or known of one`), table(rest)) : null,
    el("p", { class: "soft small", style: { "margin-top": "8px" } }, `whence ${DATA.answer.versions.whence || ""}`), DATA.commands.compare.map((c) => copyable(c))));
}

const help = helpBox();
const parts = [answer(), start(), findings(), matters(), tokens(), quantised(), maps(), graph(), tree(), seen(), lists(), sides()].filter(Boolean);
const titles = { start: "Where", why: "Why", matters: "How far", tokens: "Tokens", quantised: "Layers", maps: "By step", graph: "Graph", modules: "Tree", seen: "Else", all: "Table", sides: "Runs" };
const jump = (p, done) => el("a", { href: `#${p.id}-title`, onclick: (event) => { event.preventDefault(); done(); p.scrollIntoView(); document.getElementById(`${p.id}-title`).focus({ preventScroll: true }); } }, titles[p.id]);
const listed = parts.filter((p) => titles[p.id]);
// On a narrow screen the sections are behind one button.
const menu = el("details", { class: "menu" }, el("summary", {}, "Sections"), el("nav", { "aria-label": "Sections, as a list" }, listed.map((p) => jump(p, () => { menu.open = false; }))));
add(document.getElementById("app"), [
  el("header", { class: "bar" }, el("b", {}, "whence"), el("nav", { "aria-label": "Sections" }, listed.map((p) => jump(p, () => {}))), menu, el("button", { type: "button", onclick: switchTheme, title: "Light or dark (t)" }, "Light / dark"), el("button", { type: "button", onclick: () => help.showModal(), "aria-label": "Keyboard help" }, "?")),
  el("main", {}, parts), drawer(), tip, help,
]);
// Charts are drawn for the width of paper, so that their words keep their size.
addEventListener("beforeprint", () => { document.documentElement.classList.add("printing"); applyTheme("light"); });
addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); applyTheme(); });
keys(help);
document.documentElement.dataset.ready = String(Math.round(performance.now()));
