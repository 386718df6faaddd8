// What the page was given, and what is quickly found in it.
const DATA = JSON.parse(document.getElementById("data").textContent);
const S = DATA.strings, C = DATA.calls, T = DATA.tensors;
const CALLS = C.name.length;
const name = (i) => S[C.name[i]], type = (i) => S[C.op_type[i]], verdict = (i) => S[C.verdict[i]];
const GROUPS = { steps: [...new Set(C.step)].sort((a, b) => a - b), ranks: [...new Set(C.rank)].sort((a, b) => a - b) };

const READERS = Array.from({ length: CALLS }, () => []);
const KIDS = Array.from({ length: CALLS }, () => []);
const ROOTS = [];
for (let i = 0; i < CALLS; i++) {
  for (const maker of C.reads[i]) READERS[maker].push(i);
  (C.parent[i] >= 0 ? KIDS[C.parent[i]] : ROOTS).push(i);
}

// Points and heatmaps come as hundredths of a decade.
const unlog = (k) => (k === null ? null : k === 9999 ? 0 : 10 ** (k / 100));
const DETAILS = new Map();
for (const detail of DATA.details) {
  for (const key of ["magnitude", "quantiles"]) detail[key] = (detail[key] || []).map(([a, b]) => [unlog(a), unlog(b)]);
  if (detail.heatmap) detail.heatmap.values = detail.heatmap.values.map(unlog);
  DETAILS.set(detail.call, [...(DETAILS.get(detail.call) || []), detail]);
}

const TENSORS = new Map();
for (let t = 0; t < T.call.length; t++) {
  if (!TENSORS.has(T.call[t])) TENSORS.set(T.call[t], []);
  TENSORS.get(T.call[t]).push(t);
}

// A call that only holds others repeats what the last of them made; it is shown where it has a verdict of its own.
const SHOWN = Array.from({ length: CALLS }, (_, i) => i).filter((i) => !KIDS[i].length || TELLING.has(verdict(i)));

function where(i) {
  const parts = [];
  if (GROUPS.steps.length > 1 || C.step[i]) parts.push(`step ${C.step[i]}`);
  if (GROUPS.ranks.length > 1 || C.rank[i]) parts.push(`rank ${C.rank[i]}`);
  if (C.occurrence[i]) parts.push(`#${C.occurrence[i]}`);
  if (S[C.phase[i]] !== "forward") parts.push(S[C.phase[i]]);
  return parts.join(", ");
}

function along(start, table) {
  const seen = new Set(), todo = [...table(start)];
  while (todo.length) {
    const one = todo.pop();
    if (seen.has(one)) continue;
    seen.add(one);
    todo.push(...table(one));
  }
  return seen;
}
const upstream = (i) => along(i, (k) => C.reads[k]);
const downstream = (i) => along(i, (k) => READERS[k]);
