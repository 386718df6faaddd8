// Elements. Every string from the data becomes a text node: nothing here or elsewhere is parsed as HTML.
function el(tag, given = {}, ...kids) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key === "style") for (const [name, one] of Object.entries(value)) node.style.setProperty(name, one);
    else node.setAttribute(key, value === true ? "" : value);
  }
  add(node, kids);
  return node;
}

function add(node, kids) {
  for (const kid of kids.flat(Infinity)) {
    if (kid === undefined || kid === null || kid === false || kid === "") continue;
    node.append(kid instanceof Node ? kid : document.createTextNode(String(kid)));
  }
  return node;
}

function svg(tag, given, ...kids) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(given)) node.setAttribute(key, value);
  node.append(...kids);
  return node;
}

function section(id, title, lead, ...kids) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title`, tabindex: -1 }, title), lead && el("p", { class: "lead" }, lead), kids);
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== "" && value !== undefined && value !== null && value !== false).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// What may be wider than the page is scrolled by itself, by keyboard too.
function scroller(label, ...kids) { return el("div", { class: "scroll", role: "group", tabindex: 0, "aria-label": label }, kids); }
function headRow(titles, isRight = () => false) { return el("thead", {}, el("tr", {}, titles.map((title, k) => el("th", { scope: "col", class: isRight(k) ? "r" : "" }, title.startsWith("(") ? el("span", { class: "unseen" }, title.slice(1, -1)) : title)))); }

function number(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(digits - 1).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

function count(value, noun = "", plural = "") {
  const grouped = String(value).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
  return noun ? `${grouped} ${value === 1 ? noun : plural || `${noun}s`}` : grouped;
}

function copyable(text) {
  const button = el("button", { type: "button", "aria-label": `Copy: ${text}`, onclick: () => copy(text, button) }, "Copy");
  return el("div", { class: "command" }, el("code", {}, text), button);
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { style: { position: "fixed", opacity: "0" } });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const said = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = said; }, 1200);
}

const tip = el("div", { class: "tip hidden", role: "status" });
function showTip(event, ...kids) {
  tip.replaceChildren();
  add(tip, kids);
  tip.classList.remove("hidden");
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
function hideTip() { tip.classList.add("hidden"); }
