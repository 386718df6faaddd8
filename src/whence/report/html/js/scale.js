// One scale of colours for the whole page, in units of what rounding explains: up to 1 it is blue, beyond 1 orange to red at 1000. What is
// inherited has a colour of its own, so that only what a call itself does wrong is alarming, and nothing is where two runs only round otherwise.
const isDark = () => document.documentElement.dataset.theme === "dark";
const blend = (s, light, night) => { const [h, c, l] = (isDark() ? night : light).map(([a, b]) => a + (b - a) * Math.max(0, Math.min(1, s))); return `hsl(${h} ${c}% ${l}%)`; };
const calm = (share) => blend(share, [[205, 205], [45, 52], [93, 70]], [[205, 205], [30, 48], [20, 44]]);
const alarming = (units) => blend(Math.log10(Math.max(1, units)) / 3, [[36, 2], [92, 78], [72, 40]], [[36, 4], [75, 92], [42, 64]]);
const passedOn = () => (isDark() ? "hsl(35 24% 34%)" : "hsl(35 42% 82%)");
const unjudged = () => (isDark() ? "hsl(220 6% 36%)" : "hsl(220 6% 74%)");
const byUnits = (units) => (units <= 1 ? calm(units) : alarming(units));

// How often over what is explained the error of a call is; null where nothing says what that is.
const units = (i) => (C.error[i] === null || !(C.noise[i] > 0) ? null : C.error[i] / C.noise[i]);
// Of a fault, how far it is over what is allowed.
const fault = (i) => Math.max(units(i) ?? 0, C.score[i] ?? 0) || 1000;
function callColour(i) {
  const v = verdict(i);
  if (C.error[i] === 0 && !GUILTY.has(v)) return colour("grid");
  if (GUILTY.has(v)) return alarming(fault(i));
  if (v === "inherited" || v === "amplified") return passedOn();
  if (v === "undetermined" || v === "incomparable" || C.error[i] === null) return unjudged();
  return calm(Math.min(1, units(i) ?? 0.5));
}
function scaleLegend(kinds) {
  const box = (paint) => { const node = el("span", { class: "patch" }); const set = () => { node.style.background = paint(); }; set(); drawn.add(set); return node; };
  const items = {
    equal: [() => colour("grid"), "equal"], calm: [() => `linear-gradient(90deg, ${calm(0)}, ${calm(1)})`, "explained by rounding and inputs"], passed: [passedOn, "inherited"],
    alarm: [() => `linear-gradient(90deg, ${alarming(1)}, ${alarming(30)}, ${alarming(1000)})`, "introduced: 1 to 1000 times what is explained, and more"], unknown: [unjudged, "not judged"],
  };
  return el("div", { class: "legend" }, kinds.map((kind) => el("span", { class: "chip" }, box(items[kind][0]), items[kind][1])));
}
