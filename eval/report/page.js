"use strict";
// All text of the data goes into text nodes and attributes by DOM calls: none of it is ever read as markup.
const byId = (id) => document.getElementById(id);
const DATA = JSON.parse(byId("data").textContent), GROUPS = DATA.figures.groups;
const LINES = new Map(byId("lines").textContent.split("\n").map((line) => {
  const at = line.indexOf("\t");
  return [line.slice(0, at), line.slice(at + 1)];
}));
const stored = (key) => (LINES.get(key) ? JSON.parse(LINES.get(key)) : null);
const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const PAGE_SIZE = 25, MOST_TRIPLES = 30, MOST_PASSAGES = 10;
const OUTCOMES = {
  right: ["✓", "good", "right"], partly: ["~", "part", "partly right"], wrong: ["✗", "bad", "wrong"],
  failed: ["!", "bad", "failed"], none: ["·", "", "no result"],
};
const COSTS = {
  weighted_tokens: "tokens per question, in + 4 x out", tokens: "tokens per question", calls: "calls per question", sent: "calls sent per question",
  seconds: "seconds per question, as measured", dollars: "dollars per 1,000 questions",
};

function maker(create) {
  return (tag, attributes, ...children) => {
    const node = create(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== undefined && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.flat(Infinity).filter((child) => child || child === 0));
    return node;
  };
}
const h = maker((tag) => document.createElement(tag));
const s = maker((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));

const colour = (number) => `var(--c${number % 8})`;
// As Python rounds: of the ties that a double can hold, .25 goes down.
const percent = (value) => (100 * value - ((100 * value) % 1 === 0.25 ? 0.01 : 0)).toFixed(1);
const signed = (value) => (value < 0 ? "−" : "+") + percent(Math.abs(value));
const compact = (value) => Number(value.toPrecision(3)).toLocaleString("en");
const whole = (value) => value.toLocaleString("en");
const chance = (gap) => (gap.p_holm < 0.001 ? "< 0.001" : gap.p_holm.toFixed(3));
const interval = (value, form = percent) =>
  !value || value.mean === null ? "–" : `${form(value.mean)} (${form(value.low)} to ${form(value.high)})`;
const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
const note = (...text) => h("p", { class: "note" }, text);
const section = (title, told, ...body) => h("section", {}, h("h2", {}, title), told && note(told), body);
const fold = (title, ...body) => h("details", {}, h("summary", { class: "soft" }, title), body);
const legend = (names, hues = []) => h("div", { class: "legend" },
  names.map((name, n) => h("span", { style: `--own:${colour(hues[n] === undefined ? n : hues[n])}` }, name)));

function table(head, rows, kind) {
  // Figures stay on one line; names, commands and answers may be broken.
  const kept = (cell, n) => h("td", {}, n && cell.length < 40 ? cell.replaceAll(" ", "\u00a0") : cell);
  const line = (row) => (row instanceof Node ? row : h("tr", {}, row.map(kept)));
  return h("div", { class: "scroll" }, h("table", { class: kind },
    h("thead", {}, h("tr", {}, head.map((cell) => h("th", {}, cell)))), h("tbody", {}, rows.map(line))));
}

// The tables that report.md has, under their headings.
function blocks(fits) {
  const block = (one) => (typeof one === "string" ? note(one) : table(one.head, one.rows));
  return DATA.sections.filter(fits).map((one) => [one.heading && h("h3", {}, one.heading), one.blocks.map(block)]);
}

function choose(changes) {
  Object.assign(state, changes);
  history.replaceState(null, "", "#" + new URLSearchParams(state));
}

function select(label, name, options, changed) {
  const chosen = options.some(([value]) => value === state[name]) ? state[name] : options[0][0];
  const change = (event) => { choose({ [name]: event.target.value }); changed(); };
  return h("label", {}, label, h("select", { name, onchange: change },
    options.map(([value, text]) => h("option", { value, selected: value === chosen }, text))));
}

