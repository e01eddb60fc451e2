"""T2RAG beside its authors' code: propositions, searches, clues, calls, answers and scores on a made-up world.

Both sides use one fake server: its vectors are made of words, and its "model" fills a clue only if the fact stands in
the prompt. Its rules read our prompts, and get the clues of the authors' calls beside the prompt.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from tests.parity.server import Body, FakeServer
from tests.parity.table import NOT_RUN, Row
from tests.parity.their_side import run_theirs
from tripletune import load_system
from tripletune.eval.metrics import exact_match, f1
from tripletune.llm.backends import LLMOptions
from tripletune.llm.question_client import load_prompts
from tripletune.rag import Trace
from tripletune.rag.systems._clues import Clue, first_clues

SECTION = "T2RAG"
K = 3
PASSAGES = {
    "p1": (
        "Vera Holt was born in Quell.",
        [["Vera Holt", "was born in", "Quell"], ["Vera Holt", "painted", "Low Tide"]],
    ),
    "p2": ("Quell lies on the Sarn.", [["Quell", "lies on", "Sarn"]]),
    "p3": ("The Sarn flows into the Grey Sea.", [["Sarn", "flows into", "Grey Sea"]]),
    "p4": ("Ludo Fenn was born in Marl.", [["Ludo Fenn", "was born in", "Marl"]]),
    "p5": ("Marl lies on the Tove.", [["Marl", "lies on", "Tove"]]),
    "p6": ("Who Is There? was written by Ivo Rand.", [["Who Is There?", "was written by", "Ivo Rand"]]),
    "p7": ("Ivo Rand was born in Osk.", [["Ivo Rand", "was born in", "Osk"]]),
    "p8": ("Quell lies on the Sarn, says the guide.", [["Quell", "lies on", "Sarn"], ["Quell", "has", "a fair"]]),
    "p9": ("Osk has a castle.", [["Osk", "has", "a castle"]]),
}  # fmt: skip
# The question, the clues that the model writes for it (none: a reply without clues), and the answer.
QUESTIONS = {
    "one hop": ("Where was Ludo Fenn born?", ["Ludo Fenn | was born in | ?town"], "Marl"),
    "three hops": (
        "Into which sea flows the river of Vera Holt's town?",
        ["Vera Holt | was born in | ?town", "?town | lies on | ?river", "?river | flows into | ?sea"], "Grey Sea",
    ),
    "only clues with two unknowns": ("What flows into what?", ["?river | flows into | ?sea"], "Grey Sea"),
    "no clues": ("Where was Ivo Rand born?", [], "Osk"),
}  # fmt: skip
TITLE_CLUE = ["Who Is There?", "was written by", "?author"]
CLUES = [
    ["Vera Holt", "was born in", "Quell"], ["Vera Holt", "was born in", "?town"], ["?town", "lies on", "?river"],
    TITLE_CLUE, ["?a and ?b", "wrote", "Low Tide"],
]  # fmt: skip
_KINDS = ("resolved", "traceable", "fuzzy")
QUERIES = [["Vera Holt was born in"], ["Ludo Fenn was born in", "Marl lies on"], ["Ivo Rand was born in"]]
SHARED_QUERY = ["Quell lies on"]  # two passages state the proposition that it finds first
FOUR_FIELDS = "Vera Holt | painted | ?picture | 1931"
PAIRS = [("Sarn", "Sarn"), ("the Grey Sea", "Grey Sea"), ("Kelm", "Sarn"), ("in Quell", "Quell"), ("A", "A")]
# Files of the clone.
MEDICAL = "reproduce/dataset/medical.json"
MEDICAL_TRIPLES = "outputs/medical_univ/openie_results_ner.json"
_CLUE = re.compile(r"^\[(\d+)\] ([^|\n]+) \| ([^|\n]+) \| ([^|\n]+)$", re.MULTILINE)
_ROLES = ("decompose", "resolve", "answer")


class Finding(NamedTuple):
    """The passages of a question, and whether one of the propositions that it found is in several of them."""

    passages: set[str]
    is_shared: bool


def compare(clone: str, folder: Path) -> list[Row]:
    """Run both sides, and return the rows of the table."""
    medical = _read(Path(clone) / MEDICAL)
    documents = _read(Path(clone) / MEDICAL_TRIPLES, "docs")
    altered = _altered([row["answer"][0] for row in medical[:100]])
    with FakeServer(_reply) as server:
        _write_world(folder, server.url, [row["question"] for row in medical if documents], altered)
        run_theirs("theirs_t2rag", clone, folder)
        theirs = json.loads((folder / "theirs.json").read_text())
        their_texts = set(server.texts)
        server.clear()
        ours = asyncio.run(_run_ours(folder, server))
        our_texts = set(server.texts)
        published = asyncio.run(_find_published(folder, server, medical, documents)) if documents else []
    rows = [_proposition_row(theirs, our_texts), _instruction_row(their_texts)]
    rows += _search_rows(theirs["passages"], ours["passages"])
    rows += _clue_rows(theirs)
    for name in QUESTIONS:
        rows += _question_rows(name, theirs["questions"][name], ours["traces"][name])
    rows += _published_rows(theirs["medical"], published)
    rows.append(_altered_row(altered, theirs["scores"][len(PAIRS) :]))
    for (reply, gold), scores in zip(PAIRS, theirs["scores"]):
        our_scores = [exact_match(reply, [gold]), f1(reply, [gold])]
        named = "a gold answer that is an article" if gold == "A" else ""
        rows.append(Row(f"EM, F1 of {reply!r} for {gold!r}", scores, our_scores, named))
    rows.append(Row("vectors of NV-Embed-v2", f"{NOT_RUN}: a model of the hub", "made-up vectors on both sides"))
    return rows


def _read(file: Path, field: str = "") -> list[dict[str, Any]]:
    """The rows of a file of the clone; none if it is absent, as large files may be."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    rows: list[dict[str, Any]] = value[field] if field else value
    return rows


