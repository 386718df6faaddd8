// Everything about one call: the evidence in words and shares, both sides of its tensors, looks at the error, what it reads and who reads it.
function callView(i) {
  const finding = DATA.answer.findings.findIndex((f) => f.call === i);
  const details = DETAILS.get(i) || [];
  const source = S[C.source[i]], other = S[C.target_source[i]];
  const box = el("div", { class: "call" },
    el("div", {}, el("h2", {}, el("code", {}, name(i)), " ", el("span", { class: "soft" }, type(i))),
      el("div", { class: "legend" }, chip(verdict(i)), S[C.confidence[i]] && el("span", {}, S[C.confidence[i]]), where(i) && el("span", {}, where(i)), S[C.evidence[i]] && el("span", {}, `by ${S[C.evidence[i]]}`))),
    S[C.sentence[i]] && el("p", {}, sentence(S[C.sentence[i]])),
    finding > 0 && placeOf(finding),
    facts([
      ["error", el("span", { class: "num" }, [["accumulated", C.error[i]], ["introduced here", C.added[i]], ["came in", C.incoming[i]], ["own rounding", C.own[i]], ["explained up to", C.noise[i]]].filter(([, v]) => v !== null).map(([w, v]) => `${w} ${number(v)}`).join(", ") || "unknown")],
      ["would have seen", C.visible[i] && !GUILTY.has(verdict(i)) ? el("span", { class: "num" }, largestHidden(C.visible[i])) : ""],
      ["cause", S[C.cause[i]]], ["operator inside", S[C.operator[i]]],
      ["source", source && el("code", {}, source)], ["source, target", other && other !== source && el("code", {}, other)],
      ["name in the target", S[C.target_name[i]] && el("code", {}, S[C.target_name[i]])],
      ["parameters", S[C.parameters[i]] === "equal" ? "equal, bit for bit" : S[C.parameters[i]]],
      ["not replayed", S[C.program[i]]],
    ]),
    shares(i),
    finding >= 0 && DATA.commands.repro[finding] && el("div", {}, el("h3", {}, "Reproduce it alone"), copyable(DATA.commands.repro[finding])),
    sidesOf(i), details.length ? looks(details) : (C.error[i] > 0 && el("p", { class: "soft small" }, "The elements of this call are not on the page: it holds those of findings, their neighbours and the calls nearest to their limits (--details N holds more).")),
    flow("Reads from", C.reads[i]), flow("Read by", READERS[i]));
  return box;
}

// How large a fault of each kind would have been named, in percent.
function largestHidden([scale, channel, element, noise]) {
  const percent = (v) => `${number(100 * v, 2)} %`;
  return `a scale error above ${percent(scale)}; one channel shifted by ${percent(channel)} of the root mean square, one element off by ${percent(element)}, noise of ${percent(noise)}`;
}

function shares(i) {
  const s = C.shares[i];
  if (!s || !s.some((v) => v > 0)) return null;
  const parts = [["came in", s[0], "inherited"], ["made here by the target", s[1], GUILTY.has(verdict(i)) ? "introduced" : "declared"], ["the reference's own rounding", s[2], "noise"]].filter(([, v]) => v !== null);
  const total = parts.reduce((sum, [, v]) => sum + Math.max(0, v), 0) || 1;
  const percent = (v) => (v >= 0.0005 ? `${number(100 * v, 3)} %` : v > 0 ? "below 0.05 %" : "0 %");
  return el("div", {}, el("h3", {}, "Of the squared error"), el("div", { class: "share", role: "img", "aria-label": parts.map(([w, v]) => `${w} ${percent(v)}`).join(", ") },
    parts.map(([, v, c]) => el("span", { style: { width: `${100 * Math.max(0, v) / total}%`, background: `var(--${c})` } }))),
  el("div", { class: "legend" }, parts.map(([w, v, c]) => el("span", { class: "chip" }, swatch(c), `${w} ${percent(v)}`))));
}
function swatch(name) { const rect = svg("rect", { x: 1, y: 1, width: 10, height: 10, rx: 2 }); rect.style.fill = `var(--${name})`; return svg("svg", { viewBox: "0 0 12 12", class: "mark", "aria-hidden": "true" }, rect); }

function sidesOf(i) {
  const text = (t, key) => S[T[key][t]];
  const every = TENSORS.get(i) || [], equal = (t) => T.identical[t] && text(t, "reference_slot").startsWith("param");
  const list = every.length > 12 ? every.filter((t) => !equal(t)) : every, rest = every.length - list.length;
  if (!every.length) return null;
  return el("div", {}, el("h3", {}, "Tensors, side by side"), scroller("Tensors", el("table", { class: "flat" },
    headRow(["slot", "reference", "target", "rel_l2", "max_abs_err", "cosine", "(note)"], (k) => k > 2 && k < 6),
    el("tbody", {}, list.slice(0, 60).map((t) => {
      const a = `${text(t, "reference_dtype")} ${text(t, "reference_shape")}`, b = `${text(t, "target_dtype")} ${text(t, "target_shape")}`;
      const slot = text(t, "target_slot") === text(t, "reference_slot") ? text(t, "reference_slot") : `${text(t, "reference_slot")} / ${text(t, "target_slot")}`;
      return el("tr", {}, el("td", {}, el("code", {}, slot)), el("td", {}, a), el("td", { class: a === b ? "" : "differs" }, b), el("td", { class: "r" }, number(T.rel_l2[t])), el("td", { class: "r" }, number(T.max_abs_err[t])),
        el("td", { class: "r" }, T.identical[t] ? "" : number(T.cosine_similarity[t], 6)), el("td", { class: "soft" }, T.identical[t] ? "equal bits" : text(t, "why")));
    })))), rest ? el("p", { class: "soft small" }, `And ${count(rest, "parameter")} with equal bits.`) : null, list.length > 60 ? el("p", { class: "soft small" }, `And ${count(list.length - 60)} more in the table of tensors.`) : null);
}

