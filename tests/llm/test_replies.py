import asyncio
import contextlib
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import Client
from tripletune.core.calls import Completion, Message, UnusableReply
from tripletune.llm.refusals import asks_nothing, is_refusal
from tripletune.llm.replies import ask, kept_text, repair_turns
from tripletune.llm.reply_json import REPAIRED, find_json, without_thoughts
from tripletune.llm.reply_triples import find_triples

QUESTION: list[Message] = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "A number?"}]


def number(text):
    if not text.strip().isdigit():
        raise UnusableReply("no_number", "it is not a number.")
    return int(text)


def test_a_bad_reply_is_sent_back_with_what_is_wrong():
    client, repaired = Client("7", "seven", "7"), Counter()
    for _ in range(2):
        assert asyncio.run(ask(client, QUESTION, number, role="r", question_id="q", repaired=repaired)) == 7
    first, second, third = client.asked
    assert [(one.messages, one.role, one.question_id) for one in (first, second)] == [(QUESTION, "r", "q")] * 2
    turns = third.messages
    assert turns[:3] == [*QUESTION, {"role": "assistant", "content": "seven"}]
    assert turns[3]["role"] == "user"
    assert "it is not a number." in turns[3]["content"]
    assert "{" not in turns[3]["content"]
    assert (third.role, third.question_id) == ("r.repair", "q")
    assert repaired == {"no_number": 1}


def test_a_reply_that_was_cut_off_is_no_label_though_its_part_can_be_parsed():
    def first_digit(text):
        return int(text[0])

    client = Client("42 and...", "43")
    assert asyncio.run(ask(client, QUESTION, first_digit, role="r")) == 4
    assert "was cut off (finish_reason length)" in client.asked[1].text
    with pytest.raises(UnusableReply) as caught:
        asyncio.run(ask(Client("42 and...", "43 and..."), QUESTION, first_digit, role="r"))
    assert caught.value.reason == "cut_off"
    assert asyncio.run(ask(Client("52 and..."), QUESTION, first_digit, role="r", parts=True)) == 5


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("[1] Ada | born in | Kelm\n[2] Ada | wrote | Gla", "[1] Ada | born in | Kelm\n"),
        ("Ada | born in | Ke", ""),
        ("(Ada | born in | Ke", ""),
        ("Subject: Ada Predicate: born in Object: Ke", ""),
        ("(S> Ada| P> born in| O> Kelm) (S> Ada| P> wrote| O> Gla", None),
        ('[["Ada", "also | called", "A"], ["Ada", "wro', None),
        ('{"triples": [["Ada", "a|b", "c"], ["Ada', None),
        ("The river flows from", None),
        ("Ada | wrote | Glass\nThat is all we kn", None),
    ],
)
def test_of_a_part_only_whole_rows_are_read(text, kept):
    part = Completion(text, finish_reason="length")
    assert kept_text(part) == (text if kept is None else kept)
    assert kept_text(Completion(text)) == text


@pytest.mark.parametrize("repairs", [0, 1, 3])
def test_the_last_bad_reply_goes_to_the_caller(repairs):
    client = Client(*["x"] * 9)
    with pytest.raises(UnusableReply) as caught:
        asyncio.run(ask(client, QUESTION, number, role="r", repairs=repairs))
    assert caught.value.reason == "no_number"
    assert caught.value.repairs == repairs
    assert len(client.asked) == repairs + 1


