"""TH-RAG's graph, its selection and its filter, worked by hand."""

import asyncio
import json
import threading
from collections import Counter
from functools import partial

import numpy as np
import pytest

from tests.cli import write_lines
from tests.fakes import Client, Words
from tripletune.core.calls import CallError, SetupError, UnusableReply
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.text_index import KeptTexts
from tripletune.rag.systems import Tools
from tripletune.rag.systems.thrag import SYSTEM, ThragOptions
from tripletune.rag.systems.thrag.building import copied_sentence, read_statements
from tripletune.rag.systems.thrag.topic_graph import Labels, Statement, TopicGraph
from tripletune.rag.triples.names import EntityNames

PASSAGES = {
    "Ada": "Ada wrote Low Tide. She lived in Kelm.",
    "Kelm": "Kelm lies on the Sarn.",
    "Bo": "Bo keeps bees.",
}
WRITER, NOVEL, TOWN, RIVER, BEES = (
    ("writer", "Literature"), ("novel", "literature"), ("Town", "Geography"), ("river", "Geography"),
    ("bees", "Animals"),
)  # fmt: skip
ROWS = [
    ("Ada", "wrote", "Low Tide", "Ada wrote Low Tide.", WRITER, NOVEL, 0),
    ("Ada", "lived in", "Kelm", "She lived in Kelm.", WRITER, TOWN, 0),
    ("kelm", "lies on", "Sarn", "Kelm lies on the Sarn.", ("town", "Geography"), RIVER, 1),
    ("Bo", "keeps", "bees", "Bo keeps bees.", ("person", "Animals"), BEES, 2),
]
STATEMENTS = [Statement(Triple(*row[:3]), row[3], (Labels(*row[4]), Labels(*row[5])), row[6]) for row in ROWS]


def entry(triple, sentence, subject, object_):
    labels = [{"subtopic": low, "main_topic": high} for low, high in (subject, object_)]
    return {"triple": triple, "sentence": sentence, "subject": labels[0], "object": labels[1]}


def extraction(position):
    rows = [entry(list(row[:3]), *row[3:6]) for row in ROWS if row[6] == position]
    return json.dumps(rows)


class Corpus(list):
    sha256 = "corpus"
    __hash__ = object.__hash__  # as of the passages of a file


class Shelf:
    passages = Corpus(Passage(title, text) for title, text in PASSAGES.items())


class Chat(Client):
    """Extracts what `ROWS` say, after some failures; the other calls are replied to in order."""

    def __init__(self, *failures):
        super().__init__(answer=self.reply)
        self.failures = list(failures)

    def reply(self, asked):
        if asked.role != "thrag.extract":
            return self.replies.pop(0)
        title = asked.text.split("\n")[0].removeprefix("Title: ")
        return self.failures.pop(0) if self.failures else extraction(list(PASSAGES).index(title))

    @property
    def extractions(self):
        return self.roles.count("thrag.extract")

    @property
    def others(self):
        return [(asked.role, asked.text) for asked in self.asked if asked.role != "thrag.extract"]


def run(*replies, chat=None, question="Ada: she lived where ?", embedder=None, folder=None, names=None, **settings):
    # The graph is small; with the defaults of the paper there would be nothing to choose.
    settings = {"min_topics": 1, "min_subtopics": 1} | settings
    chat = chat or Chat()
    chat.replies += replies
    keep = folder and partial(KeptTexts, folder, embedder)
    tools = Tools(
        retriever=Shelf(),
        llm=chat,
        reranker=embedder or Words(),
        keep=keep,
        question_id="q",
        names=names or EntityNames(),
    )
    trace = asyncio.run(SYSTEM.run(question, question, tools, ThragOptions(**settings)))
    assert not chat.replies
    return trace, chat


def test_levels_candidates_and_statistics():
    graph = TopicGraph(STATEMENTS)
    assert graph.topics == ["Literature", "Geography", "Animals"], "labels are one where case alone differs"
    assert graph.subtopics("literature") == ["writer", "novel"]
    assert graph.subtopics("Geography") == ["Town", "river"]
    assert graph.subtopics("none") == []
    assert graph.candidates(["river"], 1) == [2], "the edges of Sarn"
    assert graph.candidates(["river"], 2) == [1, 2], "and those of Kelm, one step away"
    assert graph.candidates(["river"], 3) == [0, 1, 2]
    assert graph.candidates(["nothing"], 1) == []
    found = graph.statistics()
    assert found["largest_share"] == pytest.approx(10 / 15)
    assert {name: value for name, value in found.items() if name != "largest_share"} == {
        "topics": 3, "subtopics": 6, "entities": 6, "topic_subtopic_edges": 6, "subtopic_entity_edges": 6,
        "triples": 4, "components": 2, "entity_pairs": 4, "nodes": 15, "edges": 16,
    }  # fmt: skip
    labels = (Labels(*TOWN), Labels(*WRITER))
    turned = Statement(Triple("Kelm", "home of", "Ada"), "Kelm is home to Ada.", labels, 1)
    assert TopicGraph([*STATEMENTS, turned]).statistics()["entity_pairs"] == 4, (
        "a pair counts once, in either direction"
    )
    assert TopicGraph([]).statistics()["largest_share"] == 0


