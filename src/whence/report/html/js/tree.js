// The module tree, coloured by the worst verdict below each name; a selected call shows what it depends on and what depends on it.
let showInTree = () => {};

function tree() {
  if (!CALLS) return null;
  const worst = new Array(CALLS).fill(0), total = new Array(CALLS).fill(1);
  for (let i = CALLS - 1; i >= 0; i--) {
    worst[i] = Math.max(worst[i], severity(verdict(i)));
    if (C.parent[i] >= 0) { worst[C.parent[i]] = Math.max(worst[C.parent[i]], worst[i]); total[C.parent[i]] += total[i]; }
  }
  const open = new Set();
  const interesting = (i) => GUILTY.has(SEVERITY[worst[i]]);
  for (let i = 0; i < CALLS && open.size < 300; i++) if (KIDS[i].length && interesting(i) && C.step[i] === (DATA.answer.findings[0]?.step ?? C.step[0])) open.add(i);
  if (!open.size && ROOTS.length) open.add(ROOTS[0]);
  let focus = -1, follow = "", along = null, limit = 200, above = new Set();
  const box = el("div", { class: "tree", role: "tree", "aria-label": "Modules" });
  const said = el("span", { class: "end" });

  function rows(list, level) {
    const chosen = list.length > limit ? list.findIndex((i) => i === focus || above.has(i)) : -1;
    const from = chosen >= limit ? Math.max(0, chosen - 40) : 0, cut = list.slice(from, from + limit);
    const more = (hidden, words) => hidden > 0 ? el("div", { class: "empty" }, el("button", { class: "plain", type: "button", onclick: () => { limit *= 5; draw(); } }, `${count(hidden)} more ${words}`)) : null;
    return [more(from, "before"), ...cut.map((i) => {
      const kids = KIDS[i].length, isOpen = open.has(i);
      const short = C.parent[i] >= 0 && name(i).startsWith(`${name(C.parent[i])}.`) ? name(i).slice(name(C.parent[i]).length + 1) : name(i);
      const state = SEVERITY[worst[i]];
      const row = el("div", { class: `row${i === focus ? " on" : ""}${along && !along.has(i) && i !== focus ? " dim" : ""}${state === "identical" ? " quiet" : ""}`, style: { "padding-left": `${10 + level * 17}px` }, onclick: (event) => {
        if (kids && event.target.closest(".tw")) { toggle(i); return; }
        openCall(i);
      } }, el("span", { class: "tw" }, kids ? (isOpen ? "▾" : "▸") : ""), el("span", { class: "glyph" }, glyph(state)), el("code", {}, short), el("span", { class: "soft" }, type(i)), where(i) && level === 0 ? el("span", { class: "soft" }, where(i)) : null,
      state !== "identical" && state !== verdict(i) ? el("span", { class: "soft" }, `${state} inside`) : el("span", { class: "soft" }, verdict(i)), el("span", { class: "num" }, C.error[i] ? number(C.error[i]) : C.error[i] === 0 ? "equal" : "unknown"));
      return el("div", { role: "treeitem", "aria-level": level + 1, "aria-expanded": kids ? String(isOpen) : null, "data-call": i, tabindex: -1 }, row, kids && isOpen ? el("div", { role: "group" }, rows(KIDS[i], level + 1)) : null);
    }), more(list.length - from - cut.length, "after")];
  }
  function draw() {
    above = new Set();
    for (let up = focus >= 0 ? C.parent[focus] : -1; up >= 0; up = C.parent[up]) above.add(up);
    box.replaceChildren(...rows(ROOTS, 0).filter(Boolean));
    (box.querySelector(".row.on")?.parentNode || box.firstElementChild)?.setAttribute?.("tabindex", "0");
  }
  function toggle(i) { if (open.has(i)) open.delete(i); else open.add(i); draw(); box.querySelector(`[data-call="${i}"]`)?.focus(); }
  function unfold(i) { for (let up = C.parent[i]; up >= 0; up = C.parent[up]) open.add(up); }
  function choose(kind) {
    follow = follow === kind ? "" : kind;
    for (const b of buttons) b.setAttribute("aria-pressed", String(b.dataset.kind === follow));
    update();
  }
  function update() {
    along = null;
    if (focus >= 0 && follow) {
      along = follow === "up" ? upstream(focus) : downstream(focus);
      said.textContent = `${count(along.size, "call")} ${follow === "up" ? "before" : "after"} ${name(focus)}, ${count([...along].filter((i) => GUILTY.has(verdict(i))).length)} at fault`;
      for (const i of [...along].slice(0, 400)) unfold(i);
    } else said.textContent = focus >= 0 ? name(focus) : "";
    draw();
  }
  const buttons = [["up", "What it depends on"], ["down", "What depends on it"]].map(([kind, words]) => el("button", { type: "button", "aria-pressed": "false", "data-kind": kind, onclick: () => { if (focus < 0) focus = DATA.answer.findings[0]?.call ?? -1; choose(kind); } }, words));
  box.addEventListener("keydown", (event) => {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    const i = Number(item.dataset.call), all = [...box.querySelectorAll("[role=treeitem]")], at = all.indexOf(item);
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (move) all[at + move]?.focus();
    else if (event.key === "ArrowRight" && KIDS[i].length && !open.has(i)) toggle(i);
    else if (event.key === "ArrowLeft") { if (open.has(i)) toggle(i); else if (C.parent[i] >= 0) box.querySelector(`[data-call="${C.parent[i]}"]`)?.focus(); }
    else if (event.key === "Enter") openCall(i);
    else return;
    event.preventDefault();
  });
  listeners.push(() => {
    const i = linked("call", CALLS);
    if (i < 0 || i === focus) return;
    focus = i;
    unfold(i);
    update();
  });
  showInTree = (i) => {
    if (i < 0) return;
    focus = i; unfold(i); update();
    setLink({ call: "" });
    box.querySelector(".row.on")?.scrollIntoView({ block: "center" });
    document.getElementById("modules").scrollIntoView();
  };
  // The page is not in the document yet: what is found first is scrolled to when the tree has a size.
  new ResizeObserver((_, once) => { once.disconnect(); const on = box.querySelector(".row.on"); if (on) box.scrollTop = on.offsetTop - box.offsetTop - box.clientHeight / 2; }).observe(box);
  focus = linked("call", CALLS);
  if (focus < 0) focus = DATA.answer.findings[0]?.call ?? -1;
  if (focus >= 0) unfold(focus);
  update();
  return section("modules", "Modules and data flow", "Each name has the mark of the worst verdict at or below it. Follow a call's error back to what it depends on, or on to what depends on it.",
    el("div", { class: "controls" }, buttons, el("button", { type: "button", onclick: () => { open.clear(); draw(); } }, "Collapse all"), el("button", { type: "button", onclick: () => { for (let i = 0; i < CALLS && open.size < 2000; i++) if (KIDS[i].length) open.add(i); draw(); } }, "Expand all"), said), box);
}