// What is shown now: the task, the metric, and the runs by their scores.
function view() {
  const at = GROUPS[state.task] ? Number(state.task) : 0, group = GROUPS[at];
  const metric = group.metrics.includes(state.metric) ? state.metric : group.metrics[0];
  const score = (run) => (run.figures.scores || {})[metric] || { mean: null };
  const runs = group.runs.map((run, number) => ({ ...run, number, score: score(run) }))
    .filter((run) => run.score.mean !== null).map((run, hue) => ({ ...run, hue }));
  runs.sort((a, b) => b.score.mean - a.score.mean);
  return { at, group, metric, runs, all: DATA.groups[at] };
}

function draw() {
  const now = GROUPS.length ? view() : null, several = GROUPS.length > 1;
  const anew = () => { choose({ metric: "", q: "", run: "", only: "", outcome: "", type: "", hops: "" }); draw(); };
  byId("choices").replaceChildren(h("div", {},
    several && select("Task", "task", DATA.groups.map((group, n) => [`${n}`, group.title]), anew),
    now && select("Metric", "metric", now.group.metrics.map((name) => [name, name]), draw)));
  byId("about").textContent = now ? now.all.about : "";
  const parts = [several && section("All tasks", null, blocks((one) => one.title === "All tasks")),
    now && section("Setting", null, blocks((one) => one.title === now.all.title && one.heading === "Setting"))];
  if (now && now.runs.length) {
    parts.push(leaderboard(now), now.runs.length > 1 && matrix(now), costs(now), more(now), questions(now));
  }
  const titles = [...new Set(DATA.sections.map((one) => one.title))];
  parts.push(section("All tables", `Those of report.md and report.tex. ${DATA.note}`,
    titles.map((title) => h("details", {}, h("summary", {}, title), blocks((one) => one.title === title)))));
  byId("page").replaceChildren(...parts.filter(Boolean));
  const open = document.querySelector("details.question[open]");
  if (open) open.scrollIntoView();
}

function bars(rows) {
  const row = ({ name, value, hue, said, kind }) => h("div", { class: "row" },
    h("div", { class: "name" }, name),
    h("div", { class: "track dots" },
      h("i", { style: `left:${percent(value.low)}%;right:${percent(1 - value.high)}%;background:${colour(hue)}` }),
      h("b", { style: `left:${percent(value.mean)}%;background:${colour(hue)}` })),
    h("div", { class: "score" }, interval(value)), h("div", { class: `verdict ${kind || "soft"}` }, said));
  const ticks = [0, 25, 50, 75, 100].map((tick) => h("span", {}, `${tick}`));
  return h("div", { class: "board" }, rows.map(row), h("div", { class: "row" }, h("div", { class: "axis" }, ticks)));
}

function leaderboard({ group, metric, runs }) {
  const against = (run) => {
    const gap = group.pairs[metric][run.number][runs[0].number];
    if (!gap) return { said: run === runs[0] && runs.length > 1 ? "highest score" : "" };
    if (gap.verdict !== "worse") return { said: `${signed(gap.mean)}, ${gap.verdict}` };
    return { said: `${signed(gap.mean)}, worse, p ${chance(gap)}`, kind: "bad" };
  };
  const part = (run) => (run.finished ? "" : ` (${whole(run.questions)} questions, not finished)`);
  return section(`${group.task}: ${metric}`, "Points are means, bars 95 % intervals over questions, times 100. "
    + "Differences are to the run with the highest score, on the questions that both have.",
  bars(runs.map((run, n) => ({ name: `${n + 1}. ${run.name}${part(run)}`, value: run.score, hue: run.hue,
    ...against(run) }))));
}

