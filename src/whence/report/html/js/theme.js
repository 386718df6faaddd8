// Light and dark: the system's choice until the reader makes one; print is always light. Charts are drawn again after a change.
const drawn = new Set();
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = "";
try { chosen = localStorage.getItem("whence-theme") || ""; } catch { /* a page from a file may have no storage */ }

function applyTheme(forced) {
  document.documentElement.dataset.theme = forced || chosen || (dark.matches ? "dark" : "light");
  for (const draw of drawn) draw();
}
function switchTheme() {
  chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("whence-theme", chosen); } catch { /* only this page then */ }
  applyTheme();
}
dark.addEventListener("change", () => applyTheme());
document.documentElement.dataset.theme = chosen || (dark.matches ? "dark" : "light");
