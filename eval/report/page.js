"use strict"; // rag/trace.js comes before this script
const DATA = JSON.parse(byId("data").textContent), GROUPS = DATA.figures.groups;
const LINES = new Map(byId("lines").textContent.split("\n").map((line) => {
  const at = line.indexOf("\t");
  return [line.slice(0, at), line.slice(at + 1)];
}));
const stored = (key) => (LINES.get(key) ? JSON.parse(LINES.get(key)) : null);
const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const RANKINGS = { retrieved: "all retrieved", first: "found by the first search", shown: "shown to the reader" };
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const TURNS = [0, -4, 8, 4, -2, -6, 2, 6, -1, -3, -5, -7, 1, 3, 5, 7].map((eighth) => eighth * Math.PI / 8);
const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "paint-order",
  "font-size", "font-family", "font-weight", "text-anchor"];
const PAGE_SIZE = 25;
const OUTCOMES = {
  right: ["✓", "good", "right"], partly: ["~", "part", "partly right"], wrong: ["✗", "bad", "wrong"],
  failed: ["!", "bad", "failed"], none: ["·", "", "no result"],
};
const COSTS = {
  weighted_tokens: "tokens per question, in + 4 x out", tokens: "tokens per question", calls: "calls per question",
  sent: "calls sent per question", seconds: "seconds per question, as measured", dollars: "dollars per 1,000 questions",
};

// Eight colours and seven shapes: 56 marks that all differ, in print and for the colour-blind too.
const SHAPES = ["M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z", "M-5-5H5V5H-5z", "M0-7L6 5H-6z", "M0-7L7 0L0 7L-7 0z",
  "M0 7L-6-5H6z", "M-2-6H2V-2H6V2H2V6H-2V2H-6V-2H-2z", "M-6-4L-4-6L0-2L4-6L6-4L2 0L6 4L4 6L0 2L-4 6L-6 4L-2 0z"];
const dot = (number, x, y) => s("path", { class: "dot", d: SHAPES[number % 7], transform: `translate(${x} ${y})`,
  style: `fill:${colour(number)}` });
const words = (x, y, text, kind, anchor) => s("text", { x, y, class: kind, "text-anchor": anchor }, text);
const ruler = document.createElement("canvas").getContext("2d");
ruler.font = `12px ${getComputedStyle(document.body).fontFamily}`;
const length = (text) => ruler.measureText(text).width;
// Names of runs often differ only at their ends.
const cut = (text, most, half = Math.max(3, Math.floor(text.length * most / length(text) / 2) - 1)) =>
  (length(text) <= most ? text : `${text.slice(0, half)}…${text.slice(-half)}`);
const room = () => Math.max(280, byId("page").clientWidth - (innerWidth > 760 ? 66 : 38));
// As Python rounds: of the ties that a double can hold, .25 goes down.
const percent = (value) => (100 * value - ((100 * value) % 1 === 0.25 ? 0.01 : 0)).toFixed(1);
const signed = (value) => (value < 0 ? "−" : "+") + percent(Math.abs(value));
const compact = (value) => Number(value.toPrecision(3)).toLocaleString("en");
const whole = (value) => value.toLocaleString("en");
const chance = (gap) => (gap.p_holm < 0.001 ? "< 0.001" : gap.p_holm.toFixed(3));
const interval = (value, form = percent) =>
  !value || value.mean === null ? "–" : `${form(value.mean)} (${form(value.low)} to ${form(value.high)})`;
const section = (title, told, ...body) => h("section", {}, h("h2", {}, title), told && note(told), body);

// A picture, and a button that saves it in its light colours, for a paper.
const plot = (name, width, height, ...parts) =>
  saved(s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "plot" }, parts), name);

function saved(svg, name) {
  const { group, metric } = view();
  const file = [group.task.slice(0, 40), metric, name].join("-").replace(/[^\w-]+/g, "_") + ".svg";
  const save = () => {
    const copy = svg.cloneNode(true), nodes = svg.querySelectorAll("*");
    svg.style.colorScheme = "light";
    copy.querySelectorAll("*").forEach((node, n) => {
      ["style", "class"].forEach((one) => node.removeAttribute(one));
      LOOKS.forEach((one) => node.setAttribute(one, getComputedStyle(nodes[n]).getPropertyValue(one)));
    });
    svg.style.colorScheme = "";
    const text = new XMLSerializer().serializeToString(copy);
    h("a", { download: file, href: URL.createObjectURL(new Blob([text], { type: "image/svg+xml" })) }).click();
  };
  return [svg, h("button", { class: "save", onclick: save }, `Save ${file}`)];
}

