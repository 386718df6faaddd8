// Where a finding stands: lines of the user's code, and the operators of both programs with the difference marked.
function excerpt(e) {
  const other = e.side === "reference" ? "the reference's code" : "";
  return el("figure", { class: "code" }, el("figcaption", {}, el("code", {}, `${e.file}:${e.line}`), other && el("span", {}, ` (${other})`), e.changed && el("span", { class: "warn" }, " The file is newer than the run; the line may have moved.")),
    el("div", { class: "lines", role: "group", tabindex: 0, "aria-label": `Lines ${e.first} to ${e.first + e.lines.length - 1} of ${e.file}` }, e.lines.map((text, k) => el("div", { class: e.first + k === e.line ? "hit" : "" }, el("span", { class: "no" }, String(e.first + k)), el("span", {}, text || " ", e.first + k === e.line && el("span", { class: "unseen" }, " (here)"))))));
}

// The parts in which two lines differ, word by word.
function marked(a, b) {
  const words = (text) => text.match(/[\w.%-]+|\s+|[^\w\s]/g) || [], x = words(a), y = words(b);
  let start = 0, end = 0;
  while (start < x.length && start < y.length && x[start] === y[start]) start++;
  while (end < x.length - start && end < y.length - start && x[x.length - 1 - end] === y[y.length - 1 - end]) end++;
  const part = (list, tag) => [list.slice(0, start).join(""), el(tag, {}, list.slice(start, list.length - end).join("")), list.slice(list.length - end).join("")];
  return [part(x, "del"), part(y, "ins")];
}

function operatorsOf(place) {
  if (!place?.operators?.length) return null;
  const lines = place.operators.length;
  if (place.same) return el("details", { class: "programs" }, el("summary", {}, "Both runs execute the same operators with the same arguments"), programRows(place.operators));
  return el("div", { class: "programs" }, el("div", { class: "title" }, lines > 1 ? "Operators of both runs" : "The operator in both runs"), programRows(place.operators));
}
function programRows(rows) {
  return el("div", { class: "pairs", role: "table", "aria-label": "Operators of the reference and of the target" },
    el("div", { role: "row", class: "head" }, el("div", { role: "columnheader" }, "reference"), el("div", { role: "columnheader" }, "target")),
    rows.map(([a, b, mark]) => {
      if (mark === "left out") return el("div", { role: "row", class: "gap" }, el("div", { role: "cell" }, `${count(Number(a), "equal operator")} not shown`), el("div", { role: "cell" }));
      const [x, y] = mark === "differs" ? marked(a, b) : [a, b];
      const missing = (text) => (text.length ? text : el("span", { class: "soft" }, "(none)"));
      return el("div", { role: "row", class: mark ? "odd" : "" }, el("div", { role: "cell", "data-side": "reference" }, missing(x)), el("div", { role: "cell", "data-side": "target" }, missing(y)));
    }));
}
function placeOf(finding) {
  const place = DATA.places[finding];
  if (!place || !(place.excerpts.length || place.operators.length)) return null;
  return el("div", { class: "place" }, place.excerpts.map(excerpt), operatorsOf(place));
}
