const ANY = "any", DIFFERING = "differing";
// The two tables: calls and tensors, with one search and one filter that the link keeps.
function lists() {
  if (!CALLS) return null;
  const error = (key) => ({ right: true, width: "minmax(92px, .5fr)", text: (i) => number(C[key][i]), sort: (i) => C[key][i], raw: (i) => C[key][i] });
  const calls = [
    { key: "at", title: "#", width: "60px", right: true, text: (i) => String(i), sort: (i) => i },
    { key: "verdict", title: "verdict", width: "minmax(128px, .7fr)", text: verdict, sort: (i) => severity(verdict(i)), cell: (i) => chip(verdict(i)) },
    { key: "name", title: "call", width: "minmax(190px, 2.4fr)", text: name, cell: (i) => el("code", {}, name(i)) },
    { key: "type", title: "type", width: "minmax(100px, 1fr)", text: type },
    { key: "step", title: "step", width: "50px", right: true, text: (i) => String(C.step[i]), sort: (i) => C.step[i] },
    ...(GROUPS.ranks.length > 1 ? [{ key: "rank", title: "rank", width: "50px", right: true, text: (i) => String(C.rank[i]), sort: (i) => C.rank[i] }] : []),
    { key: "added", title: "introduced", ...error("added"), hint: "relative error that this call adds to exact arithmetic on the inputs it was given" }, { key: "error", title: "accumulated", ...error("error"), hint: "relative error of its outputs, with all that came before" },
    { key: "incoming", title: "came in", ...error("incoming"), hint: "relative error of its inputs" }, { key: "noise", title: "explained", ...error("noise"), hint: "largest relative error that rounding and the inputs explain" }, { key: "score", title: "of allowed", ...error("score"), hint: "error over what is allowed; above 1 it is flagged" },
  ];
  const text = (key) => (t) => S[T[key][t]];
  const figure = (key, digits) => ({ key, title: key, right: true, width: "minmax(92px, .6fr)", text: (t) => number(T[key][t], digits), sort: (t) => T[key][t], raw: (t) => T[key][t] });
  const tensors = [
    { key: "verdict", title: "verdict", width: "minmax(128px, .7fr)", text: (t) => verdict(T.call[t]), sort: (t) => severity(verdict(T.call[t])), cell: (t) => chip(verdict(T.call[t])) },
    { key: "name", title: "call", width: "minmax(180px, 2fr)", text: (t) => name(T.call[t]), cell: (t) => el("code", {}, name(T.call[t])) },
    { key: "slot", title: "slot", width: "minmax(90px, .8fr)", text: text("reference_slot") },
    { key: "step", title: "step", width: "50px", right: true, text: (t) => String(C.step[T.call[t]]), sort: (t) => C.step[T.call[t]] },
    { key: "reference", title: "reference", width: "minmax(130px, 1fr)", text: (t) => `${S[T.reference_dtype[t]]} ${S[T.reference_shape[t]]}` },
    { key: "target", title: "target", width: "minmax(130px, 1fr)", text: (t) => `${S[T.target_dtype[t]]} ${S[T.target_shape[t]]}` },
    figure("rel_l2", 3), figure("max_abs_err", 3), figure("cosine_similarity", 6),
    { key: "why", title: "note", width: "minmax(90px, 1fr)", text: (t) => (T.identical[t] ? "equal bits" : S[T.why[t]]) },
  ];
  const opened = () => linked("call", CALLS);
  const differing = CALLS - (TALLY.get("identical") || 0);
  const usual = differing ? DIFFERING : "";  // the table opens on what differs, the worst first
  const chosen = () => link.get("verdict") || usual;
  const matches = (i) => chosen() === "" || chosen() === ANY || (chosen() === DIFFERING ? verdict(i) !== "identical" : verdict(i) === chosen());
  const worse = (a, b) => severity(verdict(b)) - severity(verdict(a)) || a - b;
  const kinds = {
    calls: { columns: calls, rows: Array.from({ length: CALLS }, (_, i) => i), call: (i) => i },
    tensors: { columns: tensors, rows: Array.from({ length: T.call.length }, (_, t) => t), call: (t) => T.call[t] },
  };
  for (const [kind, one] of Object.entries(kinds)) {
    one.grid = grid(kind === "calls" ? "Calls" : "Tensors", one.columns, { open: (row) => openCall(one.call(row)), selected: (row) => one.call(row) === opened(), worse: (a, b) => worse(one.call(a), one.call(b)) });
    one.grid.sorted(({ key, down }) => setLink({ sort: `${down ? "-" : ""}${key}` }));
  }
  const find = el("input", { type: "search", id: "find", placeholder: "Search names, types, text", "aria-label": "Search", oninput: () => setLink({ find: find.value }) });
  const pick = (label, key, values) => {
    const box = el("select", { "aria-label": label, onchange: () => setLink({ [key]: box.value }) }, el("option", { value: "" }, `any ${label}`), values.map((v) => el("option", { value: v }, `${label} ${v}`)));
    return box;
  };
  const verdicts = el("select", { "aria-label": "verdict", onchange: () => setLink({ verdict: verdicts.value === usual ? "" : verdicts.value }) }, usual && el("option", { value: usual }, `differing (${count(differing)})`), el("option", { value: ANY }, `all (${count(CALLS)})`), VERDICTS.filter((v) => TALLY.has(v)).map((v) => el("option", { value: v }, `${v} (${count(TALLY.get(v))})`)));
  const steps = GROUPS.steps.length > 1 && pick("step", "step", GROUPS.steps), ranks = GROUPS.ranks.length > 1 && pick("rank", "rank", GROUPS.ranks);
  const said = el("span", { class: "end", role: "status" });
  const tabs = Object.keys(kinds).map((kind) => el("button", { type: "button", role: "tab", "data-kind": kind, onclick: () => setLink({ table: kind === "calls" ? "" : kind, sort: "" }) }, `${count(kinds[kind].rows.length)} ${kind}`));
  const body = el("div", {});
  const copied = el("button", { type: "button", onclick: () => copy(csv(now().columns, now().grid.rows), copied) }, "Copy as CSV");
  const now = () => kinds[link.get("table") === "tensors" ? "tensors" : "calls"];
  let known = "";

  onLink(() => {
    const kind = now(), wanted = (link.get("find") || "").toLowerCase(), sort = link.get("sort") || "";
    if (find.value !== (link.get("find") || "")) find.value = link.get("find") || "";
    verdicts.value = chosen() || ANY;
    if (steps) steps.value = link.get("step") || "";
    if (ranks) ranks.value = link.get("rank") || "";
    for (const tab of tabs) tab.setAttribute("aria-selected", String(kinds[tab.dataset.kind] === kind));
    const key = [kind === kinds.tensors, wanted, sort, chosen(), link.get("step"), link.get("rank")].join("\n");
    if (key === known) { kind.grid.refresh(); jump(kind); return; }
    known = key;
    body.replaceChildren(kind.grid.box);
    const has = (i) => matches(i) && (!link.get("step") || String(C.step[i]) === link.get("step")) && (!link.get("rank") || String(C.rank[i]) === link.get("rank"));
    const says = (i) => !wanted || `${name(i)}\n${type(i)}\n${S[C.sentence[i]]}\n${S[C.source[i]]}`.toLowerCase().includes(wanted);
    const matching = new Uint8Array(CALLS);
    for (let i = 0; i < CALLS; i++) matching[i] = has(i) ? (says(i) ? 2 : 1) : 0;
    const rows = kind === kinds.calls ? kind.rows.filter((i) => matching[i] === 2) : kind.rows.filter((t) => matching[T.call[t]] === 2 || (matching[T.call[t]] === 1 && `${S[T.reference_slot[t]]} ${S[T.why[t]]}`.toLowerCase().includes(wanted)));
    kind.grid.show(rows, { key: sort.replace(/^-/, ""), down: sort.startsWith("-") });
    said.textContent = rows.length === kind.rows.length ? "" : `${count(rows.length)} of ${count(kind.rows.length, kind === kinds.calls ? "call" : "tensor")}`;
    jump(kind);
  });
  function jump(kind) { const i = opened(); if (i >= 0) { const row = kind.grid.rows.find((r) => kind.call(r) === i); if (row !== undefined) kind.grid.reveal(row); } }
  nextCall = (by) => {
    const rows = kinds.calls.grid.rows.length && now() === kinds.calls ? kinds.calls.grid.rows : kinds.calls.rows;
    const at = rows.indexOf(opened());
    const next = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.max(0, Math.min(rows.length - 1, at + by))];
    if (next !== undefined) openCall(next);
  };
  return section("all", "All calls and tensors", el("span", {}, el("span", { class: "noprint" }, "The worst first. A link keeps search, filter, order, the opened call and what the chart shows."), el("span", { class: "printonly" }, "The first 50 rows are printed.")), el("div", { class: "controls" }, el("span", { class: "tabs", role: "tablist", style: { margin: "0" } }, tabs), find, verdicts, steps, ranks, copied, said), body);
}
let nextCall = () => {};