function matrix({ group, metric, runs }) {
  const told = note("Choose a cell to read it as a sentence.");
  const cell = (row, column) => {
    const gap = group.pairs[metric][row.number][column.number];
    if (!gap) return h("td", {});
    const sentence = `${row.name} against ${column.name}: ${signed(gap.mean)} (${signed(gap.low)} to `
      + `${signed(gap.high)}) on ${whole(gap.n)} questions, p ${chance(gap)} (${gap.test}, Holm): ${gap.verdict}.`;
    const kind = { better: "good", worse: "bad" }[gap.verdict] || "none";
    return h("td", { class: kind, title: sentence, onclick: () => told.replaceChildren(sentence) }, signed(gap.mean));
  };
  const line = (row, n) => h("tr", {}, h("td", {}, `${n + 1}. ${row.name}`), runs.map((column) => cell(row, column)));
  return section("Which differences are shown", "Row minus column, paired by question. Green: better, red: worse, at "
    + "p < 0.05 after Holm's correction over this table. Grey: no difference shown.",
  table(["", ...runs.map((_, n) => `${n + 1}`)], runs.map(line), "matrix"), told);
}

// An empty plot with ticks, and what places a value on it; y goes from 0 to 1.
function frame(low, high, label, yLabel, log, places) {
  const width = Math.max(280, Math.min(760, byId("page").clientWidth - 60)), height = 300;
  const left = 40, right = width - 14, top = 10, bottom = height - 42;
  const share = (value) => (log ? Math.log(Math.max(value, low) / low) / Math.log(high / low)
    : (value - low) / (high - low));
  const x = (value) => left + (right - left) * share(value), y = (value) => bottom - (bottom - top) * value;
  const size = 10 ** Math.floor(Math.log10(high - low));
  const step = [0.2, 0.5, 1, 2].find((n) => (high - low) / (n * size) <= 6) * size;
  const powers = Array.from({ length: 24 }, (_, n) => (n % 2 ? 3 : 1) * 10 ** (Math.floor(n / 2) - 4));
  const even = Array.from({ length: 7 }, (_, n) => (Math.ceil(low / step) + n) * step);
  const marks = (places || (log ? powers : even)).filter((value) => value >= low && value <= high);
  const svg = s("svg", { width, height, role: "img", "aria-label": `${yLabel} over ${label}` },
    [0, 0.25, 0.5, 0.75, 1].map((v) => [s("path", { class: "line", d: `M${left} ${y(v)}H${right}` }),
      s("text", { class: "soft", x: left - 8, y: y(v) + 4, "text-anchor": "end" }, `${100 * v}`)]),
    marks.map((v) => s("text", { class: "soft", x: x(v), y: bottom + 16, "text-anchor": "middle" }, compact(v))),
    s("text", { class: "soft", x: right, y: height - 6, "text-anchor": "end" }, label + (log ? " (log scale)" : "")));
  return { svg, x, y, width, right };
}

function costs({ metric, runs }) {
  const spend = (run, key) => (key === "seconds" ? run.figures.latency.mean : run.figures.cost[key]);
  const known = Object.keys(COSTS).filter((key) => runs.every((run) => spend(run, key)));
  const key = known.includes(state.cost) ? state.cost : known[0];
  const cost = new Map(runs.map((run) => [run, spend(run, key)]));
  const least = Math.min(...runs.map((run) => cost.get(run).mean));
  const most = Math.max(...runs.map((run) => cost.get(run).high), 1e-9), log = least > 0 && most / least > 20;
  const plot = frame(log ? least / 1.5 : 0, most * (log ? 1.3 : 1.05), COSTS[key], metric, log), { x, y } = plot;
  // By score, so that a run is beaten by one before it that costs no more.
  const front = runs.filter((run, n) => runs.slice(0, n).every((other) => cost.get(other).mean > cost.get(run).mean));
  plot.svg.append(s("path", { class: "line", "stroke-dasharray": "4 4",
    d: "M" + front.map((run) => `${x(cost.get(run).mean)} ${y(run.score.mean)}`).join("L") }));
  const labels = [], wide = plot.width > 560;
  runs.forEach((run, n) => {
    const spent = cost.get(run), px = x(spent.mean), py = y(run.score.mean), own = `fill:${colour(run.hue)}`;
    const text = wide ? short(run.name, 30) : `${n + 1}`, size = 7 * text.length, told = interval(spent, compact);
    const turned = px + size + 12 > plot.right;
    const from = turned ? px - 9 - size : px + 9;
    const taken = (at) => labels.some((one) => Math.abs(one.at - at) < 13 && one.from < from + size && from < one.to);
    let at = py + 4;
    while (taken(at) && at < py + 150) at += 5;
    labels.push({ at, from, to: from + size });
    plot.svg.append(s("g", {}, s("title", {}, `${run.name}: ${interval(run.score)}; ${told} ${COSTS[key]}`),
      s("path", { stroke: colour(run.hue), opacity: 0.45, "stroke-width": 2, fill: "none",
        d: `M${x(spent.low)} ${py}H${x(spent.high)}M${px} ${y(run.score.low)}V${y(run.score.high)}` }),
      s("circle", { cx: px, cy: py, r: 5, style: own }),
      s("text", { style: own, x: turned ? px - 9 : from, y: at, "text-anchor": turned ? "end" : "start" }, text)));
  });
  const names = { tokens: ["tokens_read", "tokens_written"], calls: ["calls"], weighted_tokens: ["weighted_tokens"] }[key];
  const split = runs.filter((run) => names && run.figures.roles).map((run) => ({ name: run.name,
    parts: Object.entries(run.figures.roles).map(([role, found]) =>
      [role.replace(`${run.system}.`, ""), names.reduce((sum, name) => sum + found[name], 0)]) }));
  return section("Quality against cost", "Up and to the left is better; the dashed line joins the runs that no other "
    + "beats in both. Cost is that of answering, as if the ledger had answered no call; that of indexing the corpus stands in "
    + "the tables.",
  select("Cost", "cost", known.map((name) => [name, COSTS[name]]), draw), plot.svg,
  !wide && note(runs.map((run, n) => `${n + 1} ${run.name}`).join(" · ")),
  split.length > 0 && [h("h3", {}, `${COSTS[key]}, by role`), stacks(split, compact)]);
}

