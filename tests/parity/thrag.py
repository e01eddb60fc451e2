"""TH-RAG beside its authors' code: chunks, graph, selection, evidence, calls, answers and scores on a made-up world.

Both sides use one fake server: its vectors are made of words, its extraction knows the triples of each document, and
its selection the labels of each question. Our corpus is the authors' chunks, so that both read the same texts.
"""

import asyncio
import json
import shutil
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

SECTION = "TH-RAG"
K1, K2 = 3, 2
WINDOW = 12  # words of each document
_ROLES = ("extract", "topics", "subtopics", "answer")
TOWN, RIVER, PAINTER, PICTURE = ("town", "Geography"), ("river", "Geography"), ("painter", "Art"), ("picture", "Art")
ENGINEER, BRIDGE, TOWER = ("engineer", "Architecture"), ("bridge", "Architecture"), ("tower", "Architecture")
WRITER, NOVEL, FAIR = ("writer", "Literature"), ("novel", "Literature"), ("fair", "Culture")
PERSON, ANIMAL, NONE = ("person", "Society"), ("animal", "Nature"), ("", "")


class Fact(NamedTuple):
    """A triple as the model extracts it, with its sentence and the labels of its ends."""

    triple: list[str]
    sentence: str
    subject: tuple[str, str]
    object: tuple[str, str]


DOCUMENTS = {
    "Vera Holt was born in Quell. She painted Low Tide in 1931.": [
        Fact(["Vera Holt", "born in", "Quell"], "Vera Holt was born in Quell.", PAINTER, TOWN),
        Fact(["Vera Holt", "painted", "Low Tide"], "She painted Low Tide in 1931.", PAINTER, PICTURE),
    ],
    "Quell lies on the Sarn. The town was founded in 1702 there.": [
        Fact(["Quell", "lies on", "Sarn"], "Quell lies on the Sarn.", TOWN, RIVER),
        Fact(["Quell", "founded in", "1702"], "The town was founded in 1702 there.", TOWN, NONE),
    ],
    "Ludo Fenn built Kelm Bridge and Marl Tower for the old town.": [
        Fact(["Ludo Fenn", "built", name],
             "Ludo Fenn built Kelm Bridge and Marl Tower for the old town.", ENGINEER, kind)
        for name, kind in (("Kelm Bridge", BRIDGE), ("Marl Tower", TOWER))
    ],
    "The Marl Fair takes place in Quell each spring since the war.": [
        Fact(["Marl Fair", "takes place in", "Quell"],
             "The Marl Fair takes place in Quell each spring since the war.", FAIR, TOWN),
    ],
    'Ivo Rand wrote the novel "Grey Sea" at home in Osk then.': [
        Fact(["Ivo Rand", "wrote", "Grey Sea"],
             "Ivo Rand wrote the novel 'Grey Sea' at home in Osk then.", WRITER, NOVEL)
    ],
    "Bees are kept by Una Moss near the mill at Lower Combe.": [
        Fact(["Una Moss", "keeps", "bees"], "Bees are kept by Una Moss near the mill at Lower Combe.", PERSON, ANIMAL)
    ],
    "王明 met 李华 and 张伟 in a tea house by the lake.": [
        Fact(["王明", "met", name], "王明 met 李华 and 张伟 in a tea house by the lake.", PERSON, PERSON)
        for name in ("李华", "张伟")
    ],
}  # fmt: skip
for _names in (("Edda", "Dawn", "Dusk"), ("Tove", "Rain", "Snow"), ("Alma", "Oak", "Elm"), ("Rolf", "Hay", "Rye"),
               ("Ines", "Fog", "Ice"), ("Karl", "Sand", "Salt")):  # fmt: skip
    _name, *_pictures = _names
    _sentences = [f"The painter {_name} painted picture {_picture}." for _picture in _pictures]
    DOCUMENTS[" ".join(_sentences)] = [
        Fact([_name, "painted", _picture], _sentence, PAINTER, PICTURE)
        for _picture, _sentence in zip(_pictures, _sentences, strict=True)
    ]