def test_an_empty_reply_leaves_no_empty_turn():
    turns = repair_turns(QUESTION, " \n", "it is empty.")
    assert [turn["role"] for turn in turns] == ["system", "user"]
    assert turns[1]["content"].startswith("A number?\n\n")
    assert "it is empty." in turns[1]["content"]
    assert QUESTION[1]["content"] == "A number?"


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ('{"a": 1}', (dict,), {"a": 1}),
        ('Sure! Here it is:\n```json\n{"a": [1, 2]}\n```\nAnything else?', (dict,), {"a": [1, 2]}),
        ('First {"a": 1}, no: {"a": 2}', (dict,), {"a": 2}),
        ('As [1] says: {"a": 1}', (dict,), {"a": 1}),
        ('<think>maybe {"a": 1}</think>{"a": 2}', (dict,), {"a": 2}),
        ('{"a": 2}<think>never ended {"a": 3}', (dict,), {"a": 2}),
        # The chat template wrote the opening tag.
        ('so {"a": 1}, or</think>{"b": 2}', (dict,), {"b": 2}),
        ('{"b": 2} I mean: [1]</think>{"b": 3} or so', (dict,), {"b": 3}),
        ('{"text": "two\nlines"}', (dict,), {"text": "two\nlines"}),
        ("~~~json\n[3]\n~~~", (list,), [3]),
        ('```json\n{"a": 1}', (dict,), {"a": 1}),
        ("it {may} be [4]", (), [4]),
        # Repaired: trailing commas, and as Python writes.
        ('{"a": [1, 2,], "b": true,}', (dict,), {"a": [1, 2], "b": True}),
        ("As [1] says: {'a': None, 'b': (1, 2)}", (dict,), {"a": None, "b": [1, 2]}),
    ],
)
def test_json_is_found(text, kinds, value):
    assert find_json(text, *kinds) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (
            r'"Which source emits \alpha rays, \beta rays or \frac?"',
            r"Which source emits \alpha rays, \beta rays or \frac?",
        ),
        # One backslash that begins no escape: the others begin none either.
        (r'"Who keeps C:\apps\new\temp?"', r"Who keeps C:\apps\new\temp?"),
        (r'"\x41 \0 \101 \N{BULLET} \U0001F600 \u12"', r"\x41 \0 \101 \N{BULLET} \U0001F600 \u12"),
        (r'"caf\u00e9 \sigma \\d \"x\""', r'café \sigma \d "x"'),
        (r'"a\nb\tC\r\n \\beta \/"', "a\nb\tC\r\n \\beta /"),
        # A tab or carriage return before a lower-case letter is LaTeX or a path; a line break stays one.
        (r'"Is \theta in C:\rays?"', r"Is \theta in C:\rays?"),
        (r'"first\nsecond"', "first\nsecond"),
        (r"'It\'s \w+ \"x\" and \"y'", r"""It's \w+ "x" and "y"""),
        (r'"Ann\'s [1,2,] and {3,}", ', "Ann's [1,2,] and {3,}"),
        ('“He said "x] here}”', 'He said "x] here}'),
        ('"Who sells x] here?", ', "Who sells x] here?"),
        ('"Who drew } and ( first?", ', "Who drew } and ( first?"),
        ('"What does <think> open?"', "What does <think> open?"),
        ("'Who added </thinking> to it?'", "Who added </thinking> to it?"),
        ('"a\n```json\n{}\n```\nb"', "a\n```json\n{}\n```\nb"),
    ],
)
def test_a_string_is_kept_as_it_is(written, value):
    assert find_json(f'So: {{"q": {written}}} as asked', dict) == {"q": value}
    assert find_json(f'<think>{{"q": 1}}</think>\n```\n{{"q": {written}}}\n```', dict) == {"q": value}
    found = find_triples(f'[["a", "b", {written}], ["d", "e", "f"],]')
    assert [triple.object for triple in found.triples] == [" ".join(value.split()), "f"]


@pytest.mark.parametrize(
    "text",
    [
        '{"q": "Oslo" "Norway"}',
        "{'q': 'Oslo' 'Norway'}",
        '{"q": "a" + "b"}',
        '{"q" "a"}',
        '{"q": "a",, "b": 1}',
        "{1: 2}",
    ],
)
def test_what_has_no_meaning_is_refused(text):
    with pytest.raises(UnusableReply, match="bad_json"):
        find_json(text, dict)