// Bars of parts, one a row, all on one scale.
function stacks(rows, form) {
  const sum = (parts) => parts.reduce((all, [, size]) => all + size, 0);
  const most = Math.max(...rows.map(({ parts }) => sum(parts)));
  const bar = ([part, size], n) => h("div", { title: `${part}: ${form(size)}`,
    style: `width:${100 * size / (most || 1)}%;background:${colour(n)}` });
  return h("div", { class: "board" }, rows.map(({ name, parts }) => h("div", { class: "row" },
    h("div", { class: "name" }, name),
    h("div", { class: "track" }, h("div", { class: "stack" }, parts.map(bar)),
      legend(parts.map(([part, size]) => `${part} ${form(size)}`))),
    h("div", { class: "score" }, form(sum(parts))))));
}

function curves(series, label, yLabel) {
  const xs = series.flatMap((one) => one.points.map(([at]) => at)), low = Math.min(...xs), high = Math.max(...xs);
  const pad = (high - low || 1) * 0.06, marks = [...new Set(xs)];
  const { svg, x, y } = frame(low - pad, high + pad, label, yLabel, false, marks);
  series.forEach(({ name, points, hue }, place) => {
    const n = hue === undefined ? place : hue;
    const line = points.map(([at, value]) => `${x(at)} ${y(value.mean)}`).join("L");
    svg.append(s("path", { stroke: colour(n), "stroke-width": 2, fill: "none", d: `M${line}` }),
      ...points.map(([at, value]) => s("g", {}, s("title", {}, `${name}, ${at}: ${interval(value)}`),
        s("path", { stroke: colour(n), opacity: 0.5, d: `M${x(at)} ${y(value.low)}V${y(value.high)}` }),
        s("circle", { cx: x(at), cy: y(value.mean), r: 3.5, style: `fill:${colour(n)}` }))));
  });
  return [svg, legend(series.map((one) => one.name), series.map((one) => one.hue))];
}