function looks(details) {
  const order = details.filter((d) => !d.identical);
  if (!order.length) return null;
  const body = el("div", {});
  const tabs = order.map((d, k) => el("button", { type: "button", role: "tab", "aria-selected": "false", onclick: () => show(k) }, d.slot));
  function show(k) {
    tabs.forEach((tab, n) => tab.setAttribute("aria-selected", String(n === k)));
    body.replaceChildren(look(order[k]));
  }
  show(0);
  return el("div", {}, el("h3", {}, "Looked at closely"), el("div", { class: "tabs", role: "tablist" }, tabs), body);
}

function look(d) {
  const plots = [histogram(d), magnitude(d), qq(d), heatmap(d)].filter(Boolean);
  const names = ["min", "max", "mean", "std", "2-norm"];
  const both = d.reference?.length && d.target?.length;
  const odd = Boolean(d.not_finite && (d.not_finite[0] || d.not_finite[1]));
  return el("div", {},
    d.why && el("p", { class: "soft" }, `Not measured: ${d.why}`), d.dims && el("p", { class: "small soft" }, "The target's tensor was brought to the reference's axes by ", el("code", {}, d.dims)),
    odd && el("p", {}, `NaN or infinite: ${count(d.not_finite[0])} in the reference, ${count(d.not_finite[1])} in the target.`),
    plots.length ? el("div", { class: "plots" }, plots) : null,
    el("div", { class: "split", style: { "margin-top": "14px" } },
      d.worst?.length ? el("div", {}, el("h3", {}, "Worst elements"), scroller("Worst elements", el("table", { class: "flat" }, headRow(["index", "reference", "target", "error"], (k) => k > 0),
        el("tbody", {}, d.worst.map(([index, a, b]) => el("tr", {}, el("td", {}, el("code", {}, `[${index.join(", ")}]`)), el("td", { class: "r" }, a === null ? "not finite" : number(a, 7)), el("td", { class: "r" }, b === null ? "not finite" : number(b, 7)), el("td", { class: "r" }, a === null || b === null ? "-" : number(Math.abs(b - a))))))))) : null,
      both ? el("div", {}, el("h3", {}, "Both tensors"), el("table", { class: "flat" }, headRow(["(figure)", "reference", "target"], (k) => k > 0),
        el("tbody", {}, names.map((n, k) => el("tr", {}, el("td", { class: "soft" }, n), el("td", { class: "r" }, number(d.reference[k], 6)), el("td", { class: "r" }, number(d.target[k], 6))))))) : null),
    el("details", { class: "small" }, el("summary", {}, "All figures of this pair"), facts(DATA.figures.map((n, k) => [n, d.figures[k] === null ? "" : number(d.figures[k], 5)]))),
    d.sampled ? el("p", { class: "soft small" }, `These are the first ${count(d.sampled)} of ${count(d.elements, "element")}.`) : null);
}

function flow(title, list) {
  if (!list.length) return null;
  const shown = list.slice(0, 24);
  return el("div", {}, el("h3", {}, title), el("div", { class: "flow" }, shown.map((k) => el("span", { class: "chip" }, glyph(verdict(k)), callButton(k))), list.length > shown.length && el("span", { class: "soft" }, `and ${count(list.length - shown.length)} more`)));
}
function callButton(i) { return el("button", { class: "plain", type: "button", title: `${type(i)}, ${verdict(i)}`, onclick: () => openCall(i) }, name(i)); }

// The drawer: one call beside the page. It follows the link, so that a link opens it.
let backTo = null;
function openCall(i) { setLink({ call: i }); }
function drawer() {
  const body = el("div", {});
  const close = el("button", { type: "button", class: "end", onclick: () => setLink({ call: "" }) }, "Close ", el("kbd", {}, "Esc"));
  const box = el("aside", { class: "drawer hidden", "aria-label": "Call", tabindex: -1 }, el("div", { class: "top" },
    el("button", { type: "button", onclick: () => go(-1) }, "Previous ", el("kbd", {}, "k")), el("button", { type: "button", onclick: () => go(1) }, "Next ", el("kbd", {}, "j")),
    el("button", { type: "button", onclick: () => { showInTree(linked("call", CALLS)); } }, "Show in the tree"), close), body);
  let shown = -1;
  onLink(() => {
    const i = linked("call", CALLS);
    if (i === shown) return;
    if (shown < 0) backTo = document.activeElement;
    shown = i;
    box.classList.toggle("hidden", i < 0);
    body.replaceChildren(...(i >= 0 ? [callView(i)] : []));
    if (i >= 0) { box.scrollTop = 0; box.focus({ preventScroll: true }); } else backTo?.focus?.({ preventScroll: true });
  });
  return box;
}