def test_deep_values_are_read_or_refused():
    for depth in (40, 400, 990, 5000):
        twice = '{"b": [], "a":' * depth + "[]" + "}" * depth
        for text in (twice, "[" * depth + '"a"' + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[1," * depth):
            for read in (find_json, find_triples):
                with contextlib.suppress(UnusableReply):
                    read(f"<think>x</think>{text}")
            assert without_thoughts(f"<think>x</think>{text}") == text


def test_a_tag_that_is_a_name_begins_no_thought():
    for text in (
        "What does <think> open?",
        'Who wrote "</think>"?',
        "Orm | ends with | </think>",
        "Orm | has | `<think>`",
    ):
        assert without_thoughts(text) == text
    decision = '[[## fact ##]]\n{"fact": [["Orm", "ends with", "</think>"]]}'
    assert without_thoughts(f"It {{says}} so</think>{decision}") == decision
    assert (
        without_thoughts('so "Oslo"</think>Oslo')
        == without_thoughts("<think>\nx</think>Oslo\n<think> y").strip()
        == "Oslo"
    )


@pytest.mark.parametrize(
    ("text", "kinds", "reason"),
    [
        ("no JSON here", (dict,), "no_json"),
        ("[1]", (dict,), "no_json"),
        ('{"a": [1, 2', (dict,), "bad_json"),
        ('{"a": NaN}', (dict,), "bad_json"),
        ("{'a': {1, 2}}", (dict,), "bad_json"),
        ("[" * 5000, (list,), "bad_json"),
        ("[" + "1" * 6000, (list,), "bad_json"),
    ],
)
def test_what_is_no_json_has_a_reason(text, kinds, reason):
    with pytest.raises(UnusableReply) as caught:
        find_json(text, *kinds)
    assert caught.value.reason == reason


def test_a_refusal_says_what_to_write_and_a_repair_is_counted():
    with pytest.raises(UnusableReply) as caught:
        find_json("no", dict, advice="write one JSON object")
    assert caught.value.explanation == "In the reply: there is no JSON object in it; write one JSON object."
    with pytest.raises(UnusableReply, match="The reply is empty; write"):
        find_json(" ", dict, advice="write one JSON object")
    notes = Counter()
    assert find_json("{'a': 1}", dict, notes=notes) == {"a": 1}
    assert notes == {REPAIRED: 1}


@pytest.mark.parametrize(
    ("text", "triples", "malformed", "cut_off"),
    [
        ("Facts: (S> a| P> b| O> c), (S> d| P> e", ["abc"], 1, False),
        ('{"triples": [["a", "b", "c"], ["d", "e", 7], ["x"], ["", "y", "z"]]}', ["abc", "de7"], 2, False),
        ('As [1] says: {"triples": [{"subject": "a", "predicate": "b", "object": "c"}]}', ["abc"], 0, False),
        ('{"facts": [["a", "b", "c"], ["d", "e", "f"]]}', ["abc", "def"], 0, False),
        ('1. ["a", "b", "c"]\n2. ["d", "e", "f"]', ["abc", "def"], 0, False),
        ("{'triples': [['a', 'b', 'c'],]}", ["abc"], 0, False),
        ('{"triples": ["a", "b", "c"]}', ["abc"], 0, False),
        ('{"triples": [["a", "b", "c"], ["d", "e', ["abc"], 1, True),
        ('[["a", "b", "c"], ["a", "b", "c"]]', ["abc", "abc"], 0, False),
        # Under other names, as tuples, and numbers as they are written.
        ('[{"Head": "a", "relation": "b", "TAIL": 3.10}, {"SUBJECT ": "a", "type": "b"}]', ["ab3.10"], 1, False),
        ("[('a', 'b', 'c'), ('d', 'e', 7)]", ["abc", "de7"], 0, False),
        ('("a", "b", "c")\n("d", "e", "f") ("yes")', ["abc", "def"], 0, False),
        # Of several lists all are read.
        (
            '```\n[["a", "b", "c"]]\n```\nMore:\n```\n[["d", "e", "f"]]\n```\n{"triples": [["g", "h", "i"]]}',
            ["abc", "def", "ghi"],
            0,
            False,
        ),
        ('{"Oslo": [["a", "b", "c"]], "Rome": [["d", "e", "f"]]}', ["abc", "def"], 0, False),
        ('[{"title": "x", "triples": [["a", "b", "c"]]}, {"title": "y", "triples": []}]', ["abc"], 0, False),
        ('{"entities": ["A", "B", "C"], "edges": [["a", "b", "c"]]}', ["abc"], 0, False),
        (
            '{"entities": [["A", "is", "B"]], "Facts": [["a", "b", "c"]], "more_facts": [["d", "e", "f"]]}',
            ["abc", "def"],
            0,
            False,
        ),
        # What is left out is counted.
        ('[["a", "b", "c"], ["d", "e" "f"], ["g", "h", "i"]]', ["abc", "ghi"], 1, True),
        (
            '[{"subject": "a", "predicate": "b" "object": "c"}, {"subject": "d", "predicate": "e", "object": "f"}]',
            ["def"],
            1,
            True,
        ),
        # Markers and tags in names.
        ('Facts: [["a", "writes", "(S> x| P> y| O> z)"]]', ["awrites(S> x| P> y| O> z)"], 0, False),
        ('["(S> a| P> b| O> c)", "(S> d| P> e| O> f)", "(<S> g| <P> h| <O> i)"]', ["abc", "def", "ghi"], 0, False),
        (
            'Facts: (S> a| P> is| O> ["x", "y", "z"]), (S> d| P> ends| O> </think>)',
            ['ais["x", "y", "z"]', "dends</think>"],
            0,
            False,
        ),
    ],
)
def test_triples_are_found_in_every_form(text, triples, malformed, cut_off):
    found = find_triples(text)
    assert ["".join(triple.as_list()) for triple in found.triples] == triples
    assert (found.malformed, found.cut_off) == (malformed, cut_off)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I can't.",
        "See [1].",
        "<html>[2]</html>",
        '{"triples": null}',
        '{"other": 1}',
        '{"a": [["x"]], "b": [1]}',
        '{"triples": [',
    ],
)
def test_a_reply_without_triples_is_refused(text):
    with pytest.raises(UnusableReply, match=r"no_triples: .*; write triples\."):
        find_triples(text, "write triples")