// Slices, ablations, sweeps, granularity and recall, where the runs have them.
function more({ all, group, runs }) {
  const parts = blocks((one) => one.title === all.title && one.heading.startsWith("By "));
  const at = (place) => runs.find((run) => run.number === place);
  const add = (title, body) => parts.push(h("h3", {}, title), body);
  const ablations = group.ablations.map(at).filter(Boolean);
  if (ablations.length) {
    add("Ablations", bars(ablations.map((run) => ({ name: run.name, value: run.score, hue: run.hue }))));
  }
  for (const { option, values, runs: places } of group.sweeps) {
    const known = places.map((place, n) => [values[n], at(place)]).filter(([, run]) => run);
    const line = (name) => ({ name, points: known.map(([value, run]) => [value, run.figures.scores[name]]) });
    if (known.length > 1) add(`Scores over ${option}`, curves(group.metrics.map(line), option, "score"));
  }
  const levels = runs.filter((run) => run.figures.granularity).map((run) => ({ name: run.name,
    parts: Object.entries(run.figures.granularity).map(([level, found]) => [level, found.share.mean]) }));
  if (levels.length) add("What the answer was given from, % of the questions", stacks(levels, percent));
  const found = runs.filter((run) => run.figures.recall["retrieved@2"]).map((run) => ({ name: run.name, hue: run.hue,
    points: [2, 5, 15].map((k) => [k, run.figures.recall[`retrieved@${k}`]]) }));
  if (found.length) add("Supporting passages in the first 2, 5 and 15 retrieved, %", curves(found, "passages", "recall"));
  return parts.length > 0 && section("Where each is good", null, parts);
}

function outcome(columns, place, metric) {
  const score = columns ? columns[metric][place] : null;
  if (score === null) return "none";
  return columns.failed[place] ? "failed" : score >= 1 ? "right" : score > 0 ? "partly" : "wrong";
}

function questions(now) {
  const { all, runs, metric } = now, list = h("div"), count = note();
  const kinds = (name) => [...new Set(all[name])].filter(Boolean).sort().map((kind) => [`${kind}`, `${kind}`]);
  let shown = PAGE_SIZE;
  const fits = (place) => {
    if (["type", "hops"].some((name) => state[name] && `${all[name][place]}` !== state[name])) return false;
    if (state.traced && !all.traced.includes(place)) return false;
    const those = state.only ? runs.filter((run) => `${run.number}` === state.only) : runs;
    const found = (some) => some.map((run) => outcome(all.runs[run.number], place, metric));
    if (state.outcome === "differ" && new Set(found(runs)).size < 2) return false;
    if (OUTCOMES[state.outcome] && !found(those).includes(state.outcome)) return false;
    const texts = [all.ids[place], all.question[place], ...all.answers[place],
      ...those.map((run) => all.runs[run.number].prediction[place] || "")];
    return !state.text || texts.some((text) => text.toLowerCase().includes(state.text.toLowerCase()));
  };
  const fill = () => {
    const found = all.ids.map((_, place) => place).filter(fits), first = found.slice(0, shown);
    const open = all.ids.indexOf(state.q), left = all.ids.length - all.traced.length;
    count.replaceChildren(`${whole(found.length)} of ${whole(all.ids.length)} questions. Traces of `
      + `${whole(all.traced.length)} are in this page` + (left ? `; those of ${whole(left)} were left out (--traces). `
      + "Those that are in: first where the runs differ most, then where fewest are right." : "."));
    if (open >= 0 && !first.includes(open)) first.unshift(open);
    list.replaceChildren(...first.map((place) => question(now, place)));
    const further = () => { shown += PAGE_SIZE; fill(); };
    if (found.length > shown) list.append(h("button", { onclick: further }, "Show more"));
  };
  const again = () => { shown = PAGE_SIZE; choose({ q: "" }); fill(); };
  const search = h("input", { type: "search", placeholder: "question, answer or id", value: state.text || "",
    "aria-label": "Search", oninput: (event) => { choose({ text: event.target.value }); again(); } });
  const outcomes = Object.entries(OUTCOMES).map(([key, [, , text]]) => [key, text]);
  const any = (label, name, options) => options.length > 1 && select(label, name, [["", "any"], ...options], again);
  fill();
  return section("Questions", "One mark a run, in the order above: ✓ right, ~ partly, ✗ wrong, ! failed.",
    h("div", { class: "filters" }, search, any("Run", "only", runs.map((run) => [`${run.number}`, run.name])),
      any("Outcome", "outcome", [["differ", "runs differ"], ...outcomes]),
      any("Type", "type", kinds("type")), any("Hops", "hops", kinds("hops")),
      select("Trace", "traced", [["", "any"], ["yes", "in this page"]], again)), count, list);
}

