// Where a finding stands: lines of the user's code, and the operators of both programs with the difference marked.
function excerpt(e) {
  const other = e.side === "reference" ? "the reference's code" : "";
  return el("figure", { class: "code" }, el("figcaption", {}, el("code", {}, `${e.file}:${e.line}`), other && el("span", {}, ` (${other})`), e.changed && el("span", { class: "warn" }, " The file is newer than the run; the line may have moved.")),
    el("div", { class: "lines", role: "group", tabindex: 0, "aria-label": `Lines ${e.first} to ${e.first + e.lines.length - 1} of ${e.file}` }, e.lines.map((text, k) => el("div", { class: e.first + k === e.line ? "hit" : "" }, el("span", { class: "no" }, String(e.first + k)), el("span", {}, text || " ", e.first + k === e.line && el("span", { class: "unseen" }, " (here)"))))));
}

// The words in which two lines differ. Numbers of operators (%7) shift with what stands before; they are no difference.
function marked(a, b) {
  const words = (text) => (text.match(/%\d+|[\w.-]+|\s+|[^\w\s]/g) || []).slice(0, 120), x = words(a), y = words(b);
  const like = (p, q) => p === q || (p[0] === "%" && q[0] === "%" && p.length > 1 && q.length > 1);
  const best = Array.from({ length: x.length + 1 }, () => new Int16Array(y.length + 1));
  for (let i = x.length - 1; i >= 0; i--) for (let j = y.length - 1; j >= 0; j--) best[i][j] = like(x[i], y[j]) ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
  const left = [], right = [];
  const put = (list, word, tag) => { const last = list[list.length - 1]; if (last && last[0] === tag) last[1] += word; else list.push([tag, word]); };
  let i = 0, j = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && like(x[i], y[j])) { put(left, x[i++], ""); put(right, y[j++], ""); }
    else if (j >= y.length || (i < x.length && best[i + 1][j] >= best[i][j + 1])) put(left, x[i++], "del");
    else put(right, y[j++], "ins");
  }
  const drawnOf = (list) => list.map(([tag, text]) => (tag ? el(tag, {}, text) : text));
  return [drawnOf(left), drawnOf(right)];
}

function operatorsOf(place, operator) {
  if (!place?.operators?.length) return null;
  const lines = place.operators.length;
  if (place.same) return el("details", { class: "programs" }, el("summary", {}, "Both runs execute the same operators with the same arguments"), programRows(place.operators, operator));
  return el("div", { class: "programs" }, el("div", { class: "title" }, lines > 1 ? "Operators of both runs" : "The operator in both runs"), programRows(place.operators, operator));
}
function programRows(rows, operator) {
  const table = el("div", { class: "pairs", role: "table", "aria-label": "Operators of the reference and of the target" },
    el("div", { role: "row", class: "head" }, el("div", { role: "columnheader" }, "reference"), el("div", { role: "columnheader" }, "target")),
    rows.map(([a, b, mark]) => {
      if (mark === "left out") return el("div", { role: "row", class: "gap" }, el("div", { role: "cell" }, `${count(Number(a), "equal operator")} not shown`), el("div", { role: "cell" }));
      const [x, y] = mark === "differs" ? marked(a, b) : [a, b];
      const missing = (text) => (text.length ? text : el("span", { class: "soft" }, "(none)"));
      return el("div", { role: "row", class: mark ? "odd" : "" }, el("div", { role: "cell", "data-side": "reference" }, missing(x)), el("div", { role: "cell", "data-side": "target" }, missing(y)));
    }));
  if (rows.length < 9) return table;
  // Of a long list the operator that is at fault is in view, else the first that differs.
  const box = scroller("Operators of both runs", table), odd = [...table.querySelectorAll(".odd")];
  const hit = odd.find((row) => operator && row.textContent.includes(`= ${operator}(`)) || odd[0];
  new ResizeObserver((_, once) => { if (!box.clientHeight) return; once.disconnect(); if (hit) box.scrollTop = hit.offsetTop - box.clientHeight / 2; }).observe(box);
  return box;
}
function placeOf(finding) {
  const place = DATA.places[finding];
  if (!place || !(place.excerpts.length || place.operators.length)) return null;
  return el("div", { class: "place" }, place.excerpts.map(excerpt), operatorsOf(place, (DATA.answer.findings[finding].operator || "").replace(/^aten\./, "").replace(/\.default$/, "")));
}
