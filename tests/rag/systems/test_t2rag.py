import asyncio

import pytest

from tests.fakes import Client
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.llm.reading.rows import FieldRow, field_rows
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.systems import Tools
from tripletune.rag.systems._clues import Clue, fill_clues, first_clues
from tripletune.rag.systems.t2rag import SYSTEM, T2RAGOptions

QUESTION = "Which river flows through the town where Ada was born?"
ROWS = [Triple("Ada", "born in", "Kelm"), Triple("Ada", "is", "writer"), Triple("Kelm", "lies on", "Sarn")]
PASSAGES = [Passage("Ada", "Ada was born in Kelm."), Passage("Kelm", "Kelm lies on the Sarn.")]
DECOMPOSED = "Reasoning: first the town.\nTriples:\nAda | was born in | ?town\n?town | lies on | ?river"


class Shelf(TripleIndex):
    """Ada's triples for every query, and Kelm's for those that name the town."""

    def __init__(self):
        self.queries, self.passages = [], PASSAGES

    async def search(self, queries, k):
        self.queries.append((list(queries), k))
        return [[(2, 0.9), (0, 0.5)] if "Kelm" in query else [(0, 0.8), (1, 0.4)] for query in queries]

    def __getitem__(self, row):
        return ROWS[row]

    def passages_of(self, row):
        import numpy as np

        return np.array([row // 2])


def run(*replies, **options):
    script, shelf = Client(*replies), Shelf()
    tools = Tools(llm=script, triples=shelf, question_id="q7")
    trace = asyncio.run(SYSTEM.run(QUESTION, QUESTION, tools, T2RAGOptions(**options)))
    assert not script.replies
    return trace, script, shelf


def fields(clues):
    return [" | ".join(clue.fields) for clue in clues]


def test_two_rounds_as_in_the_paper():
    trace, script, shelf = run(DECOMPOSED, "[1] Ada | was born in | Kelm", "[2] Kelm | lies on | Sarn", "Answer: Sarn")
    assert (trace.answer, trace.stop_reason, trace.calls) == ("Sarn", "sufficient", 4)
    assert shelf.queries == [(["Ada was born in"], 100), (["Kelm lies on"], 100)]
    assert [step.query for step in trace.steps] == ["Ada was born in", "Kelm lies on"]
    assert [step.triples for step in trace.steps] == [
        [["Ada", "born in", "Kelm"], ["Ada", "is", "writer"]],
        [["Kelm", "lies on", "Sarn"], ["Ada", "born in", "Kelm"]],
    ]
    assert [[p["title"] for p in step.passages] for step in trace.steps] == [["Ada"], ["Kelm", "Ada"]]
    assert script.roles == ["t2rag.decompose", "t2rag.resolve", "t2rag.resolve", "t2rag.answer"]
    assert script.asked[2].text == (
        f"Question: {QUESTION}\n\nSearchable clues:\n[2] Kelm | lies on | ?river\n\nFuzzy clues:\n(none)\n\n"
        "Resolved clues:\n[1] Ada | was born in | Kelm\n\n"
        "Propositions:\nKelm | lies on | Sarn\nAda | born in | Kelm\n\n"
        "Passages:\nKelm\nKelm lies on the Sarn.\n\nAda\nAda was born in Kelm."
    )
    assert script.asked[3].text.endswith("Clues:\n[1] Ada | was born in | Kelm\n[2] Kelm | lies on | Sarn")
    assert [action.action for action in trace.actions] == ["decompose", "resolve", "resolve"]
    assert (trace.shown, trace.details["unknown"]) == ([], ["shown"]), "a clue does not say where it is from"


def test_one_reply_may_fill_everything():
    trace, *_ = run(DECOMPOSED, "[1] Ada | was born in | Kelm\n[2] Kelm | lies on | Sarn", "Sarn")
    assert (trace.answer, trace.stop_reason, len(trace.steps)) == ("Sarn", "sufficient", 1)


def test_clues_without_unknowns_are_a_guess_which_is_searched_and_not_told():
    trace, script, shelf = run("Ada | is | plumber\nKelm | lies on | Sarn", "no")
    assert (trace.answer, trace.stop_reason) == ("no", "no_searchable")
    assert shelf.queries == [(["Ada is plumber", "Kelm lies on Sarn"], 100)]
    assert trace.tallies["decompose.no_unknown"] == 1
    assert trace.details["guess"][0] == ["Ada", "is", "plumber"]
    asked = script.asked[-1].text
    assert "plumber" not in asked
    assert "Clues:\n(none)\n\nPropositions:\nKelm | lies on | Sarn" in asked
    assert trace.shown


def test_what_is_searched_once_is_not_searched_again_and_ends_the_loop():
    trace, script, shelf = run("Ada | was born in | ?town", "(none)", "Kelm")
    assert (trace.stop_reason, len(shelf.queries)) == ("no_searchable", 1)
    assert script.asked[-1].text.endswith("Clues:\n[1] Ada | was born in | ?town"), "the open clue is shown too"
    # A fuzzy clue is left: the question is searched, once, always, or not at all.
    for fallback, searches in (("once", 2), ("always", 3), ("stop", 1)):
        replies = ["(none)"] * searches
        trace, script, shelf = run(DECOMPOSED, *replies, "Kelm", fallback=fallback)
        assert [queries for queries, _ in shelf.queries] == [["Ada was born in"], *[[QUESTION]] * (searches - 1)]
        assert trace.stop_reason == ("max_rounds" if fallback == "always" else "no_searchable")
        assert script.asked[-1].text.endswith("Clues:\n[1] Ada | was born in | ?town"), "fuzzy clues are not shown"


def test_the_options_of_the_papers_tables_and_of_the_public_code():
    trace, script, _ = run(DECOMPOSED, "[1] Ada | was born in | Kelm", "?", max_rounds=1, passages=False)
    assert (trace.stop_reason, len(trace.steps)) == ("max_rounds", 1)
    assert "Passages:" not in script.asked[1].text
    _, _, shelf = run(DECOMPOSED, "[1] Ada | was born in | Kelm", "?", max_rounds=1, question_too=True, candidates=7)
    assert shelf.queries == [(["Ada was born in", QUESTION], 7)]


@pytest.mark.parametrize(("fallback", "searches"), [("once", 1), ("always", 3), ("stop", 0)])
def test_a_question_without_clues_is_never_answered_from_nothing(fallback, searches):
    trace, script, shelf = run("I can't.", *["(none)"] * searches, "Sarn", fallback=fallback)
    assert (trace.malformed, trace.answer) == (1, "Sarn")
    assert trace.stop_reason == ("max_rounds" if fallback == "always" else "malformed")
    assert [queries for queries, _ in shelf.queries] == [[QUESTION]] * max(1, searches)
    assert script.roles == ["t2rag.decompose", *["t2rag.resolve"] * searches, "t2rag.answer"]
    evidence = "Propositions:\nAda | born in | Kelm\nAda | is | writer\n\nPassages:\nAda\nAda was born in Kelm."
    assert script.asked[-1].text.endswith(f"Clues:\n(none)\n\n{evidence}")
    assert (trace.shown, "unknown" in trace.details) == ([PASSAGES[0].id], False)


def test_clues_that_a_search_or_a_repair_brings_are_taken():
    trace, script, shelf = run("I can't.", "Ada | born in | Kelm", "Kelm")
    assert (trace.stop_reason, len(shelf.queries)) == ("sufficient", 1)
    assert script.asked[-1].text.endswith("Clues:\n[1] Ada | born in | Kelm")
    trace, script, _ = run("I can't.", "Ada | is | ?x", "Ada | is | writer", "yes", repairs=2)
    assert (trace.stop_reason, script.roles[1]) == ("sufficient", "t2rag.decompose.repair")


def test_passages_are_searched_where_the_unit_is_a_passage():
    class Retriever:
        comparable = True

        async def retrieve(self, query, k):
            from tripletune.rag.search.retrievers import Retrieved

            return [Retrieved(PASSAGES[0], 2.0), Retrieved(PASSAGES[1], float(len(query)))][:k]

    script = Client("Ada | is | ?a\nKelm is here | is | ?b", "(none)", "none")
    options = T2RAGOptions(unit="passages")
    assert not SYSTEM.needs_triples(options)
    trace = asyncio.run(SYSTEM.run(QUESTION, QUESTION, Tools(llm=script, retriever=Retriever()), options))
    assert [(p["title"], p["score"]) for p in trace.steps[0].passages] == [("Kelm", 15.0), ("Ada", 2.0)]
    assert "Propositions:\n(none)" in script.asked[1].text


def test_an_unknown_that_is_filled_once_is_filled_everywhere():
    clues = first_clues("A | directed by | ?Director\n?director | born in | ?year\n?directors | a | aunt of ?director")
    fill_clues(clues, [FieldRow("1", ["A", "directed by", "Ida Morn"])])
    assert fields(clues) == [
        "A | directed by | Ida Morn", "Ida Morn | born in | ?year", "?directors | a | aunt of Ida Morn"
    ]  # fmt: skip
    assert [clue.kind for clue in clues] == [0, 1, 1]
    fill_clues(clues, [FieldRow("1", ["A", "directed by", "Somebody Else"])])
    assert clues[0].fields[2] == "Ida Morn", "what is resolved stays"
    bare = first_clues("? | won | 2020\n? | directed by | ?")
    fill_clues(bare, [FieldRow("1", ["Low Tide", "won", "2020"])])
    assert fields(bare) == ["Low Tide | won | 2020", "? | directed by | ?"]
    assert (bare[1].kind, bare[1].query) == (2, "directed by")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("2", ["x", "was born at", "1911"]), "B | born in | 1911"),  # its number, with a field spelt anew
        (("", ["B", "Born in", "1911"]), "B | born in | 1911"),  # no number
        (("1", ["B", "born in", "1911"]), "B | born in | 1911"),  # rows that are numbered anew
        (("2", ["B", "born in", "unknown"]), "B | born in | ?y"),
        (("2", ["B", "born in", "(not specified)"]), "B | born in | ?y"),
        (("2", ["B", "born in", "?year"]), "B | born in | ?y"),
        (("2", ["B", "born in", "unknown (no passage names it)"]), "B | born in | ?y"),
        (("2", ["B", "born in", "not mentioned in the passages"]), "B | born in | ?y"),
        (("2", ["C", "born in", "1911"]), "B | born in | 1911"),
        (("", ["B (novelist)", "was born in", "1911"]), "B | born in | 1911"),  # the passage's name
    ],
)
def test_the_clue_that_a_row_means(row, expected):
    clues = first_clues("A | born in | ?x\nB | born in | ?y\n?z | born in | ?w")
    fill_clues(clues, [FieldRow(*row)])
    assert fields(clues) == ["A | born in | ?x", expected, "?z | born in | ?w"]