def _altered(golds: list[str]) -> list[tuple[str, str]]:
    """Two replies for each gold answer: altered in one of several ways, and the next question's answer."""
    pairs = []
    for number, gold in enumerate(golds):
        words = gold.split()
        ways = [gold.upper(), f"The {gold}.", " ".join(words[1:]) or gold, f"It is {gold}", gold.replace("-", " ")]
        pairs += [(ways[number % len(ways)], gold), (golds[number - 1], gold)]
    return pairs


async def _find_published(
    folder: Path, server: FakeServer, questions: list[dict[str, Any]], documents: list[dict[str, Any]]
) -> list[Finding]:
    """What each Medical question finds here, of the published triples."""
    lines = []
    # Fields that are split in another way make the same text.
    chunks_of: dict[str, set[str]] = {}
    for document in documents:
        # As in their code, a row that is no triple is left out.
        triples = [triple for triple in document["extracted_triples"] if len(triple) == 3]
        row = {"id": str(document["idx"]), "title": "", "text": document["passage"], "triples": triples}
        lines.append(json.dumps(row) + "\n")
        for triple in triples:
            chunks_of.setdefault(" ".join(triple), set()).add(row["id"])
    file = folder / "medical.jsonl"
    file.write_text("".join(lines))
    teacher = LLMOptions(backend="openai", model="fake", url=server.url)
    findings = []
    async with load_system(
        "t2rag", teacher=teacher, corpus=str(file), triples=str(file), retriever="dense",
        encoder=f"openai:fake@{server.url}",
    ) as system:  # fmt: skip
        index = system.tools.triples
        assert index is not None
        for question in questions:
            rows, scores = await index.gather([question["question"]], 5, 100)
            passages = {index.passages[position].id for position in scores}
            texts = [" ".join(index[number].as_list()) for number in rows]
            is_shared = any(len(chunks_of.get(text, ())) > 1 for text in texts)
            findings.append(Finding(passages, is_shared))
    return findings