# The one document whose reply has words before its code fence.
FENCED = "Bees are kept by Una Moss near the mill at Lower Combe."


class Question(NamedTuple):
    """A question: the labels that the model selects, the sentence with the answer, and the answer."""

    text: str
    topics: list[str]
    subtopics: list[str]
    sentence: str
    answer: str


QUESTIONS = {
    "a plain question": Question(
        "Who built Kelm Bridge?", ["Architecture"], ["bridge"], "Ludo Fenn built Kelm Bridge", "Ludo Fenn"),
    "two sentences of one chunk": Question(
        "Was Vera Holt born in Quell, and painted Low Tide in 1931?", ["Art", "Geography"],
        ["painter", "picture", "town"], "She painted Low Tide in 1931.", "yes"),
    "a subtopic far from the words": Question(
        "Which picture did the painter paint as a picture?", ["Geography"], ["river"], "Quell lies on the Sarn.",
        "Sarn"),
    "a sentence of two triples": Question(
        "Which tower stands?", ["Architecture"], ["tower"], "Ludo Fenn built Kelm Bridge and Marl Tower", "Marl Tower"),
    "a sentence with other quotation marks": Question(
        "Who wrote the novel Grey Sea?", ["Literature"], ["novel"], "Ivo Rand wrote", "Ivo Rand"),
    "a reversed pair": Question(
        "Where does the Marl Fair take place?", ["Culture"], ["fair"], "The Marl Fair takes place", "Quell"),
    "no listed label": Question("Who keeps bees?", ["Insects"], ["insects"], FENCED, "Una Moss"),
}  # fmt: skip
PAIRS = [("Sarn", "Sarn"), ("the Sarn", "Sarn"), ("Kelm", "Sarn"), ("in Quell", "Quell"), ("U.S.A.", "USA"),
         ("a-team", "A Team"), ("A", "A")]  # fmt: skip
NORMALISED_OTHERWISE = ("USA", "A Team", "A")
# What the page calls the differences of each question: of its sentences, passages and answer.
NAMED = {
    "two sentences of one chunk": "K2",
    "a subtopic far from the words": "selection restricts",
    "a sentence of two triples": "a sentence of several triples",
    "a sentence with other quotation marks": "a copied sentence with other quotes or spaces",
    "no listed label": "no listed label selected",
}

# The topic of the first has one subtopic.
NAMED_CALLS = {"a reversed pair": "a list that is to be taken whole", "no listed label": "no listed label selected"}


def compare(clone: str, folder: Path) -> list[Row]:
    """Run both sides, and return the rows of the table."""
    # Their code writes beside itself.
    copy = folder / "clone"
    shutil.copytree(clone, copy, ignore=shutil.ignore_patterns(".git", "*.pdf", "made_up", "results"))
    with FakeServer(_reply) as server:
        world = {
            "url": server.url, "documents": list(DOCUMENTS), "window": WINDOW, "K1": K1, "K2": K2, "pairs": PAIRS,
            "questions": {name: question.text for name, question in QUESTIONS.items()},
        }  # fmt: skip
        (folder / "world.json").write_text(json.dumps(world))
        run_theirs("theirs_thrag", str(copy), folder)
        theirs = json.loads((folder / "theirs.json").read_text())
        their_texts = set(server.texts)
        server.clear()
        corpus = folder / "corpus.jsonl"
        lines = []
        for name, text in theirs["chunks"].items():
            lines.append(json.dumps({"id": name, "title": "", "text": text}) + "\n")
        corpus.write_text("".join(lines))
        ours = asyncio.run(_run_ours(str(corpus), server))
        our_texts = set(server.texts)
    rows = _graph_rows(theirs, ours, their_texts, our_texts)
    for name in QUESTIONS:
        rows += _question_rows(name, theirs["questions"][name], ours["traces"][name])
    rows.append(Row("calls to select all topics of a list", theirs["calls_for_all"], ours["calls_for_all"],
                    "a list that is to be taken whole"))  # fmt: skip
    for (reply, gold), scores in zip(PAIRS, theirs["scores"], strict=True):
        our_scores = [exact_match(reply, [gold]), f1(reply, [gold])]
        named = "normalising an answer" if gold in NORMALISED_OTHERWISE else ""
        their_scores = [float(score) for score in scores]
        rows.append(Row(f"EM, F1 of {reply!r} for {gold!r}", their_scores, our_scores, named))
    rows.append(Row("tokens of a window", f"{NOT_RUN}: the tokenizer's vocabulary is on the hub", "a token is a word"))
    return rows