def test_a_question_from_topics_to_sentences_and_passages():
    trace, chat = run(
        '{"topics": [{"topic": "literature"}, "Cooking", "Geography"]}', '{"subtopics": ["writer"]}',
        '```json\n["Town"]\n```', "Answer: Kelm", sentences=2, chunks=1,
    )  # fmt: skip
    assert (trace.answer, trace.stop_reason, trace.calls, chat.extractions) == ("Kelm", "single_pass", 4, 3)
    assert [role for role, _ in chat.others] == ["thrag.topics", "thrag.subtopics", "thrag.subtopics", "thrag.answer"]
    assert chat.others[0][1] == (
        "Topics:\n- Literature\n- Geography\n- Animals\n\nSelect 1 to 3.\n\nQuestion: Ada: she lived where ?"
    )
    assert chat.others[2][1].startswith("Topic: Geography\n\nSubtopics:\n- Town\n- river\n\nSelect 1 to 2.")
    assert chat.others[3][1] == (
        "Sentences:\n[Ada] She lived in Kelm.\n[Ada] Ada wrote Low Tide.\n\n"
        "Passages:\nAda\nAda wrote Low Tide. She lived in Kelm.\n\nQuestion: Ada: she lived where ?"
    )
    assert trace.details["selected"] == {"Literature": ["writer"], "Geography": ["Town"]}
    assert [(action.action, action.reply) for action in trace.actions] == [
        ("topics", "Topics: Literature, Geography"), ("subtopics", "Subtopics of Literature: writer"),
        ("subtopics", "Subtopics of Geography: Town"),
    ]  # fmt: skip
    assert (trace.tallies["topics_not_listed"], trace.tallies["subtopics_not_listed"]) == (1, 0)
    assert trace.steps[0].triples == [["Ada", "lived in", "Kelm"], ["Ada", "wrote", "Low Tide"]]


def test_the_ablations_and_long_answers():
    trace, chat = run("# Kelm\n\nAda lived there.", traversal=False, chunks=0, answer="long")
    assert trace.answer == "# Kelm\n\nAda lived there."
    assert "Passages:" not in chat.others[0][1]
    assert "[Bo] Bo keeps bees." in chat.others[0][1]
    _, chat = run("x", traversal=False, sentences=0, chunks=3)
    assert chat.others[0][1].startswith("Passages:\nAda\n")


def test_where_there_is_nothing_to_choose_no_call_is_made():
    trace, chat = run("Kelm", min_topics=5, min_subtopics=10)
    assert [role for role, _ in chat.others] == ["thrag.answer"]
    assert trace.details["selected"] == {
        "Literature": ["writer", "novel"], "Geography": ["Town", "river"], "Animals": ["person", "bees"]
    }  # fmt: skip
    assert (trace.tallies["topics_taken_without_a_call"], trace.tallies["subtopics_taken_without_a_call"]) == (1, 3)
    trace, chat = run('{"topics": ["Geography"]}', "Kelm", min_topics=2, min_subtopics=2)
    assert [role for role, _ in chat.others] == ["thrag.topics", "thrag.answer"]
    assert trace.actions[1].reply == "Subtopics of Geography: Town, river"


def test_a_row_that_is_cut_off_counts_once():
    issues = Counter()
    row = json.dumps(entry(["Ada", "wrote", "Low Tide"], "Ada wrote Low Tide.", WRITER, NOVEL))
    cut_off = f"[{row}, {row[:-1]}"
    assert len(read_statements(cut_off, Passage("Ada", PASSAGES["Ada"]), 0, issues)) == 1
    assert issues["extract.malformed"] == 1


def test_a_triple_without_labels_at_one_end_keeps_its_sentence():
    dated = Statement(
        Triple("Kelm", "founded in", "1702"), "Kelm was founded in 1702.", (Labels(*TOWN), Labels("", "")), 1
    )
    graph = TopicGraph([*STATEMENTS, dated])
    graph.texts = [statement.sentence for statement in graph.statements]
    assert "Kelm was founded in 1702." in graph.sentences(["Town"], 1)
    assert graph.topics == ["Literature", "Geography", "Animals"], "it adds no topic"
    assert graph.candidates(["Town"], 2) == [0, 1, 2, 4], "and the other end is an entity like others"


