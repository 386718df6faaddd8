// A table of any number of rows: only those in view are elements. Columns: {key, title, width, right, text(row), sort(row), cell(row)}.
const ROW = 28, PRINTED = 50;

function grid(label, columns, { open, selected = () => false, worse }) {
  const template = columns.map((c) => c.width || "minmax(80px, 1fr)").join(" ");
  const head = el("div", { class: "head", role: "row", style: { "grid-template-columns": template } });
  const body = el("div", { class: "body", role: "rowgroup" });
  const least = columns.reduce((sum, c) => sum + (parseInt((c.width || "").replace(/^minmax\(/, ""), 10) || 90) + 14, 20);
  head.style.minWidth = body.style.minWidth = `${least}px`;
  const box = el("div", { class: "grid", role: "grid", tabindex: 0, "aria-label": label, "aria-colcount": columns.length }, el("div", { role: "rowgroup" }, head), body);
  let rows = [], sorting = { key: "", down: false }, onSort = () => {};
  const shown = new Map();

  for (const column of columns) {
    const button = el("button", { type: "button", onclick: () => onSort({ key: column.key, down: sorting.key === column.key ? !sorting.down : column.right === true }) }, column.title);
    if (column.hint) button.title = column.hint;
    head.append(el("div", { role: "columnheader", class: column.right ? "r" : "", "data-key": column.key, "aria-sort": "none" }, button));
  }

  function line(at) {
    const row = rows[at];
    return el("div", { role: "row", "aria-rowindex": at + 2, "aria-selected": selected(row) ? "true" : "false", style: { top: `${at * ROW}px`, "grid-template-columns": template }, onclick: () => open(row) },
      columns.map((c) => el("div", { role: "gridcell", class: c.right ? "r" : "", title: c.text(row) }, c.cell ? c.cell(row) : c.text(row))));
  }
  let printing = false;
  function render() {
    const most = printing ? Math.min(rows.length, PRINTED) : 0;
    const first = most ? 0 : Math.max(0, Math.floor(box.scrollTop / ROW) - 8);
    const last = most || Math.min(rows.length, Math.ceil((box.scrollTop + (box.clientHeight || 480)) / ROW) + 8);
    for (const [at, node] of shown) if (at < first || at >= last) { node.remove(); shown.delete(at); }
    for (let at = first; at < last; at++) if (!shown.has(at)) { const node = line(at); shown.set(at, node); body.append(node); }
  }
  box.addEventListener("scroll", () => requestAnimationFrame(() => render()), { passive: true });
  box.addEventListener("keydown", (event) => {
    const page = { PageDown: 12, PageUp: -12, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (page) { box.scrollTop += page * ROW; event.preventDefault(); }
  });
  function sized(most) {
    body.style.height = `${Math.min(most, rows.length) * ROW}px`;
    box.style.height = `${Math.min(most === PRINTED ? Infinity : 480, (Math.max(3, Math.min(most, rows.length)) + 1) * ROW + 8)}px`;
  }
  // A few are printed: the first.
  const emptied = () => { for (const [, node] of shown) node.remove(); shown.clear(); };
  addEventListener("beforeprint", () => { box.scrollTop = 0; printing = true; emptied(); sized(PRINTED); render(); });
  addEventListener("afterprint", () => { printing = false; emptied(); sized(Infinity); render(); });
  new ResizeObserver(() => render()).observe(box);

  return {
    box,
    columns,
    get rows() { return rows; },
    sorted(listener) { onSort = listener; },
    show(found, order) {
      sorting = order;
      const column = columns.find((c) => c.key === order.key);
      rows = column ? found : [...found].sort(worse);
      if (column) {
        const key = new Map(found.map((row) => [row, column.sort ? column.sort(row) : column.text(row)]));
        const empty = (v) => v === null || v === undefined;
        rows = [...found].sort((a, b) => {
          const x = key.get(a), y = key.get(b);
          if (empty(x) || empty(y)) return empty(x) - empty(y);
          return (x < y ? -1 : x > y ? 1 : 0) * (order.down ? -1 : 1);
        });
      }
      for (const cell of head.children) cell.setAttribute("aria-sort", cell.dataset.key === order.key ? (order.down ? "descending" : "ascending") : "none");
      emptied();
      box.setAttribute("aria-rowcount", rows.length + 1);
      sized(Infinity);
      render();
    },
    refresh() { emptied(); render(); },
    reveal(row) {
      const at = rows.indexOf(row);
      if (at >= 0 && (at * ROW < box.scrollTop || (at + 2) * ROW > box.scrollTop + box.clientHeight)) box.scrollTop = Math.max(0, (at - 4) * ROW);
    },
  };
}

// CSV for spreadsheets: what one would take for a formula is quoted, unless it is a number.
function csv(columns, rows) {
  const guard = (text) => (/^[=+\-@\t\r]/.test(text) && !/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) ? `'${text}` : text);
  const cell = (text) => { const safe = guard(String(text)); return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe; };
  return [columns.map((c) => cell(c.title)), ...rows.map((row) => columns.map((c) => cell(c.raw ? c.raw(row) ?? "" : c.text(row))))].map((line) => line.join(",")).join("\n") + "\n";
}
