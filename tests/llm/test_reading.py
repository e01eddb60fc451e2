"""The table of forms: natural replies of strong models, by role, and what they mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import Action
from tripletune.core.data.triples import Triple
from tripletune.llm.reading.answers import phrased_answer, unlabelled_answer
from tripletune.llm.reading.labels import read_labels
from tripletune.llm.reading.lines import lines_of, read_line
from tripletune.llm.reading.plans import read_plan
from tripletune.llm.reading.questions import next_question
from tripletune.llm.reading.rows import FieldRow, field_rows, unknown_field, unknowns_in
from tripletune.llm.reading.verdicts import answerable_verdict
from tripletune.rag.chat_generator import bare_answer
from tripletune.rag.systems.gear import read_facts

ASKED = "Where was Ada Lovelace born?"
PLANS = [
    f"[SUBQ] {ASKED}",
    f"[SUBQ]\n{ASKED}",
    f"[SUBQ]: {ASKED}",
    f'[SUBQ] "{ASKED}"',
    f"Reply: [SUBQ] {ASKED}",
    f"Plan: [SUBQ] {ASKED}",
    f"**[SUBQ]** {ASKED}",
    f"**[SUBQ] {ASKED}**",
    f"`[SUBQ] {ASKED}`",
    f"```\n[SUBQ] {ASKED}\n```",
    f"```text\n[SUBQ] {ASKED}\n```",
    f"- [SUBQ] {ASKED}",
    f"• [SUBQ] {ASKED}",
    f"1. [SUBQ] {ASKED}",
    f"SUBQ: {ASKED}",
    f"**SUBQ:** {ASKED}",
    f'"[SUBQ] {ASKED}"',
    f"[subq] {ASKED}",
    f"[ SUBQ ] {ASKED}",
    f"Her place of birth is still missing.\n\n[SUBQ] {ASKED}",
    f"Her place of birth is still missing, so [SUBQ] {ASKED}",
    f"[SUBQ] {ASKED}\n\nThis will give the place.",
    f"[SUBQ] {ASKED}\nRetrieved Graph Information: (S> Ada| P> born in| O> London)\n[SUFFICIENT]",
    f"<think>[SUFFICIENT]?</think>[SUBQ] {ASKED}",
    f"[SUBQ] {ASKED}\n[SUBQ] {ASKED}",
    f"[SUBQ]:\n\n> {ASKED}",
    f"[SUBQ] → {ASKED}",
    f"[SUBQ] <{ASKED}>",
    f"[SUBQ]({ASKED})",
    f"[SUBQ] **Sub-query:** {ASKED}",
    f"[SUBQ] {ASKED} [/SUBQ]",
    f"[SUBQ: {ASKED}]",
    f"(SUBQ) {ASKED}",
    f"\\[SUBQ\\] {ASKED}",
    f"<SUBQ>{ASKED}</SUBQ>",
    f"<reply>[SUBQ] {ASKED}</reply>",
    f"<plan>\n[SUBQ] {ASKED}\n</plan>",
    f"<sub-query>{ASKED}</sub-query>",
    f"**Sub-query:** {ASKED}",
    f"SUBQ {ASKED}",
    f"[SUBQUERY] {ASKED}",
    f'{{"action": "SUBQ", "query": "{ASKED}"}}',
    f'```json\n{{"action": "[SUBQ]", "sub-query": "{ASKED}"}}\n```',
    f'{{"[SUBQ]": "{ASKED}"}}',
    f'{{"sufficient": false, "query": "{ASKED}"}}',
    f'{{"sufficient": "no", "sub-query": "{ASKED}"}}',
]


@pytest.mark.parametrize("reply", PLANS)
def test_a_plan_that_asks(reply):
    assert read_plan(reply) == (Action.SUBQ, ASKED)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("[SUFFICIENT]", Action.SUFFICIENT),
        ("**[SUFFICIENT]**", Action.SUFFICIENT),
        ("SUFFICIENT", Action.SUFFICIENT),
        ("SUFFICIENT.", Action.SUFFICIENT),
        ("[Sufficient]\nBoth dates are known.", Action.SUFFICIENT),
        ("All is known. [SUFFICIENT]", Action.SUFFICIENT),
        ("Decision: [SUFFICIENT]", Action.SUFFICIENT),
        ("✅ **[SUFFICIENT]** — both dates are known.", Action.SUFFICIENT),
        ("<SUFFICIENT/>", Action.SUFFICIENT),
        ('{"decision": "SUFFICIENT"}', Action.SUFFICIENT),
        ('{"sufficient": true, "query": null}', Action.SUFFICIENT),
        ("[NO_RETRIEVAL]", Action.NO_RETRIEVAL),
        ("`[NO RETRIEVAL]`", Action.NO_RETRIEVAL),
        ("NO_RETRIEVAL", Action.NO_RETRIEVAL),
    ],
)
def test_a_plan_that_stops(reply, action):
    assert read_plan(reply) == (action, "")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "no_plan"),
        ("I would search for her place of birth.", "no_plan"),
        ("The facts are sufficient.", "no_plan"),
        ("The facts are not (sufficient) yet.", "no_plan"),
        (f"Question: {ASKED}", "no_plan"),
        (f"[SUFFICIENT] or [SUBQ] {ASKED}", "two_plans"),
        (f"[SUBQ] {ASKED}\n[SUBQ] When was Ada Lovelace born?", "two_plans"),
        ("[SUBQ]", "no_subquery"),
        ("[SUBQ]\nReason: something is missing", "no_subquery"),
    ],
)
def test_an_unclear_plan_is_refused(reply, reason):
    with pytest.raises(UnusableReply) as refused:
        read_plan(reply)
    assert refused.value.reason == reason


def test_a_subquery_keeps_the_quotation_marks_that_belong_to_it():
    assert read_plan('[SUBQ] Who wrote "Heroes"?').subquery == 'Who wrote "Heroes"?'
    assert read_plan('[SUBQ] Who wrote "Heroes"').subquery == 'Who wrote "Heroes"'
    assert read_plan("[SUBQ] '90s bands of 'Oslo'").subquery == "'90s bands of 'Oslo'"


FIELDS = ("Rutgers University", "is in", "?state")


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("Rutgers University | is in | ?state", ""),
        ("| Rutgers University | is in | ?state |", ""),
        ("Rutgers University || is in || ?state", ""),
        ("(Rutgers University | is in | ?state)", ""),
        ("<Rutgers University | is in | ?state>", ""),
        ("[1] Rutgers University | is in | ?state", "1"),
        ("[1]: Rutgers University | is in | ?state", "1"),
        ("**[1]** Rutgers University | is in | ?state", "1"),
        ("(1) Rutgers University | is in | ?state", "1"),
        ("1. Rutgers University | is in | ?state", ""),
        ("→ Rutgers University | is in | ?state", ""),
        ("*Rutgers University* | is in | ?state", ""),
        ("<triples>\nRutgers University | is in | ?state\n</triples>", ""),
        ("<triple>Rutgers University | is in | ?state</triple>", ""),
        ("Rutgers University | is in | ?state (inferred from passage 2)", ""),
        ("Rutgers University | is in | ?state (implied by clue 1)", ""),
        ("1) Rutgers University | is in | ?state", ""),
        ("1: Rutgers University | is in | ?state", "1"),
        ("| 1 | Rutgers University | is in | ?state |", "1"),
        ("- Rutgers University | is in | ?state", ""),
        ("* Rutgers University | is in | ?state", ""),
        ("• Rutgers University | is in | ?state", ""),
        ("Triples:\n- Rutgers University | is in | ?state", ""),
        ("Triples: Rutgers University | is in | ?state", ""),
        ("**Clues**\n\nRutgers University | is in | ?state", ""),
        ("```\nRutgers University | is in | ?state\n```", ""),
        ("Rutgers University | is in | `?state`", ""),
        ("**Rutgers University** | is in | **?state**", ""),
        ('"Rutgers University" | "is in" | "?state"', ""),
        ("Rutgers University | is in | ?state (from passage 2)", ""),
        ("Rutgers University | is in | ?state [Passage 2]", ""),
        ("Rutgers University | is in | ?state, as stated in passage 2", ""),
        ("Rutgers University | is in | ?state [2]", ""),
        ("Rutgers University | is in | ?state (Proposition 3)", ""),
        ("Rutgers University | is in | ?state, according to the passages", ""),
        ("Triple 1: Rutgers University | is in | ?state", ""),
        ("Reasoning: the school | its state | must be found\nRutgers University | is in | ?state", ""),
        ("| Subject | Predicate | Object |\n|---|---|---|\n| Rutgers University | is in | ?state |", ""),
        ('[["Rutgers University", "is in", "?state"]]', ""),
        ('{"clues": [["Rutgers University", "is in", "?state"]]}', ""),
        ("Subject: Rutgers University Predicate: is in Object: ?state", ""),
    ],
)
def test_a_row(reply, number):
    assert field_rows(reply) == ([FieldRow(number, FIELDS)], 0)


@pytest.mark.parametrize(
    "fields",
    [
        ("<singer>", "was born in", "<city>"), ("[singer]", "was born in", "[city]"), ("(Ada)", "is", "(poet)"),
        ("<Hungry Eyes (Dirty Dancing)>", "is sung by", "<singer>"),
    ],
)  # fmt: skip
def test_brackets_around_fields_are_none_around_the_row(fields):
    assert field_rows(" | ".join(fields)) == ([FieldRow("", fields)], 0)


@pytest.mark.parametrize(
    "value",
    ["Kristiania (from 1925)", "The Daily News (Palo Alto)", "Voices from the Text", "Facts (album)", "Life as Given"],
)
def test_a_value_keeps_what_belongs_to_its_name(value):
    rows, _ = field_rows(f"[1] Ada | wrote | {value}")
    assert rows[0].fields[2] == value


def test_a_fourth_field_belongs_to_the_object():
    assert field_rows("Ada | born in | London | 1815") == ([FieldRow("", ("Ada", "born in", "London, 1815"))], 0)


def test_rows_that_nobody_can_read_are_counted():
    assert field_rows("Ada | born in | London | 1815 | December\nAda | died in | London") == (
        [FieldRow("", ("Ada", "died in", "London"))],
        1,
    )
    assert field_rows("(none)") == ([], 0)
    assert field_rows("Ada | born in") == ([], 0)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("?state", "?state"),
        ("? state", "?state"),
        ("$state", "?state"),
        ("[state]", "?state"),
        ("<state>", "?state"),
        ("{?state}", "?state"),
        ("[birth place]", "?birth_place"),
        ("X", "?X"),
        ("___", "?"),
        ("?", "?"),
        ("unknown", "?"),
        ("director of $film", "director of ?film"),
        ("war with {leader}", "war with ?leader"),
        ("the <birth place> of {?ada}", "the ?birth_place of ?ada"),
        ("county of [?city]", "county of ?city"),
        ("<Hungry Eyes (Dirty Dancing)>", "Hungry Eyes (Dirty Dancing)"),
        ("Oslo", "Oslo"),
        ("A", "A"),
        ("US$5", "US$5"),
        ("Who's Afraid of Virginia Woolf?", "Who's Afraid of Virginia Woolf?"),
    ],
)
def test_an_unknown_in_any_spelling(field, expected):
    assert unknown_field(field) == expected


@pytest.mark.parametrize(
    "reply",
    [
        "NONE", "**None**", "NONE of the passages names a year.", "No new facts.", "N/A",
        "NONE\n\nThe passages are about other people.", "There are no relevant facts in the passages.",
        "I could not find any facts about this.", "No.", "null", "-", "Nothing new here.", "No additional facts.",
        "Unfortunately, none of these passages gives the years.",
        "There's nothing new in these passages that would help.",
        "The passages do not help with this question.", "I see no facts here that help.",
        "No passage names the county.",
        "These passages are not relevant.", "All relevant facts were already found.", "I don't see anything new.",
    ],
)  # fmt: skip
def test_a_reply_without_facts(reply):
    assert read_facts(reply).triples == ()


@pytest.mark.parametrize(
    "reply",
    [
        '["None But the Brave", "is", "film"]',
        "None But the Brave | is | film",
        "- **None But the Brave** | is | film",
        "(S> None But the Brave| P> is| O> film)",
        "NONE were found before, but now:\nNone But the Brave | is | film",
    ],
)
def test_a_reply_with_facts(reply):
    assert read_facts(reply).triples == (Triple("None But the Brave", "is", "film"),)


@pytest.mark.parametrize("reply", ["", "Nonesuch is in Surrey.", "The passages name Oslo."])
def test_a_reply_that_neither_states_nor_denies_facts_is_refused(reply):
    with pytest.raises(UnusableReply):
        read_facts(reply)


def test_unknowns_of_several_rows():
    rows = [["X", "directed", "Alien"], ["birthplace of X", "is", "Y"]]
    assert unknowns_in(rows) == [["?X", "directed", "Alien"], ["birthplace of ?X", "is", "?Y"]]
    assert unknowns_in([["<Alien>", "<was directed by>", "<?x>"]]) == [["Alien", "was directed by", "?x"]]


def test_what_the_question_names_is_no_unknown():
    assert unknown_field("X", "Who owns X?") == "X"
    assert unknown_field("[Glass Harbour]", "Who directed Glass Harbour?") == "Glass Harbour"
    assert unknown_field("[director]", "Who is the director of Glass Harbour?") == "?director"


@pytest.mark.parametrize(
    ("reply", "answerable", "reason"),
    [
        ("Answerable: Yes", True, ""),
        ("**Answerable:** Yes", True, ""),
        ("Answerable: **No**\nWhy: the year is missing", False, "the year is missing"),
        ("- Answerable: No", False, ""),
        ("Answerable? Yes", True, ""),
        ("Answerable - Yes", True, ""),
        ("Yes\nAnswer: 1936", True, "1936"),
        ("Yes, the facts give the year.", True, "the facts give the year."),
        ("No. The year is missing.", False, "The year is missing."),
        ('{"answerable": "yes"}', True, ""),
        ('{"answerable": false, "why": "the year is missing"}', False, "the year is missing"),
        ("Answerable: Partially", False, ""),
        ("Partially", False, ""),
        ("<answerable>no</answerable>", False, ""),
        ("✅ Answerable: Yes", True, ""),
        ("**Not answerable yet.** The year is missing.", False, "Not answerable yet. The year is missing."),
        ("The question is answerable.", True, None),
        ("It cannot be answered yet, since the year is missing.", False, None),
        ("Let me look at the facts.\n\nAnswerable: No", False, ""),
    ],
)
def test_a_verdict(reply, answerable, reason):
    verdict = answerable_verdict(reply)
    assert verdict.is_answerable == answerable
    assert reason is None or verdict.reason == reason


@pytest.mark.parametrize(
    ("reply", "reason"),
    [("", "no_verdict"), ("The facts name Oslo.", "no_verdict"), ("Answerable: Yes\nAnswerable: No", "two_verdicts")],
)
def test_an_unclear_verdict_is_refused(reply, reason):
    with pytest.raises(UnusableReply) as refused:
        answerable_verdict(reply)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "reply",
    [
        ASKED,
        f"Question: {ASKED}",
        f"**Next question:** {ASKED}",
        f"Query: {ASKED}",
        f'"{ASKED}"',
        f"“{ASKED}”",
        f"1. {ASKED}",
        f"- {ASKED}",
        f"`{ASKED}`",
        f"```\n{ASKED}\n```",
        f"Here is the question:\n{ASKED}",
        f"Here is the question to search for.\n\n{ASKED}",
        f"Sure! Here is the next question.\n\n**{ASKED}**",
        f"{ASKED}\n\nReason: the place is missing",
        f"Reworded question: {ASKED}",
        f"**Rewritten query:** {ASKED}",
        f"Q: {ASKED}",
        f"→ {ASKED}",
        f"*Next question:* {ASKED}",
        f"Search for: {ASKED}",
        f"My next question would be: **{ASKED}**",
        f'I would search for "{ASKED}"',
        f"<question>{ASKED}</question>",
        f'{{"question": "{ASKED}"}}',
    ],
)
def test_a_question(reply):
    assert next_question(reply) == ASKED


def test_a_question_without_a_question_mark():
    assert next_question("birthplace of Ada Lovelace") == "birthplace of Ada Lovelace"
    assert next_question("") == ""
    assert (
        next_question("No further question is needed: all is known.") == "No further question is needed: all is known."
    )
    assert next_question('Who sang "Where is my mind?"') == 'Who sang "Where is my mind?"'


TOPICS = ["People", "Places", "Works of art"]


@pytest.mark.parametrize(
    "reply",
    [
        '["People", "Works of art"]',
        '{"topics": ["People", "Works of art"]}',
        '{"reason": ["people matter"], "topics": ["People", "Works of art"]}',
        '["People", "Works of art"] because of ["x"]',
        '```json\n{"topics": ["people", "works of art"]}\n```',
        '{"topics": [{"name": "People"}, {"name": "Works of art"}]}',
        "- People\n- Works of art",
        "• **People**\n• Works of art",
        "1. People\n2. Works of art",
        "People, Works of art",
        "Topics: People, Works of art.",
        "I select these topics:\n\n- People\n- Works of art",
    ],
)
def test_labels(reply):
    assert [label.lower() for label in read_labels(reply, TOPICS, "write a list")] == ["people", "works of art"]


def test_labels_that_are_not_there():
    assert read_labels('{"topics": []}', TOPICS, "write a list") == []
    assert read_labels('["People", "Animals"]', TOPICS, "write a list") == ["People", "Animals"]
    for reply in ("", "None of them fits.", '{"topics": "People"}'):
        with pytest.raises(UnusableReply):
            read_labels(reply, TOPICS, "write a list")


WRAPPERS = [
    "{}", "**{}**", "`{}`", "```\n{}\n```", "```text\n{}\n```", "- {}", "* {}", "• {}", "1. {}", "(1) {}", "> {}",
    "→ {}", "<reply>{}</reply>", "Reply:\n{}", "  {}  ", "\n{}\n", "**1.** {}", "- **{}**",
    "Here is my reply:\n\n{}", "<think>hm</think>\n{}",
]  # fmt: skip
NAMES = ["Ada", "Green", "Bay", "Rutgers", "University", "Jean-Luc", "O'Neill", "1936"]
WORDS = st.lists(st.sampled_from(NAMES), min_size=2, max_size=5).map(" ".join)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@given(words=WORDS)
def test_each_role_reads_a_wrapped_reply_as_the_bare_one(wrapper, words):
    question = f"Where is {words}?"
    assert read_plan(wrapper.format(f"[SUBQ] {question}")) == (Action.SUBQ, question)
    assert next_question(wrapper.format(question)) == question
    assert answerable_verdict(wrapper.format("Answerable: No")).is_answerable is False
    rows, unclear = field_rows(wrapper.format(f"{words} | is in | ?place"))
    assert ([row.fields for row in rows], unclear) == ([(words, "is in", "?place")], 0)
    assert read_labels(wrapper.format('["People"]'), TOPICS, "") == ["People"]
    assert phrased_answer(wrapper.format(f"So the answer is: {words}")) == words
    if wrapper != "(1) {}":  # a number in brackets may belong to an answer: "(500) Days of Summer"
        assert bare_answer(wrapper.format(words)) == words


@pytest.mark.parametrize("read", [read_plan, answerable_verdict, lambda reply: read_labels(reply, TOPICS, "")])
@given(text=st.text())
def test_any_text_is_read_or_refused(read, text):
    try:
        read(text)
    except UnusableReply as refused:
        reason = refused.reason
    else:
        reason = "read"
    assert reason in {"read", "no_plan", "two_plans", "no_subquery", "no_verdict", "two_verdicts", "no_labels"}


@given(st.text())
def test_any_text_has_lines_rows_a_question_and_an_answer(text):
    assert all(line.text or line.label for line in lines_of(text))
    rows, unclear = field_rows(text)
    assert all(all(row.fields) for row in rows)
    assert unclear >= 0
    assert "\n" not in next_question(text)
    assert unlabelled_answer(text) in text


def test_a_line_loses_its_decoration_and_keeps_its_number_and_label():
    assert read_line("- **2.** [3] Query: `x`") == ("x", "3", "query")
    assert read_line("### Answer: *x*") == ("x", "", "answer")
    assert read_line("A * B") == ("A * B", "", "")
    assert read_line("*Thought 3:* x") == ("x", "", "thought")
    assert read_line("*Hamlet* is in M*A*S*H") == ("Hamlet is in M*A*S*H", "", "")
    assert read_line("1990: a year") == ("1990: a year", "", "")
    assert lines_of("```\nx\n```\n\nTriples:\n") == [("x", "", ""), ("", "", "triples")]
