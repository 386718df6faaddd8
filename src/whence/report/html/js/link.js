// What is selected stands in the fragment of the address, so that a link shows the same: #call=12&find=attn&verdict=introduced&sort=-error.
const link = new Map();
const listeners = [];

function readLink() {
  link.clear();
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) if (value) link.set(key, value);
}
function setLink(changes) {
  for (const [key, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) link.delete(key);
    else link.set(key, String(value));
  }
  const text = new URLSearchParams([...link]).toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  for (const listener of listeners) listener();
}
function onLink(listener) { listeners.push(listener); listener(); }
function linked(key, most) {
  const value = /^\d+$/.test(link.get(key) || "") ? Number(link.get(key)) : -1;
  return value < most ? value : -1;
}
readLink();
addEventListener("hashchange", () => {
  if (document.getElementById(location.hash.slice(1))) return;
  readLink();
  for (const listener of listeners) listener();
});