def test_the_selection_reads_the_bare_question():
    chat = Chat()
    chat.replies += ['{"topics": []}', "x"]
    tools = Tools(retriever=Shelf(), llm=chat, reranker=Words(), question_id="q")
    options = ThragOptions(min_topics=1, min_subtopics=1)
    asyncio.run(SYSTEM.run("Who? Answer in one word.", "Who?", tools, options))
    assert chat.others[0][1].endswith("\n\nQuestion: Who?")
    assert chat.others[1][1].endswith("\n\nQuestion: Who? Answer in one word.")


def test_a_selection_without_any_listed_label_is_sent_back_once():
    listed = ['{"topics": ["Cooking"]}', '{"topics": ["Geography"]}', '{"subtopics": ["Town"]}', "Kelm"]
    trace, chat = run(*listed)
    roles = [role for role, _ in chat.others]
    assert roles == ["thrag.topics", "thrag.topics.repair", "thrag.subtopics", "thrag.answer"]
    assert trace.details["selected"] == {"Geography": ["Town"]}


def test_passages_until_there_are_as_many_as_wanted():
    _, chat = run("x", traversal=False, sentences=4, chunks=2, question="Ada Kelm")
    assert chat.others[0][1].split("Passages:")[1].count("\n\n") == 1, "the best two sentences are of one passage"
    _, chat = run("x", traversal=False, sentences=4, chunks=2, chunks_by="passages", question="Ada Kelm")
    assert chat.others[0][1].split("Passages:")[1].count("\n\n") == 2


def test_sentences_without_titles_and_with_triples():
    _, chat = run("x", traversal=False, sentences=1, chunks=0, titles=False, show_triples=True)
    assert chat.others[0][1].startswith("Sentences:\nShe lived in Kelm. (Ada | lived in | Kelm)\n\nQuestion:")


def test_statements_of_another_program_need_no_extraction(tmp_path):
    path = tmp_path / "statements.jsonl"
    lines = []
    for position, (title, text) in enumerate(PASSAGES.items()):
        row = {"title": title, "text": text, "statements": json.loads(extraction(position))}
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    trace, chat = run("x", traversal=False, sentences=1, chunks=0, statements=str(path))
    assert (chat.extractions, trace.calls) == (0, 1)
    assert chat.others[0][1].startswith("Sentences:\n[Ada] She lived in Kelm.")
    path.write_text(json.dumps({"title": "Other", "text": "Else.", "statements": []}) + "\n")
    with pytest.raises(SetupError, match="no statement of a passage of the corpus"):
        run(statements=str(path))


@pytest.mark.parametrize("given", [False, True])
def test_names_of_entities_are_replaced_in_both_graphs(tmp_path, given):
    settings = {}
    if given:
        rows = []
        for position, (title, text) in enumerate(PASSAGES.items()):
            rows.append({"title": title, "text": text, "statements": json.loads(extraction(position))})
        settings["statements"] = str(write_lines(tmp_path / "statements.jsonl", rows))
    names = EntityNames({"Ada": "Ada Lund"}, "digest")
    trace, _ = run("x", traversal=False, sentences=1, chunks=0, names=names, **settings)
    assert trace.steps[0].triples == [["Ada Lund", "lived in", "Kelm"]]


@pytest.mark.parametrize(("reply", "reason"), [("Ada wrote.", "no_json"), ('[{"subject": "Ada"}]', "no_triples")])
def test_an_extraction_that_cannot_be_read_is_loud(caplog, reply, reason):
    chat = Client(answer=lambda asked: reply if asked.role.startswith("thrag.extract") else "x")
    trace, _ = run(chat=chat, traversal=False)
    assert trace.steps[0].triples == []
    # Three passages, each with a repair turn.
    assert trace.details["index_unreadable"] == {"thrag.extract": 6}
    assert trace.details["unreadable"] == {"thrag.extract": [reason, reply]}
    assert "no triple could be read from the corpus" in caplog.text


def test_a_file_name_is_no_title():
    class Untitled:
        passages = Corpus([Passage("notes.txt", "Bo keeps bees.", source={"document": "notes.txt"})])

    rows = json.dumps([entry(["Bo", "keeps", "bees"], "Bo keeps bees.", WRITER, BEES)])
    chat = Client(answer=lambda asked: rows if asked.role == "thrag.extract" else "x")
    tools = Tools(retriever=Untitled(), llm=chat, reranker=Words(), question_id="q")
    asyncio.run(SYSTEM.run("Who?", "Who?", tools, ThragOptions(traversal=False, chunks=0)))
    assert chat.asked[-1].text.startswith("Sentences:\nBo keeps bees.\n")


def test_without_a_selection_all_sentences_are_compared():
    trace, _ = run("none", "none at all", "x")
    assert trace.tallies["topics.no_labels"] == 1
    assert (trace.malformed, trace.actions[0].action, trace.actions[0].reply) == (1, None, "none at all")
    assert len(trace.steps[0].triples) == 4


