// Keyboard: j and k walk the calls, / searches, t switches the theme, Esc closes, ? says so.
function go(by) { nextCall(by); }
function keys(help) {
  addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName || "");
    if (event.key === "Escape") {
      hideTip();
      if (help.open) help.close();
      else if (typing) event.target.blur();
      else setLink({ call: "" });
      return;
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { j: () => go(1), k: () => go(-1), "/": () => { const find = document.getElementById("find"); find?.scrollIntoView({ block: "center" }); find?.focus(); }, "?": () => help.showModal(), t: switchTheme, f: () => { const first = DATA.answer.findings.find((f) => f.call >= 0); if (first) openCall(first.call); } }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
}
function helpBox() {
  const lines = [["j", "next call of the table"], ["k", "call before"], ["f", "first finding"], ["/", "search"], ["t", "light or dark"], ["Esc", "close"], ["arrows, Enter", "in tree and table: walk, unfold, open"], ["Tab, Enter", "in the graph: walk, unfold, open"], ["?", "this list"]];
  const box = el("dialog", { "aria-label": "Keyboard" }, el("h3", {}, "Keyboard"), facts(lines.map(([key, what]) => [el("kbd", {}, key), what])), el("p", { style: { "margin-top": "12px" } }, el("button", { type: "button", onclick: () => box.close() }, "Close")));
  return box;
}