def test_two_clues_with_one_unknown_may_have_two_values():
    clues = first_clues(
        "Laleli Mosque | is in | ?district\nEsma Sultan Mansion | is in | ?district\n?district | in | ?city"
    )
    rows, _ = field_rows("[1] Laleli Mosque | is in | Laleli\n[2] Esma Sultan Mansion | is in | Ortakoy")
    fill_clues(clues, rows)
    assert fields(clues)[:2] == ["Laleli Mosque | is in | Laleli", "Esma Sultan Mansion | is in | Ortakoy"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("[2] M | merged to become | F", "F | was formed from | M"),  # the fact from its other end
        ("[2] F | was formed from | M Group", "F | was formed from | M"),
        ("[3] B | borders | A", "A | borders | B"),
        ("F | was formed from | M", "F | was formed from | M"),
    ],
)
def test_a_row_that_states_a_clue_in_another_way(row, expected):
    clues = first_clues("The Daily News | is owned by | ?owner\n?p | was formed from | M\nA | borders | ?c")
    fill_clues(clues, field_rows(row)[0])
    assert len(clues) == 3
    assert expected in fields(clues)


@pytest.mark.parametrize(
    "row",
    [
        "[2] Rome | lies on | Tiber",
        "The Daily News | is owned since | 1990",
        "B | is father of | A",
        "C | is owned by | D",
    ],
)
def test_a_row_that_has_nothing_in_common_with_a_clue_fills_none(row):
    clues = first_clues("The Daily News | is owned by | ?owner\n?p | was formed from | M\nA | is father of | ?c")
    fill_clues(clues, field_rows(row)[0])
    assert [clue.kind for clue in clues] == [1, 1, 1, 0]


