"use strict"; // what stands in trace.js, before it
const form = byId("form"), field = byId("question"), status = byId("status");
let stopping = null;

const headers = () => ({ "Content-Type": "application/json",
  ...(byId("key").value && { Authorization: `Bearer ${byId("key").value}` }) });
const tell = (text, busy = false) => { status.textContent = text; status.className = busy ? "note busy" : "note"; };

async function refused(response) {
  if (response.status === 401) { byId("keyed").hidden = false; byId("key").focus(); }
  const found = await response.json().catch(() => ({}));
  const wait = response.headers.get("Retry-After");
  return new Error((found.error?.message || `the server replied ${response.status}`) + (wait ? ` (in ${wait} s)` : ""));
}

async function loadModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await refused(response);
  const loops = (await response.json()).data.filter((one) => one.tripletune.kind === "loop");
  byId("model").replaceChildren(...loops.map(({ id }) => h("option", { value: id }, id)));
}

// The objects of an event stream, as they come.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let left = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (left + value).split("\n\n");
    left = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: {")) yield JSON.parse(block.slice(6));
  }
}

async function ask() {
  if (!byId("model").value) await loadModels();
  const question = field.value.trim(), model = byId("model").value, seen = { steps: [], actions: [], details: {} };
  const body = JSON.stringify({ model, stream: true, messages: [{ role: "user", content: question }] });
  const view = show(question, model);
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body,
      signal: stopping.signal });
    if (!response.ok) throw await refused(response);
    for await (const chunk of eventsOf(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const found = chunk.tripletune;
      if (found?.event === "plan") seen.actions.push({ ...found, before: seen.steps.length });
      if (found?.event === "retrieve") seen.steps.push(found);
      if (found?.event) view.draw(seen);
      if (found?.event) tell(found.event === "plan" ? "Searching …" : `Round ${seen.steps.length} found; thinking …`, true);
      if (found && !found.event) view.finish(found, seen.actions);
    }
    tell("");
  } catch (error) {
    view.fail(error.name === "AbortError" ? "Stopped." : error.message);
    tell("");
  }
}

// One question: what has been found so far, then the answer.
function show(question, model) {
  const said = h("p", { class: "answer none", "aria-live": "polite" }, "…"), body = h("div");
  const row = h("details", { class: "asked", open: "" }, h("summary", {}, h("h2", {}, question),
    h("span", { class: "soft" }, model)), said, body);
  for (const older of byId("answers").querySelectorAll("details.asked")) older.open = false;
  byId("answers").prepend(h("section", {}, row));
  const put = (kind, text) => { said.className = `answer ${kind}`; said.textContent = text; };
  return {
    draw: (seen) => body.replaceChildren(traceOf({ question, ...seen }, seen.actions)),
    finish(trace, actions) {
      put(trace.answer ? "" : "none", trace.answer || "No answer.");
      body.replaceChildren(...[sourcesOf(trace), traceOf(trace, actions), figuresOf(trace)].filter(Boolean));
    },
    fail: (text) => put("bad none", text),
  };
}

// What the answer was given from: documents and pages of the passages that the last prompt held.
function sourcesOf(trace) {
  const pages = new Map(), shown = trace.passages.filter(({ id, source }) => source.document && trace.shown.includes(id));
  for (const { source: { document, page } } of shown) pages.set(document, (pages.get(document) || new Set()).add(page));
  const listed = [...pages].map(([document, all]) => [document, [...all].filter(Boolean).sort((a, b) => a - b)]);
  const told = listed.map(([document, all]) => document + (all.length ? `, p. ${all.join(", ")}` : ""));
  return told.length > 0 && h("p", { class: "note" }, "Read for this answer: ", told.join(" · "));
}

// Document, page and heading of a passage, without what its title says already.
const placeOf = ({ document, page, heading }, title) =>
  [document, page && `page ${page}`, heading].filter((part) => part && !title.includes(part)).join(", ");