def test_a_long_list_is_shortened_to_what_is_closest():
    trace, chat = run('{"topics": []}', "x", question="Which Animals ?", most_labels=2)
    assert chat.others[0][1].startswith("Topics:\n- Animals\n- Literature\n\nSelect 1 to 2.")
    assert trace.tallies["shortlisted_topics"] == 1


def test_the_graph_is_built_once():
    chat = Chat(SetupError("no key"))
    for _ in range(2):
        with pytest.raises(SetupError):
            run(chat=chat)
    assert chat.extractions == 3, "all calls are made, none again"
    chat.ends_run = False
    run("x", chat=chat, traversal=False)
    assert chat.extractions == 6, "a system that stays open tries again"
    chat = Chat()
    run("x", chat=chat, traversal=False)
    run("x", chat=chat, traversal=False)
    assert chat.extractions == 3
    trace, _ = run("x", chat=Chat(CallError("refused")), traversal=False)
    assert {row[0] for row in trace.steps[0].triples} == {"kelm", "Bo"}, "a passage whose call is refused has no triple"


@pytest.mark.parametrize("name", ["__init__", "sentences", "statistics"])
def test_the_graph_is_worked_on_beside_the_event_loop(monkeypatch, name):
    threads, work = set(), getattr(TopicGraph, name)

    def watched(*given):
        threads.add(threading.current_thread())
        return work(*given)

    monkeypatch.setattr(TopicGraph, name, watched)
    run("x", traversal=False)
    assert len(threads - {threading.main_thread()}) == len(threads) > 0


def test_sentences_are_embedded_once_for_all_runs(tmp_path):
    embedded = []

    def encode(texts, kind):
        embedded.extend(texts if kind == "text" else [])
        return np.array([[1, *map(text.lower().count, "abdeklnsw")] for text in texts])

    kept = [
        run("x", traversal=False, embedder=Embedder("letters", encode), folder=folder)[0].details["ranking"]
        for folder in (None, tmp_path / "texts", tmp_path / "texts")
    ]
    assert kept == [kept[0]] * 3
    sentences = {f"[{list(PASSAGES)[row[6]]}] {row[3]}" for row in ROWS}
    assert Counter(embedded) == {"width": 2} | dict.fromkeys(sentences, 2), "once in memory, once on disk"


def test_extraction_replies():
    passage, issues = Passage("Ada", PASSAGES["Ada"]), Counter()
    good = entry(["Ada", "wrote", "Low Tide"], "Ada  wrote\nLow Tide.", WRITER, NOVEL)
    made_up = entry(["Ada", "born in", "Oslo"], "Ada was born in Oslo.", WRITER, TOWN)
    bad = [entry(["Ada", "wrote"], "x", WRITER, NOVEL), entry(["a", "b", "c"], "x", ("", "t"), NOVEL), "text"]
    cut_off = json.dumps([good, made_up, *bad])[:-1] + ', {"triple": ["Ada", "wr'
    for text in (json.dumps({"triples": [good, made_up, *bad]}), f"Here:\n{json.dumps([good, made_up, *bad])}"):
        issues.clear()
        found = read_statements(text, passage, 4, issues)
        assert [(one.triple.as_list()[1], one.sentence, one.position) for one in found] == [
            ("wrote", "Ada wrote Low Tide.", 4), ("born in", "Ada born in Oslo", 4), ("b", "a b c", 4),
        ]  # fmt: skip
        assert +issues == {"extract.malformed": 2, "extract.sentence_not_in_text": 2, "extract.unlabelled_end": 1}
    good["sentence"] = ["Ada wrote Low Tide.", "She lived in Kelm!", "She did not."]
    assert (
        read_statements(json.dumps([good]), passage, 0, issues)[0].sentence == "Ada wrote Low Tide. She lived in Kelm."
    )
    assert len(read_statements(cut_off, passage, 0, issues)) == 3, "what is whole is kept"
    assert read_statements("[]", passage, 0, issues) == []
    with pytest.raises(UnusableReply):
        read_statements("nothing", passage, 0, issues)


@pytest.mark.parametrize(
    ("copied", "own"),
    [
        ("It is a direct-to-video film.", "It is a direct - to - video film."),
        ('They sang "Under the Hood" twice.', "They sang ``Under the Hood '' twice."),
        ("It is a film.", ""),
        ("“Once” more, said Ada Weiss.", "``Once'' more, said Ada Weiß."),
    ],
)
def test_a_tidied_sentence_is_found_again_in_the_words_of_the_text(copied, own):
    text = "Once. It is a direct - to - video film. They sang ``Under the Hood '' twice. ``Once'' more, said Ada Weiß."
    assert copied_sentence(copied, text) == own