async def _run_ours(corpus: str, server: FakeServer) -> dict[str, Any]:
    """Our traces by question, with the figures of the graph."""
    teacher = LLMOptions(backend="openai", model="fake", url=server.url)
    options: dict[str, Any] = {
        "corpus": corpus, "encoder": f"openai:fake@{server.url}", "sentences": K1, "chunks": K2, "titles": False,
    }  # fmt: skip
    traces = {}
    async with load_system("thrag", teacher=teacher, **options, min_topics=1, min_subtopics=1) as system:
        for name, question in QUESTIONS.items():
            traces[name] = await system.answer_async(question.text)
        from tripletune.rag.systems.thrag import building

        (task,) = building._BUILT[system.tools.llm].values()
        graph = task.result()
    async with load_system("thrag", teacher=teacher, **options, min_topics=99, max_topics=99) as system:
        trace = await system.answer_async(next(iter(QUESTIONS.values())).text)
    return {"traces": traces, "graph": graph, "calls_for_all": trace.tallies.get("calls.thrag.topics", 0)}


def _reply(body: Body) -> str:
    """The "model": extracts the triples of a document, selects the labels of a question, and answers from sentences."""
    # A repair turn asks after the question.
    prompt = "\n".join(message["content"] for message in body["messages"][1:])
    role = _role(body)
    if role == "extract":
        document = next(text for text in DOCUMENTS if text in prompt)
        rows = []
        for fact in DOCUMENTS[document]:
            labels = {}
            for end, (subtopic, topic) in (("subject", fact.subject), ("object", fact.object)):
                labels[end] = {"subtopic": subtopic, "main_topic": topic} if topic else {}
            rows.append({"triple": fact.triple, "sentence": fact.sentence, **labels})
        text = json.dumps(rows, ensure_ascii=False)
        return f"Here they are:\n```json\n{text}\n```" if document == FENCED else text
    question = next(question for question in QUESTIONS.values() if question.text in prompt)
    if role == "answer":
        return question.answer if question.sentence in prompt else "unknown"
    labels_of = {"topics": question.topics, "subtopics": question.subtopics}
    return json.dumps(labels_of if role == "select" else {role: labels_of[role]})


def _role(body: Body) -> str:
    """The role of a call: ours by its instruction, theirs by its model and the form that it asks for."""
    prompts = load_prompts(tuple(f"thrag_{role}" for role in _ROLES), None)
    for role in _ROLES:
        if body["messages"][0]["content"] == prompts.texts[f"thrag_{role}"]:
            return role
    if body["model"] == "fake-answer":
        return "answer"
    return "select" if body.get("response_format", {}).get("type") == "json_object" else "extract"