function traceOf(trace, actions) {
  const texts = new Map((trace.passages || []).map((one) => [one.id, one])), places = new Map(), facts = new Map();
  const name = (one) => {
    const place = one.source?.document && placeOf(one.source, one.title || "");
    return [one.title || one.id, place && h("span", { class: "from" }, place)];
  };
  const passage = (one) => {
    const whole = texts.get(one.id);
    if (!whole) return h("li", {}, name(one));
    const text = h("p", {}, whole.text), node = h("details", { class: "passage" }, h("summary", {}, name(one)), text);
    places.set(one.id, [...(places.get(one.id) || []), { node, text, whole }]);
    return h("li", {}, node);
  };
  const key = (triple) => triple.join("\t");
  const from = new Map((trace.triples || []).map((one) => [key([one.subject, one.predicate, one.object]), one.passages]));
  const choose = (triple) => {
    const own = from.get(key(triple)) || [], labels = drawn ? drawn[0].querySelectorAll(".edge") : [];
    for (const list of places.values()) list.forEach(unmark);
    for (const [one, buttons] of facts) buttons.forEach((b) => { b.ariaPressed = `${one === key(triple)}`; });
    for (const label of labels) label.classList.toggle("chosen", label.dataset.triple === key(triple));
    const chosen = own.flatMap((id) => places.get(id)?.slice(0, 1) || []);
    chosen.forEach((one) => mark(one, [triple[0], triple[2]]));
    chosen[0]?.node.querySelector("summary").focus({ preventScroll: true });
    chosen[0]?.node.scrollIntoView({ block: "center", behavior: "smooth" });
    tell(chosen.length ? "" : trace.passages ? "No passage found is known to say this." : "Passages come with the answer.");
  };
  const fact = (triple) => {
    const button = h("button", { type: "button", class: "fact", onclick: () => choose(triple) }, triple.join(" | "));
    facts.set(key(triple), [...(facts.get(key(triple)) || []), button]);
    return button;
  };
  const plans = (n) => actions.filter((one) => one.before === n).map((one) => h("div", { class: "plan" }, `Plan: ${one.reply.trim()}`));
  const rounds = trace.steps.map((step, n) => [plans(n), roundOf(step, n, passage, fact)]);
  const drawn = graph(trace, trace.question, [trace.answer].filter(Boolean), "the answer", choose);
  const empty = trace.passages ? "No graph: no triples were read." : "The graph grows with the triples that are read.";
  return h("div", { class: "trace" }, h("div", {}, rounds, plans(trace.steps.length)),
    drawn ? h("div", { class: "drawn" }, scrolled("graph", drawn[0]), note(drawn[1], " Choose a triple to see its passage.")) : note(empty));
}

function unmark({ node, text, whole }) {
  node.classList.remove("chosen");
  text.replaceChildren(whole.text);
}

// Open a passage and mark names in it.
function mark({ node, text, whole }, names) {
  node.classList.add("chosen");
  node.open = true;
  let parts = [whole.text];
  for (const name of names.filter(Boolean)) {
    parts = parts.flatMap((part) => {
      const at = typeof part === "string" ? part.toLowerCase().indexOf(name.toLowerCase()) : -1;
      return at < 0 ? [part] : [part.slice(0, at), h("mark", {}, part.slice(at, at + name.length)), part.slice(at + name.length)];
    });
  }
  text.replaceChildren(...parts);
}

function figuresOf(trace) {
  const whole = (value) => value.toLocaleString("en"), { prompt_tokens: read, completion_tokens: written } = trace;
  return h("div", {}, note(`${whole(trace.calls)} calls, ${whole(read)} tokens read, ${whole(written)} written, `
    + `${trace.seconds.toFixed(1)} s; ended by: ${trace.stop_reason}`),
  fold("The whole trace", h("pre", {}, JSON.stringify(trace, null, 1))));
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (stopping || !field.value.trim()) return;
  stopping = new AbortController();
  byId("stop").hidden = false;
  byId("ask").disabled = true;
  tell("Planning …", true);
  try {
    await ask();
  } catch (error) {
    tell(error.message);
  } finally {
    stopping = null;
    byId("stop").hidden = true;
    byId("ask").disabled = false;
  }
});
field.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
});
byId("stop").addEventListener("click", () => stopping?.abort());
addEventListener("keydown", (event) => { if (event.key === "Escape") stopping?.abort(); });
loadModels().catch((error) => tell(error.message));
