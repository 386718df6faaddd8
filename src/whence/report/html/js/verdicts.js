// A verdict has a colour, a shape and its word: no one of them is needed to tell it.
const SHAPES = {
  identical: "dot", noise: "circle", declared: "square", "other-form": "down", inherited: "circle", amplified: "up", precision: "diamond", nondeterministic: "plus",
  undetermined: "ring", incomparable: "cross", structural: "block", "param-diff": "lozenge", introduced: "star",
};
const VERDICT_WORDS = {
  identical: "Equal, bit for bit", noise: "Rounding", declared: "A loss that the policy allows", "other-form": "Another form: something behind it takes it back", inherited: "Only passes on the error of its inputs", amplified: "Enlarges the error of its inputs, as the operator does",
  precision: "More than rounding, as an intermediate of low precision leaves it", nondeterministic: "The reference does not repeat itself here either", undetermined: "Cannot be told", incomparable: "Could not be compared", structural: "The structure differs", "param-diff": "A parameter differs", introduced: "The error starts here",
};
const VERDICTS = Object.keys(SHAPES);
const SEVERITY = ["identical", "noise", "declared", "other-form", "inherited", "amplified", "precision", "nondeterministic", "undetermined", "incomparable", "structural", "param-diff", "introduced"];
const TELLING = new Set(["introduced", "param-diff", "structural", "precision", "amplified", "nondeterministic", "undetermined", "incomparable"]);
const GUILTY = new Set(["introduced", "param-diff", "structural"]);
const FADED = { identical: 0.5, noise: 0.75, inherited: 0.38, declared: 0.75, "other-form": 0.75 };

function shape(kind, x, y, r) {
  const at = (points) => `M${points.map(([a, b]) => `${x + a * r},${y + b * r}`).join("L")}Z`;
  const round = (k) => `M${x - k * r},${y}a${k * r},${k * r} 0 1,0 ${2 * k * r},0a${k * r},${k * r} 0 1,0 ${-2 * k * r},0`;
  switch (kind) {
    case "dot": return round(0.55);
    case "circle": case "ring": return round(0.85);
    case "square": return at([[-0.75, -0.75], [0.75, -0.75], [0.75, 0.75], [-0.75, 0.75]]);
    case "block": return at([[-1, -0.8], [1, -0.8], [1, 0.8], [-1, 0.8]]);
    case "diamond": return at([[0, -1.1], [0.9, 0], [0, 1.1], [-0.9, 0]]);
    case "lozenge": return at([[0, -1.3], [1.2, 0], [0, 1.3], [-1.2, 0]]);
    case "down": return at([[0, 1.1], [1.05, -0.8], [-1.05, -0.8]]);
    case "up": return at([[0, -1.1], [1.05, 0.8], [-1.05, 0.8]]);
    case "plus": return at([[-0.3, -1], [0.3, -1], [0.3, -0.3], [1, -0.3], [1, 0.3], [0.3, 0.3], [0.3, 1], [-0.3, 1], [-0.3, 0.3], [-1, 0.3], [-1, -0.3], [-0.3, -0.3]]);
    case "cross": return at([[-1, -0.6], [-0.6, -1], [0, -0.4], [0.6, -1], [1, -0.6], [0.4, 0], [1, 0.6], [0.6, 1], [0, 0.4], [-0.6, 1], [-1, 0.6], [-0.4, 0]]);
    default: return at(Array.from({ length: 10 }, (_, i) => [Math.sin(i * Math.PI / 5) * (i % 2 ? 0.58 : 1.4), -Math.cos(i * Math.PI / 5) * (i % 2 ? 0.58 : 1.4)]));
  }
}

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888"; }

function glyph(verdict) {
  const path = svg("path", { d: shape(SHAPES[verdict] || "ring", 6, 6, 4) });
  path.style.fill = SHAPES[verdict] === "ring" ? "none" : `var(--${verdict})`;
  path.style.stroke = `var(--${verdict})`;
  return svg("svg", { viewBox: "0 0 12 12", class: "mark", "aria-hidden": "true" }, path);
}

function chip(verdict, words = verdict) { return el("span", { class: "chip" }, glyph(verdict), words); }
function severity(verdict) { return SEVERITY.indexOf(verdict); }
