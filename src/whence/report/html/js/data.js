// What the page was given, and what is quickly found in it.
const DATA = JSON.parse(document.getElementById("data").textContent);
const S = DATA.strings, C = DATA.calls, T = DATA.tensors;
const CALLS = C.name.length;
const name = (i) => S[C.name[i]], type = (i) => S[C.op_type[i]], verdict = (i) => S[C.verdict[i]];
const GROUPS = { steps: [...new Set(C.step)].sort((a, b) => a - b), ranks: [...new Set(C.rank)].sort((a, b) => a - b) };

const READERS = Array.from({ length: CALLS }, () => []);
const KIDS = Array.from({ length: CALLS }, () => []);
const ROOTS = [];
const holds = (outer, i) => { while (i > outer) i = C.parent[i]; return i === outer; };
const DIRECT = Array.from({ length: CALLS }, () => []);
for (let i = 0; i < CALLS; i++) {
  for (const maker of C.reads[i]) {
    DIRECT[maker].push(i);
    // What leaves a call that holds others is made by one of these: its readers are the outer one's too.
    for (let at = maker; at >= 0 && (at === maker || !holds(at, i)); at = C.parent[at]) if (READERS[at][READERS[at].length - 1] !== i) READERS[at].push(i);
  }
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

// Calls by verdict: the legend, the tally and the table count these.
const TALLY = new Map();
for (let i = 0; i < CALLS; i++) TALLY.set(verdict(i), (TALLY.get(verdict(i)) || 0) + 1);

// Names that are shown anywhere, in the order in which the first call of each began.
function nameOrder() {
  const wanted = new Set(SHOWN.map((i) => C.name[i])), order = new Map();
  for (const one of C.name) if (wanted.has(one) && !order.has(one)) order.set(one, order.size);
  return order;
}

function where(i) {
  const parts = [];
  if (GROUPS.steps.length > 1 || C.step[i]) parts.push(`step ${C.step[i]}`);
  if (GROUPS.ranks.length > 1 || C.rank[i]) parts.push(`rank ${C.rank[i]}`);
  if (C.occurrence[i]) parts.push(`#${C.occurrence[i]}`);
  if (S[C.phase[i]] !== "forward") parts.push(S[C.phase[i]]);
  return parts.join(", ");
}

// Who depends on whom. The code of a call that holds others runs between these: what they make it reads from then on, and what reads
// from it depends on what it read before. What it was given and only handed on to a call in it is no part of its code.
function ending(i) { let last = i; while (KIDS[last].length) last = KIDS[last][KIDS[last].length - 1]; return last; }
const handedOn = (maker, i) => KIDS[i].length > 0 && DIRECT[maker].some((k) => k !== i && holds(i, k));
function downstream(start) {
  const since = new Map(), found = new Set();
  const todo = READERS[start].map((k) => [start, k, S[C.slot[start]].startsWith("output") ? ending(start) : start]);
  while (todo.length) {
    const [from, to, time] = todo.pop();
    const around = holds(to, from);
    if (to === start || (!around && to <= time)) continue;
    found.add(to);
    const now = around ? Math.max(time, ending(from)) : to;
    if ((!around && handedOn(from, to)) || (since.has(to) && since.get(to) <= now)) continue;
    since.set(to, now);
    for (const next of DIRECT[to]) todo.push([to, next, now]);
  }
  return found;
}
function upstream(start) {
  const until = new Map(), found = new Set();
  const todo = C.reads[start].map((k) => [start, k, Infinity]);
  while (todo.length) {
    const [from, to, time] = todo.pop();
    if (to === start || to > time || (from !== start && !holds(from, to) && handedOn(to, from))) continue;
    found.add(to);
    const now = holds(to, from) ? from : Infinity;
    if (until.has(to) && until.get(to) >= now) continue;
    until.set(to, now);
    for (const next of C.reads[to]) todo.push([to, next, now]);
  }
  return found;
}
