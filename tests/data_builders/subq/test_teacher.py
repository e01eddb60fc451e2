import asyncio
import json

import pytest

from tests.fakes import Client
from tripletune.core.calls import CallError, RepliesPending, Sampling
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import DropReason, Question, UnlabelledQuestion
from tripletune.data_builders.subq import label_question
from tripletune.data_builders.subq.checks import read_documents, read_subquery, read_triples
from tripletune.data_builders.subq.teacher import (
    DIRECT_ROLE,
    FILTER_ROLE,
    MAX_TOKENS,
    QUERY_ROLE,
    TRIPLES_ROLE,
    BaseModelAnswers,
    LLMTeacher,
    load_subq_prompts,
)

PASSAGES = (Passage("Frank Herbert", "Of Tacoma."), Passage("Other", "x"), Passage("Dune", "By Frank\nHerbert."))
# What supports it stands in the order of the reasoning, as in the benchmark; the filter is shown the order of the row.
QUESTION = Question("q1", "Where was the author of Dune born?", ("Tacoma",), PASSAGES, (2, 0), "bridge", "hotpotqa")
KEEP_BOTH = '{"documents": [2, 1], "answerable": true}'


class SlowClient(Client):
    """Lets other calls begin before it replies."""

    async def chat(self, messages, **call):
        await asyncio.sleep(0)
        return await super().chat(messages, **call)

    def of(self, role):
        return [asked for asked in self.asked if asked.role == role]


def script(**replies):
    """A client with replies by role, in order; the last one again and again."""
    left = {
        "filter": [KEEP_BOTH],
        "query": ['{"question": "Who wrote Dune?"}', '{"question": "Where was Frank Herbert born?"}'],
        "triples": ['{"triples": [["a", "b", "c"]]}'],
    } | {name: list(texts) for name, texts in replies.items()}

    def answer(asked):
        texts = left[asked.role.removeprefix("subq.").removesuffix(".repair")]
        return texts.pop(0) if len(texts) > 1 else texts[0]

    return SlowClient(answer=answer)


def label(client, question=QUESTION, **options):
    teacher = LLMTeacher(client, **options)
    return asyncio.run(label_question(question, teacher)), teacher


def reason(client, **options):
    with pytest.raises(UnlabelledQuestion) as caught:
        label(client, **options)
    return caught.value.reason


def test_a_question_with_two_documents_is_five_calls():
    client = script()
    records, teacher = label(client)
    assert [(step.query, step.text) for step in records[-1].steps] == [
        ("Where was the author of Dune born?", "Dune\nBy Frank\nHerbert."),
        ("Where was Frank Herbert born?", "Frank Herbert\nOf Tacoma."),
    ]
    assert dict(teacher.calls) == {FILTER_ROLE: 1, QUERY_ROLE: 2, TRIPLES_ROLE: 2}
    assert not teacher.repairs
    prompts = load_subq_prompts().texts
    first = client.asked[0]
    assert (first.role, first.messages[0]["content"], first.question_id) == (FILTER_ROLE, prompts["subq_filter"], "q1")
    assert first.sampling == Sampling(max_tokens=MAX_TOKENS[FILTER_ROLE])
    assert first.text == (
        "Question: Where was the author of Dune born?\n\n"
        "Documents:\n[1] Frank Herbert\nOf Tacoma.\n\n[2] Dune\nBy Frank Herbert."
    )
    assert [asked.text for asked in client.of(QUERY_ROLE)] == [
        "Main question: Where was the author of Dune born?\n\nDocument: Dune\nBy Frank Herbert.",
        "Main question: Where was the author of Dune born?\n\nDocument: Frank Herbert\nOf Tacoma.\n\n"
        "Earlier sub-queries:\n- Who wrote Dune?",
    ]
    # The triples' prompt has nothing of the question in it: one paragraph is one call in the ledger.
    assert [asked.text for asked in client.of(TRIPLES_ROLE)] == [
        "Document: Dune\nBy Frank Herbert.",
        "Document: Frank Herbert\nOf Tacoma.",
    ]


def test_all_passages_can_be_shown():
    client = script(filter=['{"documents": [3, 1]}'])
    records, _ = label(client, shown="all")
    assert "[2] Other\nx" in client.asked[0].text
    assert [step.text.split("\n")[0] for step in records[-1].steps] == ["Dune", "Frank Herbert"]


def test_one_document_needs_no_subquery_unless_the_label_is_generated():
    client = script(filter=["1"])
    records, _ = label(client)
    assert records[0].label == "[SUBQ] Where was the author of Dune born?"
    assert not client.of(QUERY_ROLE)
    client = script(filter=["1"], query=["Where was Herbert born?"])
    assert asyncio.run(LLMTeacher(client, first_subquery="generated").subqueries(QUESTION, [0])) == [
        "Where was Herbert born?"
    ]