function question(now, place) {
  const { all, runs, metric } = now, body = h("div"), id = all.ids[place];
  const marks = runs.map((run) => {
    const [sign, kind, text] = OUTCOMES[outcome(all.runs[run.number], place, metric)];
    return h("span", { class: `mark ${kind}`, title: `${run.name}: ${text}` }, sign);
  });
  const toggle = () => {
    if (node.open) choose({ q: id });
    body.replaceChildren(...(node.open ? answers(now, place) : []));
  };
  const node = h("details", { class: "question", open: id === state.q ? "" : false, ontoggle: toggle },
    h("summary", {}, h("span", { class: "asked" }, all.question[place]), h("span", { class: "marks" }, marks)), body);
  return node;
}

function answers(now, place) {
  const { at, all, runs, metric } = now, trace = h("div"), rows = new Map();
  const shown = ["prediction", metric, "stop", "rounds", "calls", "tokens_read", "tokens_written", "seconds"];
  const show = (number) => {
    rows.forEach((row, key) => row.classList.toggle("chosen", key === number));
    trace.replaceChildren(...traceOf(now, number, place));
  };
  for (const run of runs) {
    const columns = all.runs[run.number], [sign, kind] = OUTCOMES[outcome(columns, place, metric)];
    const cells = shown.map((name) => {
      const value = columns[name][place];
      return h("td", {}, value === null ? "–" : typeof value === "number" ? compact(value) : value);
    });
    rows.set(run.number, h("tr", { onclick: () => { choose({ run: run.number }); show(run.number); } },
      h("td", { class: kind }, `${sign} ${run.name}`), cells));
  }
  const chosen = runs.find((run) => `${run.number}` === `${state.run}`)
    || runs.find((run) => LINES.has(`${at}.${run.number}.${place}`)) || runs[0];
  show(chosen.number);
  const facts = [["Gold", all.answers[place].join(" | ")], ["Type", all.type[place]], ["Hops", all.hops[place]],
    ["Id", all.ids[place]]];
  return [h("p", {}, facts.filter(([, value]) => value).map(([name, value]) =>
    [h("span", { class: "soft" }, `${name}: `), `${value}   `])),
  table(["run (choose one)", "answer", metric, "ended by", "rounds", "calls", "read", "written", "seconds"],
    [...rows.values()], "runs"), trace];
}

function traceOf({ at, group, all }, number, place) {
  const trace = stored(`${at}.${number}.${place}`), texts = stored(all.corpora[number]) || {};
  if (!trace) return [note(`This trace is not in the page; see ${group.runs[number].folder}/results.jsonl.`)];
  const gold = new Set(trace.supporting), hits = trace.steps.flatMap((step) => step.passages.map((one) => one.id));
  const found = [...gold].filter((id) => hits.includes(id)).length;
  const replies = trace.actions.map((one) => h("pre", {}, one.reply));
  const passage = (one) => {
    const name = [gold.has(one.id) && h("b", { class: "good" }, "★ "), one.title || one.id];
    return h("li", {}, texts[one.id] ? h("details", {}, h("summary", {}, name), texts[one.id]) : name);
  };
  const passages = (some) => h("ul", {}, some.map(passage));
  const rounds = trace.steps.map((step, n) => h("div", { class: "round", style: `--own:${colour(n)}` },
    h("div", {}, h("span", { class: "soft" }, `Round ${n + 1}: `), step.query),
    passages(step.passages.slice(0, MOST_PASSAGES)),
    step.passages.length > MOST_PASSAGES && fold(`${step.passages.length - MOST_PASSAGES} more passages`,
      passages(step.passages.slice(MOST_PASSAGES))),
    step.triples.length > 0 && fold(`${step.triples.length} triples`,
      h("ul", {}, step.triples.map((triple) => h("li", {}, triple.join(" | ")))))));
  const told = h("div", {}, trace.error && h("p", { class: "bad" }, trace.error),
    rounds.length ? rounds : note("Nothing was retrieved."),
    gold.size > 0 && note(`★ ${found} of ${gold.size} supporting passages were found.`),
    replies.length > 0 && fold(`${replies.length} decisions`, replies),
    fold("What else the system noted", h("pre", {}, JSON.stringify(trace.details, null, 1))));
  return [h("div", { class: "trace" }, told, graph(trace, all.question[place], all.answers[place]))];
}

