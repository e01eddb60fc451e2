"use strict";
// A question's trace as pages draw it: rounds, passages, triples and their graph.
// All text of the data goes into text nodes and attributes by DOM calls: none of it is ever read as markup.
const byId = (id) => document.getElementById(id);
const MOST_TRIPLES = 30, MOST_PASSAGES = 10;

function maker(create) {
  return (tag, attributes, ...children) => {
    const node = create(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) value && node.addEventListener(name.slice(2), value);
      else if (name === "style") node.style.cssText = value; // which a policy without inline styles lets through
      else if (value !== undefined && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.flat(Infinity).filter((child) => child || child === 0));
    return node;
  };
}
const h = maker((tag) => document.createElement(tag));
const s = maker((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));

const colour = (number) => `var(--c${number % 8})`;
const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
const note = (...text) => h("p", { class: "note" }, text);
const fold = (title, ...body) => h("details", {}, h("summary", { class: "soft" }, title), body);

// What is wider than its place says so, and is reached by the keyboard.
const watch = new ResizeObserver((seen) => seen.forEach(({ target }) => {
  target.tabIndex = target.classList.toggle("wide", target.scrollWidth > target.clientWidth) - 1;
}));
function scrolled(kind, inner) {
  const node = h("div", { class: kind, role: "region", "aria-label": "figures" }, inner);
  watch.observe(node);
  return node;
}

// A round of retrieval: `passage` and `triple` make what stands in the list for each.
function roundOf(step, n, passage, triple = (one) => one.join(" | ")) {
  const list = (some) => h("ul", {}, some.map(passage)), more = step.passages.slice(MOST_PASSAGES);
  return h("div", { class: "round", style: `--own:${colour(n)}` },
    h("div", {}, h("span", { class: "soft" }, `Round ${n + 1}: `), step.query),
    list(step.passages.slice(0, MOST_PASSAGES)),
    more.length > 0 && fold(`${more.length} more passages`, list(more)),
    step.triples.length > 0 && fold(`${step.triples.length} triples`,
      h("ul", {}, step.triples.map((one) => h("li", {}, triple(one))))));
}

// Lists of triples, wherever a system notes them: what it kept.
function keptIn(value, found = []) {
  const triple = (one) => Array.isArray(one) && one.length === 3 && one.every((part) => typeof part === "string");
  if (Array.isArray(value) && value.length && value.every(triple)) found.push(...value);
  else if (value && typeof value === "object") Object.values(value).forEach((inner) => keptIn(inner, found));
  return found;
}

// What a system read and kept, each triple once.
function triplesOf(trace) {
  const triples = new Map();
  const add = (triple, round, kept) => {
    const [from, predicate, to] = triple, ends = [from.toLowerCase(), to.toLowerCase()];
    const key = [ends[0], predicate.toLowerCase(), ends[1]].join("\t");
    if (triples.has(key)) triples.get(key).kept ||= kept;
    else triples.set(key, { from, predicate, to, ends, round, kept });
  };
  trace.steps.forEach((step, round) => step.triples.forEach((triple) => add(triple, round, false)));
  keptIn(trace.details).forEach((triple) => add(triple, -1, true));
  return triples;
}

// The picture of a trace's triples and what it shows, in words; null where there is none. `chosen` gets a triple.
function graph(trace, asked, answers, green, chosen) {
  const triples = triplesOf(trace), nodes = new Map(), named = [asked, ...answers].join(" ").toLowerCase();
  const isNamed = (key) => key.length > 2 && named.includes(key);
  const isAnswer = (key) => answers.some((text) => text.toLowerCase() === key);
  if (!triples.size) return null;
  const edges = nearest([...triples.values()], isNamed);
  for (const edge of edges) {
    edge.triple = [edge.from, edge.predicate, edge.to];
    [edge.from, edge.to] = edge.ends.map((key, n) => {
      const name = n ? edge.to : edge.from, label = short(name, 22), half = 3.4 * label.length + 8;
      const kind = isAnswer(key) ? "gold" : isNamed(key) ? "asked" : "";
      if (!nodes.has(key)) nodes.set(key, { name, kind, label, half });
      return nodes.get(key);
    });
  }
  layout([...nodes.values()], edges);
  const left = edges.length < triples.size ? ": those it kept, and those near what the question names" : "";
  return [picture([...nodes.values()], edges, chosen), `${edges.length} of ${triples.size} triples${left}. `
    + `Yellow: named in the question. Green: ${green}. Thick: kept by the system. Colours: rounds.`];
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

// Where a label may stand on its line, as parts of the line's length.
const SPOTS = [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8];
const onCurve = (part, [x1, y1], [mx, my], [x2, y2]) => ({
  x: (1 - part) ** 2 * x1 + 2 * part * (1 - part) * mx + part ** 2 * x2,
  y: (1 - part) ** 2 * y1 + 2 * part * (1 - part) * my + part ** 2 * y2 });
// Letters of labels are about 5 wide; boxes of nodes are 22 high.
const isBeside = ({ x, y }, label, node) =>
  Math.abs(x - node.x) > node.half + 2.5 * label.length || Math.abs(y - node.y) > 17;

function picture(nodes, edges, chosen) {
  const left = Math.min(...nodes.map((node) => node.x - node.half)) - 14;
  const top = Math.min(...nodes.map((node) => node.y)) - 24;
  const width = Math.max(...nodes.map((node) => node.x + node.half)) + 14 - left;
  const height = Math.max(...nodes.map((node) => node.y)) + 24 - top;
  const border = (node, x, y) => { // where a line to (x, y) leaves the node's box
    const by = Math.min((node.half + 3) / (Math.abs(x - node.x) || 1e-6), 14 / (Math.abs(y - node.y) || 1e-6), 1);
    return [node.x + by * (x - node.x), node.y + by * (y - node.y)];
  };
  const between = new Map();
  const drawn = edges.map(({ from, to, predicate, round, kept, triple }) => {
    // Several triples about the same two entities: arcs beside each other.
    const pair = [from.name, to.name].sort().join("\t"), turn = between.get(pair) || 0;
    between.set(pair, turn + 1);
    const x = to.x - from.x, y = to.y - from.y, length = Math.hypot(x, y) || 1;
    const bend = 26 * Math.ceil(turn / 2) * (turn % 2 === (from.name < to.name ? 1 : 0) ? 1 : -1) / length;
    const mx = (from.x + to.x) / 2 - bend * y, my = (from.y + to.y) / 2 + bend * x;
    const [x1, y1] = border(from, mx, my), [x2, y2] = border(to, mx, my);
    // The label is in the middle of the line, or beside it where a node would cover it.
    const label = short(predicate, 26), places = SPOTS.map((part) => onCurve(part, [x1, y1], [mx, my], [x2, y2]));
    const at = places.find((place) => nodes.every((node) => isBeside(place, label, node))) || places[0];
    return [s("path", { d: `M${x1} ${y1}Q${mx} ${my} ${x2} ${y2}`, stroke: round < 0 ? "var(--soft)" : colour(round),
      "stroke-width": kept ? 3 : 1.2, "marker-end": "url(#arrow)" }),
    s("text", { class: chosen ? "edge chooses" : "edge", x: at.x, y: at.y + 3,
      "data-triple": chosen && triple.join("\t"), onclick: chosen && (() => chosen(triple)) }, label)];
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
