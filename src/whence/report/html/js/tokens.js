// What both runs generated: prompts as rows, tokens as cells, the first that parts marked, the text of both sides where it is known.
function tokens() {
  const g = DATA.generation, t = DATA.texts;
  if (!g && !t) return null;
  return section("tokens", "Tokens", g ? tokensLead(g) : `${count(t.full_count)} of ${count(t.count, "prompt")} ${t.full_count === 1 ? "is" : "are"} equal over the shorter output.`, g && generated(g), t && texts(t));
}

function tokensLead(g) {
  const passing = g.passes.filter(Boolean).length, flips = [0, 1, 2].map((k) => g.prompts.reduce((sum, p) => sum + (p.flips?.[k] || 0), 0));
  const parts = [[flips[0], "by rounding"], [flips[1], "by more than rounding"], [flips[2], "because it was sampled"]].filter(([n]) => n).map(([n, why]) => `${count(n)} ${n === 1 ? "differs" : "differ"} ${why}`);
  return `${count(passing)} of ${count(g.passes.length, "prompt")} ${passing === 1 ? "passes" : "pass"}. Of ${count(g.of, "token")}, ${g.compared === g.of ? "all" : count(g.compared)} were compared: ${parts.join(", ") || "all are the same"}.`;
}

const TOKEN_WORDS = { identical: "equal logits", noise: "logits differ by rounding", explained: "another token; the gap lies within the noise", unexplained: "another token that rounding does not explain", sampled: "sampled: another token from the same logits", off: "the same token, from logits that differ by more than rounding", inherited: "logits differ by more than their rounding, and every module computes right on its own inputs", incomparable: "not comparable" };

// The text of a token where a tokenizer was at hand, with blanks that are seen; else its number.
const tokenText = (id) => { const text = DATA.vocabulary[id]; return text === undefined ? String(id) : text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replace(/^ /, "\u2423").replace(/ $/, "\u2423") || '""'; };
const tokenName = (id) => (DATA.vocabulary[id] === undefined ? String(id) : `${JSON.stringify(DATA.vocabulary[id])} (${id})`);