// Lists of triples, wherever a system notes them: what it kept.
function keptIn(value, found = []) {
  const triple = (one) => Array.isArray(one) && one.length === 3 && one.every((part) => typeof part === "string");
  if (Array.isArray(value) && value.length && value.every(triple)) found.push(...value);
  else if (value && typeof value === "object") Object.values(value).forEach((inner) => keptIn(inner, found));
  return found;
}

function graph(trace, asked, gold) {
  const triples = new Map(), nodes = new Map(), named = [asked, ...gold].join(" ").toLowerCase();
  const isNamed = (key) => key.length > 2 && named.includes(key);
  const isGold = (key) => gold.some((text) => text.toLowerCase() === key);
  const add = (triple, round, kept) => {
    const [from, predicate, to] = triple, ends = [from.toLowerCase(), to.toLowerCase()];
    const key = [ends[0], predicate.toLowerCase(), ends[1]].join("\t");
    if (triples.has(key)) triples.get(key).kept ||= kept;
    else triples.set(key, { from, predicate, to, ends, round, kept });
  };
  trace.steps.forEach((step, round) => step.triples.forEach((triple) => add(triple, round, false)));
  keptIn(trace.details).forEach((triple) => add(triple, -1, true));
  if (!triples.size) return note("This system read no triples for the question.");
  const edges = nearest([...triples.values()], isNamed);
  for (const edge of edges) {
    [edge.from, edge.to] = edge.ends.map((key, n) => {
      const name = n ? edge.to : edge.from, label = short(name, 22), half = 3.4 * label.length + 8;
      const kind = isGold(key) ? "gold" : isNamed(key) ? "asked" : "";
      if (!nodes.has(key)) nodes.set(key, { name, kind, label, half });
      return nodes.get(key);
    });
  }
  layout([...nodes.values()], edges);
  const left = edges.length < triples.size ? ": those it kept, and those near what the question names" : "";
  return h("div", {}, h("div", { class: "graph" }, picture([...nodes.values()], edges)),
    note(`${edges.length} of ${triples.size} triples${left}. Yellow: named in the question. Green: a gold answer. `
      + "Thick: kept by the system. Colours: rounds."));
}

// Triples that are kept, and those at most two steps from what the question and its answers name; else the first ones.
function nearest(triples, isNamed) {
  const far = new Map(triples.flatMap((one) => one.ends).map((key) => [key, isNamed(key) ? 0 : 9]));
  for (let step = 0; step < 3; step++) {
    for (const { ends: [one, two] } of triples) {
      far.set(one, Math.min(far.get(one), far.get(two) + 1));
      far.set(two, Math.min(far.get(two), far.get(one) + 1));
    }
  }
  const rank = (one) => (one.kept ? -1 : Math.min(...one.ends.map((key) => far.get(key))));
  const sorted = [...triples].sort((a, b) => rank(a) - rank(b)).slice(0, MOST_TRIPLES);
  return rank(sorted[0]) < 2 ? sorted.filter((one) => rank(one) < 2) : sorted;
}