def test_a_first_subquery_that_is_no_label_is_not_checked_as_one():
    asked = [f'{{"question": "{QUESTION.question}"}}', '{"question": "Where was Frank Herbert born?"}']
    _, teacher = label(script(query=asked))
    assert not teacher.repairs
    assert reason(script(query=asked[:1]), first_subquery="generated") is DropReason.COPIED_QUESTION


def test_a_bad_reply_is_sent_back_once_and_counted():
    bad = {"filter": ['{"documents": [9]}', KEEP_BOTH], "triples": ["no", '{"triples": [["a", "b", "c"], []]}']}
    client = script(**bad)
    _, teacher = label(client)
    assert dict(teacher.repairs) == {FILTER_ROLE: 1, TRIPLES_ROLE: 1}
    assert teacher.malformed == 2
    repair = client.asked[1]
    assert repair.messages[2]["content"] == '{"documents": [9]}'
    assert "There is no document 9: they are numbered from 1 to 2." in repair.text


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ({"filter": ['{"documents": []}']}, DropReason.NO_HELPFUL),
        ({"filter": ['{"documents": [1, 2], "answerable": false}']}, DropReason.NOT_ANSWERABLE),
        ({"filter": ["[2]"]}, DropReason.ANSWER_NOT_KEPT),
        ({"filter": ["none"]}, DropReason.UNREADABLE_REPLY),
        ({"query": ["Who wrote Dune?"]}, DropReason.COPIED_QUESTION),
        ({"query": ["Who wrote Dune?", "Is Tacoma in it?"]}, DropReason.ANSWER_IN_SUBQUERY),
        ({"query": ["Who wrote Dune? And why?"]}, DropReason.NOT_ONE_QUESTION),
        ({"triples": ['{"triples": []}']}, DropReason.NO_TRIPLES),
    ],
)
def test_what_stays_bad_drops_the_question_with_its_reason(replies, expected):
    client = script(**replies)
    assert reason(client) is expected
    judgement = expected in (DropReason.NO_HELPFUL, DropReason.NOT_ANSWERABLE)
    assert any(role.endswith(".repair") for role in client.roles) is not judgement


def test_the_reason_does_not_hang_on_which_reply_comes_first():
    # Sub-query and triples are both bad; the triples' replies are there first.
    client = script(query=["Who wrote Dune? And why?"], triples=["no"])
    assert reason(client) is DropReason.NOT_ONE_QUESTION


def test_errors_go_before_waiting_and_waiting_before_reasons():
    with pytest.raises(CallError):
        label(script(query=[RepliesPending("x")], triples=[CallError("y")]))
    with pytest.raises(RepliesPending):
        label(script(query=["no"], triples=[RepliesPending("x")]))


def test_sampling_reaches_the_calls_and_a_schema_when_it_is_asked_for():
    for asked in (False, True):
        client = script()
        label(client, sampling=Sampling(temperature=0.5, seed=3, max_tokens=1), json_schema=asked)
        sent = {asked.role: asked.sampling for asked in client.asked}
        assert {role: (one.temperature, one.seed, one.max_tokens) for role, one in sent.items()} == {
            role: (0.5, 3, tokens) for role, tokens in MAX_TOKENS.items()
        }
        assert (None in [one.schema for one in sent.values()]) is not asked
    assert json.loads(sent[QUERY_ROLE].schema)["required"] == ["question"]


def test_the_replies_shown_in_our_prompts_pass_our_checks():
    shown = [text.rsplit("Reply: ", 1)[1] for text in load_subq_prompts().texts.values()]
    assert read_documents(shown[0], 3) == ([3, 2], True)
    assert read_subquery(shown[1]) == "On which river does the town of Kelm lie?"
    assert len(read_triples(shown[2])[0]) == 5


def test_a_direct_answer_is_the_first_line_of_a_plain_prompt():
    client = script(direct=["\n The Nile. \nQuestion: Which"])
    assert asyncio.run(BaseModelAnswers(client, 5).answer(QUESTION)) == "The Nile."
    (asked,) = client.asked
    assert (asked.role, asked.sampling.max_tokens, asked.question_id) == (DIRECT_ROLE, 5, "q1")
    assert asked.text.endswith("Question: Where was the author of Dune born?\nAnswer:")
    cut = script(direct=["The Nile\nQuestion: Which...", "The Nile and the..."])
    assert [asyncio.run(BaseModelAnswers(cut).answer(QUESTION)) for _ in range(2)] == ["The Nile", ""]