def _published_rows(theirs: list[list[str]], ours: list[Finding]) -> list[Row]:
    """How many questions find the same five passages, with and without a proposition of several chunks."""
    rows = []
    for is_shared, step in ((False, "each in one chunk"), (True, "of several chunks")):
        step = f"five passages of Medical questions, propositions {step}"
        if not ours:
            rows.append(Row(step, f"{NOT_RUN}: the clone lacks {MEDICAL} or {MEDICAL_TRIPLES}", ""))
            continue
        pairs = [(passages, own) for passages, own in zip(theirs, ours, strict=True) if own.is_shared == is_shared]
        equal = sum(set(passages) == own.passages for passages, own in pairs)
        named = "a proposition of several chunks" if is_shared else ""
        rows.append(Row(step, f"{len(pairs)} questions", f"the same for {equal}", named, equal == len(pairs)))
    return rows


def _altered_row(pairs: list[tuple[str, str]], theirs: list[list[float]]) -> Row:
    """How many altered answers of Medical score alike."""
    if not pairs:
        return Row("EM and F1 of altered Medical answers", f"{NOT_RUN}: the clone lacks {MEDICAL}", "")
    equal = 0
    for (reply, gold), scores in zip(pairs, theirs, strict=True):
        ours = [exact_match(reply, [gold]), f1(reply, [gold])]
        equal += all(abs(first - second) < 1e-9 for first, second in zip(scores, ours, strict=True))
    step = "EM and F1 of altered Medical answers"
    return Row(step, f"{len(pairs)} pairs", f"the same for {equal}", "", equal == len(pairs))