def _graph_rows(theirs: dict[str, Any], ours: dict[str, Any], their_texts: set[str], our_texts: set[str]) -> list[Row]:
    """Chunks, triples, labels and counts of the graph."""
    graph = ours["graph"]
    figures = graph.statistics()
    per_chunk = dict.fromkeys(theirs["chunks"], 0)
    names = list(per_chunk)
    for statement in graph.statements:
        per_chunk[names[statement.position]] += 1
    fenced = next(name for name, text in theirs["chunks"].items() if text == FENCED)
    their_rest = {name: count for name, count in theirs["triples"].items() if name != fenced}
    our_rest = {name: count for name, count in per_chunk.items() if name != fenced}
    topics = [topic for topic in theirs["topics"] if topic != "Unknown Topic"]
    our_topics = [topic for topic in graph.topics if topic != "Nature"]  # of the chunk whose reply is fenced
    sentences = {record["sentence"] for record in theirs["records"]}
    our_sentences = {statement.sentence for statement in graph.statements}
    quoted = next(text for text in DOCUMENTS if "Grey Sea" in text)
    return [
        Row("chunks of the text with the defaults", theirs["defaults"]["chunks"], len(DOCUMENTS), "chunks"),
        Row("default K1 and K2", [theirs["defaults"]["K1"], theirs["defaults"]["K2"]], [30, 5], "default K1 and K2"),
        Row("triples of the chunks with a plain reply", their_rest, our_rest),
        Row("triples of a reply with words before its fence", theirs["triples"][fenced], per_chunk[fenced],
            "a reply with words before its code fence"),
        Row("topics in order", topics, our_topics),
        Row("topic of an end without labels", "Unknown Topic" in theirs["topics"], "" in graph.topics,
            "an end without labels"),
        Row("entities", theirs["entities"], figures["entities"], "entities in other scripts"),
        Row("pairs of entities", theirs["pairs"], figures["entity_pairs"], "entities in other scripts"),
        Row("sentences but those of the two kinds above", len(sentences - {FENCED} - _changed(sentences)),
            len(our_sentences - {FENCED} - {quoted})),
        Row("a copied sentence with other quotes", *[_quoted(texts) for texts in (sentences, our_sentences)],
            "a copied sentence with other quotes or spaces"),
        Row("vectors of bare sentences", len(sentences & their_texts), len(our_sentences & our_texts),
            "a reply with words before its code fence"),
    ]  # fmt: skip


def _changed(sentences: set[str]) -> set[str]:
    """The sentences on the Grey Sea, which a reply copies with other quotes."""
    return {sentence for sentence in sentences if "Grey Sea" in sentence}


def _quoted(sentences: set[str]) -> str:
    """The one sentence on the Grey Sea as this side has it."""
    (sentence,) = _changed(sentences)
    return sentence


def _question_rows(name: str, theirs: dict[str, Any], trace: Trace) -> list[Row]:
    """Selected labels, sentences, chunks, calls and answer of a question."""
    (step,) = trace.steps
    selected = trace.details.get("selected", {})
    their_sentences = [edge["sentence"] for edge in theirs["edges"]]
    our_sentences = [line for line in trace.origins if line[:20] in _beginnings()][:K1]
    has_same = sorted(their_sentences) == sorted(our_sentences)
    named = NAMED.get(name, "")
    rows = [
        Row(f"{name}: topics", theirs["topics"], list(selected), named if name == "no listed label" else ""),
        Row(f"{name}: sentences", their_sentences, our_sentences, named, has_same),
        Row(f"{name}: chunks", theirs["chunks"], [passage["id"] for passage in step.passages], named),
        Row(f"{name}: calls", theirs["calls"], trace.calls, NAMED_CALLS.get(name, "")),
        Row(f"{name}: answer", theirs["answer"], trace.answer, named),
    ]  # fmt: skip
    if name == "a reversed pair":
        (edge,) = [edge for edge in theirs["edges"] if "Marl Fair" in edge["sentence"]][:1]
        triple = next(triple for triple in step.triples if "Marl Fair" in triple)
        shown = [edge["source"], edge["label"], edge["target"]]
        rows.append(Row("direction of a triple in the evidence", shown, triple, "direction of a triple"))
    return rows


def _beginnings() -> set[str]:
    """The first letters of all sentences, which tell a line of evidence from other texts of a trace."""
    beginnings = set()
    for facts in DOCUMENTS.values():
        beginnings.update(fact.sentence[:20] for fact in facts)
    return beginnings