@pytest.mark.parametrize("value", ["?town", "{town}", "<town>", "—", "TBD", "unknown", "(not stated in the passages)"])
def test_a_value_that_says_nothing_fills_nothing(value):
    clues = first_clues("Ada | was born in | ?town")
    fill_clues(clues, [FieldRow("1", ["Ada", "was born in", value])])
    assert fields(clues) == ["Ada | was born in | ?town"]


@pytest.mark.parametrize("value", ["Kelm", "[Kelm]", "<Kelm>", '"Kelm"'])
def test_a_value_is_read_without_brackets_and_quotation_marks(value):
    clues = first_clues("Ada | was born in | ?town")
    fill_clues(clues, [FieldRow("1", ["Ada", "was born in", value])])
    assert fields(clues) == ["Ada | was born in | Kelm"]


def test_an_unknown_inside_a_field_is_filled_too():
    clues = first_clues("* Pyrrhic victory | is named after | {leader}\n* war with {leader} | took place in | {years}")
    assert clues[1].kind == 2
    fill_clues(clues, [FieldRow("1", ["Pyrrhic victory", "is named after", "Pyrrhus"])])
    assert fields(clues) == ["Pyrrhic victory | is named after | Pyrrhus", "war with Pyrrhus | took place in | ?years"]


def test_the_reasoning_above_the_header_is_no_clue():
    clues = first_clues("First a | which is | b, then c.\n**Triples:**\nA | born in | ?x")
    assert fields(clues) == ["A | born in | ?x"]