function table(head, rows, kind) {
  // Figures stay on one line; names, commands and answers may be broken.
  const kept = (cell, n) => h("td", {}, n && cell.length < 27 ? cell.replaceAll(" ", "\u00a0") : cell);
  const line = (row) => (row instanceof Node ? row : h("tr", {}, row.map(kept)));
  return scrolled("scroll", h("table", { class: kind, role: kind === "matrix" && "grid" },
    h("thead", {}, h("tr", {}, head.map((cell) => h("th", {}, cell)))), h("tbody", {}, rows.map(line))));
}

// The tables that report.md has, under their headings.
function blocks(fits, from = 0) {
  const block = (one) => (typeof one === "string" ? note(one) : table(one.head, one.rows, one.head[0]));
  return DATA.sections.filter(fits).map((one) =>
    [!from && one.heading && h("h3", {}, one.heading), one.blocks.slice(from).map(block)]);
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

// What is shown now: the task, the metric, and the runs by their scores, unfinished runs last.
function view() {
  const at = GROUPS[state.task] ? Number(state.task) : 0, group = GROUPS[at];
  const metric = group.metrics.includes(state.metric) ? state.metric : group.metrics[0];
  const score = (run) => (run.figures.scores || {})[metric] || { mean: null };
  const runs = group.runs.map((run, number) => ({ ...run, number, score: score(run) }))
    .filter((run) => run.score.mean !== null).map((run, hue) => ({ ...run, hue }));
  runs.sort((a, b) => b.finished - a.finished || b.score.mean - a.score.mean);
  return { at, group, metric, runs, all: DATA.groups[at] };
}

function draw() {
  const now = GROUPS.length ? view() : null, several = GROUPS.length > 1, focused = document.activeElement.name;
  const anew = () => { choose({ metric: "", q: "", run: "", only: "", outcome: "", type: "", hops: "" }); draw(); };
  byId("choices").replaceChildren(h("div", {},
    several && select("Task", "task", DATA.groups.map((group, n) => [`${n}`, group.title]), anew),
    now && select("Metric", "metric", now.group.metrics.map((name) => [name, name]), draw)));
  byId("about").textContent = now ? now.all.about : "";
  byId("about").className = /ORACLE/.test(byId("about").textContent) ? "warn" : "note";
  const overview = blocks((one) => one.title === "All tasks");
  const parts = [overview.length > 0 && section("All tasks", null, overview),
    now && section("Setting", null, blocks((one) => one.title === now.all.title && one.heading === "Setting", 1))];
  if (now && now.runs.length) {
    parts.push(leaderboard(now), now.runs.length > 1 && matrix(now), costs(now), confidence(now), more(now), questions(now));
  }
  const titles = [...new Set(DATA.sections.map((one) => one.title))];
  parts.push(section("All tables", `report.md and report.tex have the same tables. ${DATA.note}`,
    titles.map((title) => h("details", {}, h("summary", {}, title), blocks((one) => one.title === title)))));
  byId("page").replaceChildren(...parts.filter(Boolean));
  if (focused) document.getElementsByName(focused)[0]?.focus();
  document.querySelector("details.question[open]")?.scrollIntoView();
}

// A row for each name: values below each other, with their intervals, and words.
function bars(rows, file, keys = []) {
  const width = room(), wide = width > 700, several = 11 * (rows[0].values.length - 1);
  const tall = (wide ? 26 : 58) + several, top = keys.length && 22, end = top + tall * rows.length;
  const longest = Math.max(...rows.map(({ name, part = "" }) => length(name + part)));
  const left = wide ? Math.min(0.3 * width, longest) + 24 : 8;
  const right = width - (!wide ? 14 : rows[0].said ? 370 : 190), x = (value) => left + (right - left) * value;
  const row = ({ name, part = "", values, hues, told, said, kind }, n) => {
    const y = top + tall * n + (wide ? 14 : 30), line = wide ? y + several / 2 + 4 : y - 14;
    const most = (wide ? left - 16 : width - length(told) - 16) - length(part);
    return s("g", {}, s("title", {}, name), words(0, line, cut(name, most) + part, "name"),
      words(wide ? right + 20 : width, line, told, "score", wide ? "start" : "end"),
      values.map((value, place) => value.mean !== null && [s("path", { class: "range", stroke: colour(hues[place]),
        d: `M${x(value.low)} ${y + 11 * place}H${x(value.high)}` }), dot(hues[place], x(value.mean), y + 11 * place)]),
      said && words(wide ? right + 175 : 0, wide ? line : y + 19, said, `verdict ${kind || "soft"}`));
  };
  const start = (n) => left + keys.slice(0, n).reduce((sum, key) => sum + length(key) + 30, 0);
  return plot(file, width, end + 22, [0, 25, 50, 75, 100].map((tick) => [
    s("path", { class: "line", d: `M${x(tick / 100)} ${top}V${end + 4}` }),
    words(x(tick / 100), end + 18, tick, "soft", "middle")]), rows.map(row),
  keys.map((key, n) => [dot(n, start(n), 8), words(start(n) + 10, 12, key, "soft")]));
}
const bar = (run) => ({ name: run.name, values: [run.score], hues: [run.hue], told: interval(run.score) });
// Values that are told apart by marks, as the metrics or lengths in `keys`.
const marked = (rows, file, keys) => bars(rows.map((row) => ({ ...row, hues: keys.map((_, n) => n),
  told: row.values.map((value) => (value.mean === null ? "–" : percent(value.mean))).join(" / ") })), file, keys);

function leaderboard({ group, metric, runs }) {
  const against = (run) => {
    const gap = group.pairs[metric][run.number][runs[0].number];
    if (!gap) return { said: run === runs[0] && runs.length > 1 ? "highest score" : "" };
    if (gap.verdict !== "worse") return { said: `${signed(gap.mean)}, ${gap.verdict}` };
    return { said: `${signed(gap.mean)}, worse, p ${chance(gap)}`, kind: "bad" };
  };
  const part = (run) => (run.finished ? "" : ` (${whole(run.questions)} of ${whole(run.expected || NaN)} questions)`)
    + (run.figures.errors ? `, ${whole(run.figures.errors)} failed` : "");
  return section(`${group.task}: ${metric}`, "Points are means and bars are 95 % intervals over questions, times 100. "
    + "Differences are to the best run, on the questions that both runs have.",
  bars(runs.map((run, n) => ({ ...bar(run), name: `${n + 1}. ${run.name}`, part: part(run), ...against(run) })),
    "scores"));
}

function matrix({ group, metric, runs }) {
  const told = h("p", { class: "note", role: "status" }, "Choose a cell (mouse, arrow keys) to read it as a sentence.");
  const cell = (row, column, n, m) => {
    const gap = group.pairs[metric][row.number][column.number];
    const sentence = gap && `${row.name} against ${column.name}: ${signed(gap.mean)} (${signed(gap.low)} to `
      + `${signed(gap.high)}) on ${whole(gap.n)} questions, p ${chance(gap)} (${gap.test}, Holm): ${gap.verdict}.`;
    const kind = gap && ({ better: "good", worse: "bad" }[gap.verdict] || "none");
    const tell = () => told.replaceChildren(sentence || `${row.name} itself.`);
    const move = (event) => {
      const [down, across] = ARROWS[event.key] || [], next = down !== undefined && cells[n + down]?.[m + across];
      if (next) { event.preventDefault(); next.focus(); }
    };
    return h("td", { class: kind || "", title: sentence || "", tabindex: n + m ? -1 : 0, onclick: tell, onfocus: tell,
      onkeydown: move }, gap && signed(gap.mean));
  };
  const cells = runs.map((row, n) => runs.map((column, m) => cell(row, column, n, m)));
  const line = (row, n) => h("tr", {}, h("th", { scope: "row" }, `${n + 1}. ${row.name}`), cells[n]);
  return section("Which differences are shown", "Row minus column, paired by question. Green: better, red: worse, at "
    + "p < 0.05 after Holm's correction over this table. Grey: no difference shown.",
  table(["", ...runs.map((_, n) => `${n + 1}`)], runs.map(line), "matrix"), told);
}

// Names beside their points, each at the nearest place where neither it nor, if that can be, its line covers another.
function named(points, [left, top, right, bottom]) {
  const taken = points.map(({ x, y }) => [x - 6, y - 6, x + 6, y + 6]);
  return points.map(({ x, y, text, hue }) => {
    const size = length(text) + 6;
    for (let n = 0; n < 90; n++) {
      const far = 6 * (n < 20 ? n : n - 20);
      for (const turn of TURNS) {
        const from = x + Math.cos(turn) * (10 + size / 2 + far) - size / 2, middle = y + Math.sin(turn) * (15 + far);
        const box = [from, middle - 7, from + size, middle + 7];
        const end = [Math.max(from, Math.min(x, box[2])), Math.max(middle - 4, Math.min(y, middle + 4))];
        const on = (part) => [x + part / far * (end[0] - x), y + part / far * (end[1] - y)], way = [box];
        for (let part = 12; part < far && n < 20; part += 3) way.push([...on(part), ...on(part)]);
        const covers = (one) => way.some((at) => one[0] < at[2] && at[0] < one[2] && one[1] < at[3] && at[1] < one[3]);
        if (from < left || box[1] < top || box[2] > right || box[3] > bottom || taken.some(covers)) continue;
        taken.push(box);
        return [far > 0 && s("path", { class: "lead", stroke: colour(hue), d: `M${x} ${y}L${end.join(" ")}` }),
          words(from + 3, middle + 4, text, "label")];
      }
    }
    return [];
  });
}

function costs({ metric, runs }) {
  const spend = (run, key) => (key === "seconds" ? run.figures.latency.mean : run.figures.cost[key]);
  const known = Object.keys(COSTS).filter((key) => runs.some((run) => spend(run, key)?.mean));
  if (!known.length) return null;
  const key = known.includes(state.cost) ? state.cost : known[0], paid = runs.filter((run) => spend(run, key)?.mean);
  const least = Math.min(...paid.map((run) => spend(run, key).mean));
  const most = Math.max(...paid.map((run) => spend(run, key).high));
  const log = most / least > 20, low = log ? least / 1.5 : 0, high = most * (log ? 1.3 : 1.05);
  const width = room(), height = Math.max(320, Math.min(440, 0.4 * width)), right = width - 8, bottom = height - 56;
  const share = (value) => (log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : value / high);
  const x = (value) => 34 + (right - 34) * share(value), y = (value) => bottom - (bottom - 74) * value;
  const size = 10 ** Math.floor(Math.log10(high)), step = [0.2, 0.5, 1, 2].find((n) => high / (n * size) <= 6) * size;
  const ticks = Array.from({ length: 24 }, (_, n) => (log ? [1, 3][n % 2] * 10 ** ((n >> 1) - 4) : n * step));
  const wide = width > 560, points = paid.map((run) => ({ ...run, spent: spend(run, key), x: x(spend(run, key).mean),
    y: y(run.score.mean), text: wide ? cut(run.name, 200) : `${runs.indexOf(run) + 1}` }));
  // By score, so that a run is beaten by one before it that costs no more; only finished runs, if there are any.
  const front = points.filter((one, n) => one.finished === points[0].finished
    && points.slice(0, n).every((other) => other.spent.mean > one.spent.mean));
  const parts = [s("rect", { class: "line", x: 34, y: 18, width: right - 34, height: bottom - 6 }),
    [0, 0.25, 0.5, 0.75, 1].map((v) => [s("path", { class: "line", d: `M34 ${y(v)}H${right}` }),
      words(26, y(v) + 4, 100 * v, "soft", "end")]),
    ticks.filter((v) => v >= low && v <= high).map((v) => words(x(v), bottom + 28, compact(v), "soft", "middle")),
    words(right, height - 6, COSTS[key] + (log ? " (log scale)" : ""), "soft", "end"), words(0, 12, metric, "soft"),
    s("path", { class: "front", d: "M" + front.map((one) => `${one.x} ${one.y}`).join("L") }),
    points.map((one) => s("path", { class: "error", stroke: colour(one.hue), d: `M${x(one.spent.low)} ${one.y}`
      + `H${x(one.spent.high)}M${one.x} ${y(one.score.low)}V${y(one.score.high)}` })),
    points.map((one) => s("g", {}, dot(one.hue, one.x, one.y), s("title", {},
      `${one.name}: ${interval(one.score)}; ${interval(one.spent, compact)} ${COSTS[key]}`))),
    named(points.sort((a, b) => a.x - b.x), [34, 18, right, bottom + 12])];
  const names = { tokens: ["tokens_read", "tokens_written"], calls: [key], weighted_tokens: [key] }[key];
  const split = paid.filter((run) => names && run.figures.roles).map((run) => ({ name: run.name,
    parts: Object.entries(run.figures.roles).map(([role, found]) =>
      [role.replace(`${run.system}.`, ""), names.reduce((sum, name) => sum + found[name], 0)]) }));
  const free = runs.filter((run) => !paid.includes(run)).map((run) => run.name);
  return section("Quality against cost", "Up and to the left is better; the dashed line joins the runs that no other "
    + "run beats in both. The cost is for answering and includes calls that the ledger answered; the tables have the "
    + "cost of indexing the corpus.",
  select("Cost", "cost", known.map((name) => [name, COSTS[name]]), draw), plot(key, width, height, parts),
  !wide && note(runs.map((run, n) => `${n + 1} ${run.name}`).join(" · ")),
  free.length > 0 && note(`Runs whose cost is 0 or not known are not in this plot: ${free.join(", ")}.`),
  split.length > 0 && [h("h3", {}, `${COSTS[key]}, by role`), stacks(split, compact, `${key}-by-role`)]);
}

// Score of the answers that a threshold lets through, by the share of questions that get one.
function confidence({ group, runs }) {
  const known = [...new Set(runs.flatMap((run) => Object.keys(run.figures.confidence)))];
  if (!known.length) return null;
  const of = known.includes(state.sure) ? state.sure : known[0], headline = group.metrics[0];
  const drawn = runs.filter((run) => run.figures.confidence[of]), width = room(), height = 320;
  const right = width - 8, bottom = height - 46;
  const x = (value) => 34 + (right - 34) * value, y = (value) => bottom - (bottom - 30) * value;
  const line = (run) => {
    const points = run.figures.confidence[of].curve.map((one) => ({ ...one, x: x(one.coverage), y: y(one.score.mean) }));
    return [s("path", { class: "error", style: "fill:none", stroke: colour(run.hue),
      d: "M" + points.map((one) => `${one.x} ${one.y}`).join("L") }),
    points.map((one) => s("g", {}, dot(run.hue, one.x, one.y), s("title", {},
      `${run.name}: ${interval(one.score)} of the ${percent(one.coverage)} % answered from ${one.threshold} on`)))];
  };
  const end = (run) => ({ text: cut(run.name, 160), hue: run.hue, x: x(1),
    y: y(run.figures.confidence[of].curve[0].score.mean) });
  const parts = [[0, 0.25, 0.5, 0.75, 1].map((v) => [s("path", { class: "line", d: `M34 ${y(v)}H${right}` }),
    words(26, y(v) + 4, 100 * v, "soft", "end"), words(x(v), bottom + 20, 100 * v, "soft", "middle")]),
  words(0, 12, `${headline} of the answered`, "soft"), words(right, height - 6, "% of the questions answered", "soft",
    "end"), drawn.map(line), named(drawn.map(end), [34, 14, right, bottom])];
  return section("When to say I don't know", "To the left, only the surest answers are given (--abstain). A flat line: "
    + "this confidence does not tell right answers from wrong ones.",
  select("Confidence", "sure", known.map((name) => [name, name]), draw),
  plot(`risk-coverage-${of}`, width, height, parts));
}

// Bars of parts, one per row, all on one scale; a part has one colour in all bars.
function stacks(rows, form, file) {
  const sum = (parts) => parts.reduce((all, [, size]) => all + size, 0), width = room(), wide = width > 700;
  const kinds = [...new Set(rows.flatMap(({ parts }) => parts.map(([one]) => one)))].filter((one) => one !== "answer");
  const own = (part) => `fill:${colour(1 + kinds.indexOf(part) % 7)}`; // of an answer the first
  const left = wide ? Math.min(0.3 * width, Math.max(...rows.map(({ name }) => length(name)))) + 16 : 0;
  const scale = (width - left - (wide ? 70 : 0)) / (Math.max(...rows.map(({ parts }) => sum(parts))) || 1);
  let y = 0;
  const drawn = rows.map(({ name, parts }) => {
    const top = y + (wide ? 4 : 18), up = top + (wide ? 12 : -6);
    let from = left, at = left, line = top + 31;
    const row = parts.map(([part, size]) => {
      const text = `${part} ${form(size)}`, need = 30 + length(text);
      if (at + need > width && at > left) [at, line] = [left, line + 16];
      [from, at] = [from + scale * size, at + need];
      return [s("rect", { x: from - scale * size, y: top, width: scale * size, height: 16, style: own(part) }),
        s("rect", { x: at - need, y: line - 9, width: 10, height: 10, style: own(part) }),
        words(at - need + 14, line, text, "soft")];
    });
    y = line + 12;
    return [words(0, up, cut(name, wide ? left - 8 : width - 70)), words(width, up, form(sum(parts)), "", "end"), row];
  });
  return plot(file, width, y, drawn);
}

// Slices, granularity and recall, where the runs have them.
function more({ all, runs }) {
  const parts = blocks((one) => one.title === all.title && one.heading.startsWith("By "));
  const add = (title, body) => parts.push(h("h3", {}, title), body);
  const levels = runs.filter((run) => run.figures.granularity).map((run) => ({ name: run.name,
    parts: Object.entries(run.figures.granularity).map(([level, found]) => [level, found.share.mean]) }));
  if (levels.length) add("What answers were given from, % of questions", stacks(levels, percent, "answered-from"));
  const ranked = Object.keys(RANKINGS).filter((of) => runs.some((run) => run.figures.recall[`${of}@2`]));
  if (ranked.length) {
    const of = ranked.includes(state.ranking) ? state.ranking : ranked[0], known = ({ values }) => values[0];
    // A number that no ranking of a run reaches is not there.
    const numbers = [2, 5, 15].filter((k) => runs.some((run) => run.figures.recall[`${of}@${k}`]));
    const missing = { mean: null, low: null, high: null };
    const found = ({ name, figures }) => ({ name,
      values: numbers.map((k) => figures.recall[`${of}@${k}`] || (figures.recall[`${of}@2`] && missing)) });
    add("Supporting passages found, % of all", [
      select("Passages", "ranking", ranked.map((name) => [name, RANKINGS[name]]), draw),
      marked(runs.map(found).filter(known), `recall-${of}`, numbers.map((k) => `first ${k}`))]);
  }
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
    count.replaceChildren(`${whole(found.length)} of ${whole(all.ids.length)} questions. This page has the traces of `
      + `${whole(all.traced.length)} questions` + (left ? ` and lacks ${whole(left)} (--traces). Questions on which `
      + "the runs differ most have traces first, then questions with the fewest right answers." : "."));
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
  return section("Questions", "One mark per run, in the order above: ✓ right, ~ partly, ✗ wrong, ! failed.",
    h("div", { class: "filters" }, search, any("Run", "only", runs.map((run) => [`${run.number}`, run.name])),
      any("Outcome", "outcome", [["differ", "runs differ"], ...outcomes]),
      any("Type", "type", kinds("type")), any("Hops", "hops", kinds("hops")),
      select("Trace", "traced", [["", "any"], ["yes", "in this page"]], again)), count, list);
}

function question(now, place) {
  const { all, runs, metric } = now, body = h("div"), id = all.ids[place];
  const marks = runs.map((run) => {
    const [sign, kind, text] = OUTCOMES[outcome(all.runs[run.number], place, metric)];
    return h("span", { class: `mark ${kind}`, role: "img", title: `${run.name}: ${text}` }, sign);
  });
  const toggle = ({ target }) => {
    if (target.open) choose({ q: id });
    body.replaceChildren(...(target.open ? answers(now, place) : []));
  };
  return h("details", { class: "question", open: id === state.q ? "" : false, ontoggle: toggle },
    h("summary", {}, h("span", { class: "asked" }, all.question[place]), h("span", { class: "marks" }, marks)), body);
}

function answers(now, place) {
  const { at, all, runs, metric } = now, trace = h("div"), rows = new Map();
  const shown = ["prediction", metric, "stop", "rounds", "calls", "tokens_read", "tokens_written", "seconds"];
  const show = (number) => {
    rows.forEach((row, key) => { row.querySelector("button").ariaPressed = key === number; });
    trace.replaceChildren(...traceOf(now, number, place, drawn.map((run) => run.name)));
  };
  for (const run of runs) {
    const columns = all.runs[run.number], [sign, kind] = OUTCOMES[outcome(columns, place, metric)];
    const cells = shown.map((name) => {
      const value = columns[name][place];
      return h("td", {}, value === null ? "–" : typeof value === "number" ? compact(value) : value);
    });
    rows.set(run.number, h("tr", { onclick: () => { choose({ run: run.number }); show(run.number); } },
      h("td", {}, h("button", { class: kind, type: "button" }, `${sign} ${run.name}`)), cells));
  }
  const traces = new Map(runs.map((run) => [run, stored(`${at}.${run.number}.${place}`)]));
  const drawn = runs.filter((run) => traces.get(run) && triplesOf(traces.get(run)).size);
  const chosen = runs.find((run) => `${run.number}` === `${state.run}`) || drawn[0]
    || runs.find((run) => traces.get(run)) || runs[0];
  show(chosen.number);
  const facts = [["Gold", all.answers[place].join(" | ")], ["Type", all.type[place]], ["Hops", all.hops[place]],
    ["Id", all.ids[place]]];
  return [h("p", {}, facts.filter(([, value]) => value).map(([name, value]) =>
    [h("span", { class: "soft" }, `${name}: `), `${value}   `])),
  table(["run (choose one)", "answer", metric, "ended by", "rounds", "calls", "read", "written", "seconds"],
    [...rows.values()], "runs"), trace];
}

function traceOf({ at, group, all }, number, place, drawn) {
  const trace = stored(`${at}.${number}.${place}`), texts = stored(all.corpora[number]) || {};
  if (!trace) return [note(`This trace is not in the page; see ${group.runs[number].folder}/results.jsonl.`)];
  const gold = new Set(trace.supporting), hits = trace.steps.flatMap((step) => step.passages.map((one) => one.id));
  const found = [...gold].filter((id) => hits.includes(id)).length;
  const replies = trace.actions.map((one) => [h("pre", {}, one.reply), one.note && note(one.note)]);
  const passage = (one) => {
    const name = [gold.has(one.id) && h("b", { class: "good" }, "★ "), one.title || (texts[one.id] || "").slice(0, 60) || one.id,
      one.source?.page ? `, p. ${one.source.page}` : ""];
    return h("li", {}, texts[one.id] ? h("details", {}, h("summary", {}, name), texts[one.id]) : name);
  };
  const rounds = trace.steps.map((step, n) => roundOf(step, n, passage));
  const told = h("div", {}, trace.error && h("p", { class: "bad" }, trace.error),
    rounds.length ? rounds : note("Nothing was retrieved."),
    gold.size > 0 && note(`★ ${found} of ${gold.size} supporting passages were found.`),
    replies.length > 0 && fold(`${replies.length} decisions`, replies),
    fold("What else the system noted", h("pre", {}, JSON.stringify(trace.details, null, 1))));
  const why = `No graph: the trace of ${group.runs[number].name} has no triples`
    + (trace.error ? ", since the question failed." : trace.steps.length ? ", only passages." : " and no passage.");
  const [svg, says] = graph(trace, all.question[place], all.answers[place], "a gold answer") || [];
  return [h("div", { class: "trace" }, told, svg ? h("div", {}, scrolled("graph", svg), saved(svg, "graph")[1], note(says))
    : note(why, drawn.length ? ` Runs that have one: ${drawn.join(", ")}.` : " No run has one for this question."))];
}

const missing = h("ul", {}, [...new Set(DATA.figures.missing)].map((sentence) => h("li", {}, sentence)));
if (missing.hasChildNodes()) {
  const few = missing.children.length < 6 ? "" : false, title = `What is missing or doubtful (${missing.children.length})`;
  byId("missing").append(h("details", { class: "warn", open: few }, h("summary", {}, title), missing));
}
let seen = innerWidth;
addEventListener("resize", () => { if (seen !== innerWidth) { seen = innerWidth; draw(); } });
draw();