function generated(g) {
  const K = g.tokens, of = g.prompts.map(() => []);
  K.prompt.forEach((p, k) => of[p].push(k));
  const order = g.prompts.map((_, p) => p).sort((a, b) => g.passes[a] - g.passes[b] || a - b);
  const list = el("div", { class: "prompts" });
  let shown = 0;
  const more = el("button", { type: "button", onclick: grow }, "More prompts");
  function grow() {
    for (const p of order.slice(shown, shown + 20)) list.append(prompt(p));
    shown = Math.min(order.length, shown + 20);
    more.classList.toggle("hidden", shown >= order.length);
  }
  function prompt(p) {
    const one = g.prompts[p], cells = of[p];
    const first = one.first ?? -1;
    return el("div", {}, el("div", {}, el("b", {}, `prompt ${one.number}`), " ", el("span", { class: "soft" }, `${one.outcome}, ${count(one.compared)} of ${count(one.of, "token")} compared; `, one.ids.slice(0, 64).some((id) => DATA.vocabulary[id] !== undefined) ? el("q", {}, one.ids.slice(0, 64).map((id) => DATA.vocabulary[id] ?? `[${id}]`).join("").trim(), one.ids.length > 64 && " ...") : `ids ${one.ids.slice(0, 6).join(" ")}${one.ids.length > 6 ? ` ... (${one.ids.length})` : ""}`)),
      el("div", { class: "cells" }, cells.slice(0, 400).map((k) => cell(k, one, k === first)), cells.length > 400 && el("span", { class: "soft" }, `and ${count(cells.length - 400)} more in generation.csv`)),
      cells.length > 1 && closeness(cells, !g.passes[p] || p === order[0]));
  }
  function cell(k, one, isFirst) {
    const parted = K.reference[k] !== K.target[k];
    const words = `${tokenText(K.reference[k])}${parted ? ` ${tokenText(K.target[k])}` : ""}: token ${K.index[k] - one.ids.length}, step ${K.step[k]}; ${tokenName(K.reference[k])}${parted ? ` against ${tokenName(K.target[k])}` : ""}; ${TOKEN_WORDS[K.verdict[k]] || K.verdict[k]}; margin ${number(K.margin[k])}, logits differ by ${number(K.logit_err[k])}, noise ${number(K.noise[k])}`;
    return el("button", { type: "button", class: `${K.verdict[k]}${parted ? " two" : ""}${isFirst ? " first" : ""}`, "aria-label": words, onmousemove: (event) => showTip(event, words), onmouseleave: hideTip, onfocus: (event) => { const b = event.target.getBoundingClientRect(); showTip({ clientX: b.left, clientY: b.bottom }, words); }, onblur: hideTip, onclick: () => follow(k) },
      parted ? [el("div", {}, tokenText(K.reference[k])), " ", el("div", {}, tokenText(K.target[k]))] : tokenText(K.reference[k]));
  }
  function follow(k) {
    const root = ROOTS.find((i) => C.step[i] === K.step[k]);
    if (root !== undefined) openCall(root);
  }
  function closeness(cells, isOpen) {
    const chart = margins(cells);
    return chart && el("details", { class: "small", open: isOpen }, el("summary", {}, "margin against error"), chart);
  }
  // Where the error of the logits comes near the gap between the two best tokens, rounding may choose another one.
  function margins(cells) {
    if (!cells.some((k) => K.margin[k] > 0) || !cells.some((k) => K.logit_err[k] > 0)) return null;
    const y = range(cells.flatMap((k) => [K.margin[k], K.logit_err[k], K.noise[k]]));
    const chart = canvas(165, "Margin between the two best tokens and error of the logits, token by token", (c, width, height) => {
      const frame = { left: 46, right: width - 8, top: 20, bottom: height - 38 }, at = axes(c, frame, null, y, "token", "margin and error of the logits");
      const X = (n) => frame.left + (n + 0.5) / cells.length * (frame.right - frame.left);
      const draw = (key, ink, dash, mark) => {
        c.strokeStyle = c.fillStyle = colour(ink); c.lineWidth = 1.6; c.setLineDash(dash); c.beginPath();
        let pen = false;
        cells.forEach((k, n) => { const v = K[key][k]; if (!(v > 0)) { pen = false; return; } if (pen) c.lineTo(X(n), at.y(LOG(v))); else c.moveTo(X(n), at.y(LOG(v))); pen = true; });
        c.stroke(); c.setLineDash([]);
        if (mark) cells.forEach((k, n) => { if (K[key][k] > 0) c.fill(new Path2D(shape(mark, X(n), at.y(LOG(K[key][k])), 3.4))); });
      };
      draw("margin", "noise", [], "circle"); draw("logit_err", cells.some((k) => ["unexplained", "off"].includes(K.verdict[k])) ? "introduced" : "inherited", [5, 3], "diamond");
    });
    return el("figure", { style: { "max-width": "760px", "margin-top": "6px" } }, chart.node, el("figcaption", {}, "Circles: gap between the reference's two best tokens; diamonds, dashed: by how much the logits differ. Where these reach the gap, another token may win."));
  }
  grow();
  return [el("div", { class: "legend" }, [...new Set(K.verdict)].map((v) => el("span", { class: "cells", style: { margin: "0" } }, el("button", { type: "button", tabindex: -1, class: v }, v), el("span", {}, ` ${TOKEN_WORDS[v] || ""}`)))), g.sentence && el("p", {}, sentence(`${g.sentence}${g.led_to ? `; it comes from ${g.led_to}` : ""}`)), list, more];
}

function texts(t) {
  const list = el("div", { class: "prompts", style: { "margin-top": "10px" } });
  const parted = t.prompts.filter((p) => p.verdict !== "PASS"), rest = t.prompts.filter((p) => p.verdict === "PASS");
  let shown = 0;
  const all = [...parted, ...rest], more = el("button", { type: "button", onclick: grow }, "More outputs");
  function grow() {
    for (const p of all.slice(shown, shown + 30)) list.append(el("div", {}, el("div", {}, el("b", {}, `${p.verdict} `), el("span", { class: "soft" }, `${p.id || p.number}. ${p.prompt || "(no prompt)"}`, p.first_character !== null && p.first_character !== undefined ? `, differs from character ${p.first_character} on` : p.first_token !== null && p.first_token !== undefined ? `, differs from token ${p.first_token} on` : "")),
      p.verdict === "PASS" ? null : el("div", { class: "diff" }, p.common && p.common, p.reference_at || p.target_at ? [el("del", { title: "reference" }, p.reference_at || "(end)"), el("span", { class: "soft" }, " | "), el("ins", { title: "target" }, p.target_at || "(end)")] : el("span", { class: "soft" }, p.why))));
    shown = Math.min(all.length, shown + 30);
    more.classList.toggle("hidden", shown >= all.length);
  }
  grow();
  return el("div", {}, el("h3", { style: { "margin-top": "14px" } }, "Text of both sides"), el("p", { class: "soft small" }, `Full match ${number(t.full_match)}, half match ${number(t.half_match)} of ${count(t.count, "prompt")}. From where they differ, the reference is underlined and the target dashed.`), list, more);
}