def _write_world(folder: Path, url: str, medical: list[str], altered: list[tuple[str, str]]) -> None:
    """Write the inputs of the authors' side, and the corpus and triples of ours.

    Args:
        medical: Questions that are searched in the published triples.
        altered: More pairs of reply and gold answer.
    """
    passages, corpus, triples = [], [], []
    for name, (text, facts) in PASSAGES.items():
        passages.append({"id": name, "text": text, "triples": facts})
        corpus.append({"id": name, "title": "", "text": text})
        triples.append({"id": name, "title": "", "text": text, "triples": facts})
    world = {
        "url": url, "k": K, "passages": passages, "clues": CLUES, "queries": [*QUERIES, SHARED_QUERY],
        "questions": {name: question for name, (question, _, _) in QUESTIONS.items()},
        "four_fields": FOUR_FIELDS, "pairs": [*PAIRS, *altered], "medical_questions": medical,
        "medical_triples": MEDICAL_TRIPLES,
    }  # fmt: skip
    (folder / "world.json").write_text(json.dumps(world))
    for name, lines in (("corpus", corpus), ("triples", triples)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


async def _run_ours(folder: Path, server: FakeServer) -> dict[str, Any]:
    """Our system's traces by question, and the passages of the searches."""
    teacher = LLMOptions(backend="openai", model="fake", url=server.url)
    options: dict[str, Any] = {"retriever": "dense", "encoder": f"openai:fake@{server.url}", "top_k": K}
    for kind in ("corpus", "triples"):
        options[kind] = str(folder / f"{kind}.jsonl")
    traces = {}
    passages = []
    async with load_system("t2rag", teacher=teacher, **options) as system:
        for name, (question, _, _) in QUESTIONS.items():
            traces[name] = await system.answer_async(question)
        index = system.tools.triples
        assert index is not None
        for queries in [*QUERIES, SHARED_QUERY]:
            _, scores = await index.gather(queries, K, 100)
            passages.append([index.passages[position].id for position in scores])
    return {"traces": traces, "passages": passages}


def _reply(body: Body) -> str:
    """The "model": writes the clues of a question, fills those whose fact is in the prompt, and answers from clues."""
    prompt = body["messages"][-1]["content"]
    given = body.get("parity")
    role = given["role"] if given else _our_role(body)
    asked = next(entry for entry in QUESTIONS.values() if entry[0] in prompt)
    if role in ("decompose", "retry"):
        if not asked[1]:
            return "I cannot say."
        return "Reasoning: step by step.\n\nTriples:\n" + "\n".join(asked[1])
    clues = given["clues"] if given else [list(match) for _, *match in _CLUE.findall(prompt)]
    if role == "answer":
        is_solved = any(asked[2] in clue for clue in clues) or (not clues and asked[2] in prompt)
        return asked[2] if is_solved else "unknown"
    filled = _filled(clues, prompt)
    if given is None:
        return "\n".join(" | ".join(clue) for clue in filled) or "(none)"
    lines = []
    for number, clue in enumerate(filled, 1):
        kind = "Newly Traceable" if any("?" in field for field in clue) else "Fully Resolved"
        lines += [f"{kind} Clue {number}:", *map(": ".join, zip(("Subject", "Predicate", "Object"), clue))]
    return "\n".join(lines)


def _our_role(body: Body) -> str:
    """The role of one of our calls, by its instruction."""
    prompts = load_prompts(tuple(f"t2rag_{role}" for role in _ROLES), None)
    system = body["messages"][0]["content"]
    return next(role for role in _ROLES if prompts.chat(f"t2rag_{role}", "")[0]["content"] == system)


def _filled(clues: list[list[str]], prompt: str) -> list[list[str]]:
    """The clues with one unknown whose fact stands in the prompt; what they fill is filled in the others, too."""
    values: dict[str, str] = {}
    filled = []
    facts = [fact for text, facts in PASSAGES.values() if text in prompt for fact in facts]
    for clue in clues:
        unknowns = [field for field in clue if field.startswith("?")]
        if len(unknowns) != 1:
            continue
        place = clue.index(unknowns[0])
        for fact in facts:
            if [*fact[:place], *fact[place + 1 :]] == [*clue[:place], *clue[place + 1 :]]:
                values[unknowns[0]] = fact[place]
                filled.append(fact)
    for clue in clues:
        bound = [values.get(field, field) for field in clue]
        if bound != clue and bound not in filled:
            filled.append(bound)
    return filled


def _proposition_row(theirs: dict[str, Any], our_texts: set[str]) -> Row:
    """The texts of the corpus that are embedded."""
    texts = set(theirs["propositions"])
    return Row(
        "texts of propositions", f"{len(texts)} texts", f"{len(texts & our_texts)} of them", is_equal=texts <= our_texts
    )


def _instruction_row(their_texts: set[str]) -> Row:
    """Whether an instruction stands before a text that is embedded."""
    with_instruction = sum(text.startswith("Instruct") for text in their_texts)
    theirs = f"{NOT_RUN}: their class for servers drops it; {with_instruction} of {len(their_texts)} texts have one"
    return Row("instruction for the encoder", theirs, "none")


def _search_rows(theirs: list[list[str]], ours: list[list[str]]) -> list[Row]:
    """The passages of equal queries."""
    rows = []
    for queries, their_passages, our_passages in zip([*QUERIES, SHARED_QUERY], theirs, ours, strict=True):
        named = "a proposition of several chunks" if queries == SHARED_QUERY else ""
        rows.append(Row(f"passages of {' + '.join(queries)}", their_passages, our_passages, named))
    return rows


def _clue_rows(theirs: dict[str, Any]) -> list[Row]:
    """Kinds of clues, and a row of four fields."""
    rows = []
    for fields, kinds in zip(CLUES, theirs["kinds"], strict=True):
        ours = _KINDS[Clue(1, fields).kind]
        named = "kind of a clue" if fields == TITLE_CLUE else ""
        rows.append(Row(f"kind of {' / '.join(fields)}", kinds[0], ours, named))
    (clue,) = first_clues(f"Triples:\n{FOUR_FIELDS}")
    rows.append(Row("a row of four fields", theirs["fields"], clue.fields, "a fourth field in a row"))
    return rows


def _question_rows(name: str, theirs: dict[str, Any], trace: Trace) -> list[Row]:
    """Queries of the first round, rounds, calls and answer of a question."""
    named = {
        "one hop": "",
        "three hops": "clues with two unknowns",
        "only clues with two unknowns": "clues with two unknowns",
        "no clues": "a reply without clues",
    }[name]
    first = theirs["rounds"][0] if theirs["rounds"] else {"queries": [], "passages": []}
    step = trace.steps[0] if trace.steps else None
    our_queries = step.query.split("; ") if step else []
    queries_named = named if name == "no clues" else "queries of a round"
    return [
        Row(f"{name}: queries of round 1", first["queries"], our_queries, queries_named),
        Row(f"{name}: rounds", len(theirs["rounds"]), len(trace.steps), named),
        Row(f"{name}: calls", len(theirs["calls"]), trace.calls, named),
        Row(f"{name}: answer", theirs["answer"], trace.answer, named),
    ]