def test_a_row_that_is_no_clue_becomes_one():
    clues = first_clues("A | born in | ?x")
    fill_clues(clues, [FieldRow("", ["A", "mother", "B"]), FieldRow("", ["B", "died in", "?y"])])
    assert [(clue.number, clue.kind) for clue in clues] == [(1, 1), (2, 0), (3, 1)]


def test_a_question_mark_in_a_name_is_no_unknown():
    clue = Clue(1, ["Who's Afraid of Virginia Woolf?", "directed by", "?director"])
    assert (clue.kind, clue.query) == (1, "Who's Afraid of Virginia Woolf? directed by")
    assert Clue(1, ["(?a)", "b", "c"]).kind == 1


@pytest.mark.parametrize("blank", ["?b", "[?b]", "<?b>", "{ ?b }", "[?]", "unknown", "___"])
def test_an_unknown_in_other_forms(blank):
    (clue,) = first_clues(f"Ivo Rand | built | {blank}")
    assert (clue.kind, clue.query) == (1, "Ivo Rand built")
    assert clue.fields[2] in ("?b", "?")


@pytest.mark.parametrize(
    ("reply", "rows"),
    [
        ("Triples: a | b | ?c\n- **d** | e | f\n1. g | h | i", ["a|b|?c", "d|e|f", "g|h|i"]),
        ("[12] 2001: A Space Odyssey | by | x", ["12:2001: A Space Odyssey|by|x"]),
        ("2001: A Space Odyssey | by | ?", ["2001: A Space Odyssey|by|?"]),
        ("<think>a | b | c</think>none", []),
        ("a | b\na | b | c | d | e\n | b | c\n| b | c |", []),
        ("1. [2] d | e | f\n2) **[3]** 2001 | h | i\n[4] 2001 | k | l", ["2:d|e|f", "3:2001|h|i", "4:2001|k|l"]),
        ("| Subject | Relation | Object |\n|---|:-:|---|\n| [1] a | b | c |\n| **d** | e | ?f |\r\n|g|h|i|",
         ["1:a|b|c", "d|e|?f", "g|h|i"]),
        ("Rows:\n\nClue | Subject | Predicate | Object\n--- | --- | --- | ---\n[1] | a | b | c\n2 | d | e | f",
         ["1:a|b|c", "2:d|e|f"]),
        ("a | b | c\n---\nd | e | f\n\n|---|---|---|", ["a|b|c", "d|e|f"]),
        ("Fully Resolved Clue 1: Subject: a b Predicate: c Object: d\nNewly Searchable Clue 1: Subject: e, "
         "Predicate: f, Object: ?", ["a b|c|d", "e|f|?"]),
        ("Subject: a\nPredicate: b\nObject: c\n\nSubject: d\nPredicate: e\nObject: f", ["a|b|c", "d|e|f"]),
    ],
)  # fmt: skip
def test_rows_of_a_reply(reply, rows):
    read, _ = field_rows(reply)
    assert [f"{row.number}:{'|'.join(row.fields)}" if row.number else "|".join(row.fields) for row in read] == rows


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (("Ada", "born in", "Kelm"), "RESOLVED"),
        (("?who", "born in", "Kelm"), "SEARCHABLE"),
        (("?who", "taught the brother of ?who", "Kelm"), "SEARCHABLE"),
        (("?a and ?b", "wrote", "Low Tide"), "FUZZY"),
        (("?", "wrote", "?"), "FUZZY"),
        (("Who is Ada?", "wrote", "Low Tide"), "RESOLVED"),
    ],
)
def test_the_kind_of_a_clue_is_its_number_of_unknowns(fields, kind):
    assert Clue(1, list(fields)).kind.name == kind