// Springs along edges, repulsion between all, from fixed places: the same triples give the same picture.
function layout(nodes, edges) {
  const push = (one, two, x, y) => { one.dx += x; one.dy += y; two.dx -= x; two.dy -= y; };
  nodes.forEach((node, n) => {
    [node.x, node.y] = [Math.cos(2.4 * n), Math.sin(2.4 * n)].map((value) => 40 * Math.sqrt(n + 1) * value);
  });
  for (let heat = 14; heat > 0.2; heat -= 0.035) {
    for (const node of nodes) [node.dx, node.dy] = [-0.02 * node.x, -0.02 * node.y];
    nodes.forEach((one, n) => nodes.slice(n + 1).forEach((two) => {
      const x = one.x - two.x, y = one.y - two.y, apart = Math.max(x * x + y * y, 60);
      if (apart < 40000) push(one, two, 700 * x / apart, 700 * y / apart);
    }));
    for (const { from, to } of edges) {
      const x = to.x - from.x, y = to.y - from.y, length = Math.hypot(x, y) || 1, pull = 0.1 * (length - 60) / length;
      push(from, to, pull * x, pull * y);
    }
    for (const node of nodes) {
      const by = Math.min(1, heat / (Math.hypot(node.dx, node.dy) || 1));
      [node.x, node.y] = [node.x + by * node.dx, node.y + by * node.dy];
    }
  }
  for (const node of nodes) node.x *= 1.7; // names are wide
}

function picture(nodes, edges) {
  const left = Math.min(...nodes.map((node) => node.x - node.half)) - 14;
  const top = Math.min(...nodes.map((node) => node.y)) - 24;
  const width = Math.max(...nodes.map((node) => node.x + node.half)) + 14 - left;
  const height = Math.max(...nodes.map((node) => node.y)) + 24 - top;
  const border = (node, x, y) => { // where a line to (x, y) leaves the node's box
    const by = Math.min((node.half + 3) / (Math.abs(x - node.x) || 1e-6), 14 / (Math.abs(y - node.y) || 1e-6), 1);
    return [node.x + by * (x - node.x), node.y + by * (y - node.y)];
  };
  const between = new Map();
  const drawn = edges.map(({ from, to, predicate, round, kept }) => {
    // Several triples about the same two entities: arcs beside each other.
    const pair = [from.name, to.name].sort().join("\t"), turn = between.get(pair) || 0;
    between.set(pair, turn + 1);
    const x = to.x - from.x, y = to.y - from.y, length = Math.hypot(x, y) || 1;
    const bend = 26 * Math.ceil(turn / 2) * (turn % 2 === (from.name < to.name ? 1 : 0) ? 1 : -1) / length;
    const mx = (from.x + to.x) / 2 - bend * y, my = (from.y + to.y) / 2 + bend * x;
    const [x1, y1] = border(from, mx, my), [x2, y2] = border(to, mx, my);
    return [s("path", { d: `M${x1} ${y1}Q${mx} ${my} ${x2} ${y2}`, stroke: round < 0 ? "var(--soft)" : colour(round),
      "stroke-width": kept ? 3 : 1.2, "marker-end": "url(#arrow)" }),
    s("text", { class: "edge", x: (x1 + 2 * mx + x2) / 4, y: (y1 + 2 * my + y2) / 4 + 3 }, short(predicate, 26))];
  });
  const box = (node) => s("g", { class: node.kind }, s("title", {}, node.name),
    s("rect", { x: node.x - node.half, y: node.y - 11, width: 2 * node.half, height: 22, rx: 8 }),
    s("text", { x: node.x, y: node.y + 4 }, node.label));
  const arrow = s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7,
    orient: "auto", markerUnits: "userSpaceOnUse" }, s("path", { d: "M0 0L8 4L0 8z", style: "fill:var(--soft)" }));
  return s("svg", { viewBox: `${left} ${top} ${width} ${height}`, style: `width:${width}px;min-width:${0.6 * width}px`,
    role: "img", "aria-label": "graph of the triples" }, s("defs", {}, arrow),
  drawn.map(([line]) => line), drawn.map(([, text]) => text), nodes.map(box));
}

const missing = h("ul", {}, [...new Set(DATA.figures.missing)].map((sentence) => h("li", {}, sentence)));
if (missing.hasChildNodes()) {
  const few = missing.children.length < 6 ? "" : false, title = `What is missing (${missing.children.length})`;
  byId("missing").append(h("details", { class: "warn", open: few }, h("summary", {}, title), missing));
}
let seen = innerWidth;
addEventListener("resize", () => { if (seen !== innerWidth) { seen = innerWidth; draw(); } });
draw();