plain = st.text(st.characters(exclude_characters="[]{}`~<>", exclude_categories=["Cs"]), max_size=30)
# No model means a backspace by the "\\b" of "\\beta", or a tab by the "\\t" of "\\theta".
texts = st.text(st.characters(exclude_characters="\b\f\r\t", exclude_categories=["Cs"])) | st.sampled_from(
    ["<think>", "a</think>b", "\n```json\n[1]\n```\n", "x] {", "\\alpha", "it's", "[1,2,] and {,}"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
).filter(lambda value: isinstance(value, (dict, list)))


@given(values, plain, plain, st.sampled_from([None, 2]))
def test_any_value_in_prose_or_a_fence_is_found(value, before, after, indent):
    text = json.dumps(value, indent=indent)
    assert find_json(before + text + after, type(value)) == value
    assert find_json(f"{before}\n```json\n{text}\n```\n{after}") == value


@given(st.text(max_size=200) | st.text(st.sampled_from('{}[]",:1a`\n <think>'), max_size=80))
def test_any_text_gives_a_value_or_a_reason(text):
    outcome: Any
    try:
        outcome = find_json(text)
    except UnusableReply as error:
        outcome = error.reason
    assert isinstance(outcome, (dict, list)) or outcome in ("no_json", "bad_json")


def test_refusals_in_other_words_are_refusals():
    for text in (
        "The question is unanswerable.", "It cannot be determined from the given triples.", "Not enough information",
        "I don't have enough information.", "None of the passages mention this.", "There is no way to tell.",
        "The information provided is insufficient.", "I could not find the answer.", "It's unclear from the context.",
        "I don’t know.", "Insufficient information.", "Unknown", "The passages do not mention it.", "not specified",
    ):  # fmt: skip
        assert is_refusal(text)
        assert not is_refusal(text + " But here is what they say of her." * 6)
    assert not any(map(is_refusal, ("", "Paris", "no", "The Unknown", "No Country for Old Men", "Given Name")))


@pytest.mark.parametrize(
    "text",
    [
        "There are no more questions.", "No further question is needed because Ada was born in Kelm.",
        "The facts are sufficient.", "The collected facts are enough to answer the query.", "none", "N/A", "Done.",
        "No question", "(no further questions)", "no additional information is needed", "We have enough information.",
        "Since all facts are known, no more searches are needed", "The question can now be answered.", "Nothing more.",
        "The answer is Kelm.", "I don't need to search any further.", "We can now answer the question: Kelm.",
        "Ada was born in Kelm. The triples are sufficient.", "Sufficient information has been gathered",
        "All necessary information has been found.", "No follow-up question is required.",
        "There is nothing left to ask.", "There is no need for further questions.", "The facts suffice.",
        "The retrieved facts fully answer the original query.", "It is not necessary to ask another question.",
        "We know everything.", "no more",
    ],
)  # fmt: skip
def test_no_query_in_other_words(text):
    assert asks_nothing(text)


@pytest.mark.parametrize(
    "text",
    [
        "Where is Kelm?",
        "birthplace of Ada",
        "Find the birthplace of Ada",
        "No Country for Old Men director",
        "director of No More Questions",
        "Is nothing more known of Kelm",
        "None but the Brave cast",
        "",
        "Ada",
        "No information on Kelm. Search for Sarn",
        "the river that flows through Kelm",
        "Enough Rope author",
        "There is no information about the river in Kelm",
        "What facts are sufficient?",
        "Nothing Compares 2 U writer",
        "All Quiet on the Western Front author",
        "The Answer Is Blowin' composer",
        "It Is Enough painter",
        "The Oberoi family is known for its involvement in hotels.",
        "The band is known as Nirvana.",
        "The actor who is best known for playing Sherlock",
        "The album is complete and was released in 1999",
        "Nothing More is a band from San Antonio.",
        "No, No, Nanette composer",
        "Stop! In the Name of Love songwriter",
        "No. 1 ladies detective agency author",
        "The birthplace of Ivo Rand is not known.",
        "The evidence is not enough.",
    ],
)
def test_queries_are_queries(text):
    assert not asks_nothing(text)
