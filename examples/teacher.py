"""A teacher that knows only the fictional company's facts: it answers from the sentences in a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from company import INVERSE, TABLE, Fact, draw_number, facts_of, name_in_sentence, objects_of, things_of_owner

from tripletune.core.calls import Message
from tripletune.core.data.answers import normalize_answer as key
from tripletune.core.data.triples import Triple, format_triples, parse_triples
from tripletune.data_builders.questions.teacher import READ_ROLE, RECALL_ROLE, WORD_ROLE, load_question_prompts
from tripletune.llm.question_client import load_prompts
from tripletune.rag.chat_generator import ANSWER, PLAN
from tripletune.rag.extractor import TEACHER_PROMPT


class Question(NamedTuple):
    """A question that the teacher has written, its sub-queries, and the function that answers it from facts."""

    text: str
    subqueries: list[str]
    answer: Callable[[set[Fact]], str]


class Teacher:
    """Replies to the prompts of `rag extract`, `build questions` and, for questions that it wrote, RAS."""

    def __init__(self) -> None:
        question_prompts = load_question_prompts().texts
        # Roles by their system prompts.
        self.roles = {}
        for role in (WORD_ROLE, READ_ROLE, RECALL_ROLE):
            self.roles[question_prompts[role.replace(".", "_")]] = role
        self.roles[TEACHER_PROMPT.read_text(encoding="utf-8").strip()] = "extract"
        for role, prompt in load_prompts((PLAN, ANSWER)).texts.items():
            self.roles[prompt] = role
        # Its questions by their texts.
        self.questions: dict[str, Question] = {}

    def reply(self, messages: list[Message]) -> str:
        """The reply to a chat, by the role that its system prompt has; a `KeyError` for a prompt of another program."""
        role = self.roles[messages[0]["content"].strip()]
        text = messages[-1]["content"]
        if role == "extract":
            return format_triples(Triple(*fact) for fact in facts_of(text)) or "NONE"
        if role == WORD_ROLE:
            return json.dumps(self.write_question(text), ensure_ascii=False)
        if role == PLAN:
            return self.plan(text)
        if role == ANSWER:
            return self.answer_from_history(text)
        if role == RECALL_ROLE:
            # A model without passages does not know the fictional company.
            return "unknown"
        return self.answer_from_passages(text)

    def write_question(self, text: str) -> dict[str, object]:
        """Write a question of a kind about numbered facts, and remember it, to answer it later.

        Returns:
            The reply's JSON: "question" and "subqueries"; an empty question alone if the table has no words for it.
        """
        kind, wanted = re.match(r"Kind: (\w+)(?: \((.*)\))?", text).groups()
        facts = []
        for line in re.findall(r"^\d+\. .* \| .*$", text, re.M):
            _, _, fact = line.partition(". ")
            facts.append(tuple(fact.split(" | ")))
        if kind == "chain":
            question = chain(facts)
        elif kind == "comparison":
            question = comparison(facts, wanted)
        else:
            question = intersection(facts)
        if question is None:
            return {"question": ""}
        self.questions[question.text] = question
        return {"question": question.text, "subqueries": question.subqueries}

    def answer_from_passages(self, text: str) -> str:
        """The answer to a question from the facts of the passages before it; "unknown" if they do not hold it."""
        passages, question = text.rsplit("\n\nQuestion: ", 1)
        facts = {(key(subject), predicate, obj) for subject, predicate, obj in facts_of(passages)}
        return self.questions[question].answer(facts) or "unknown"

    def answer_from_history(self, text: str) -> str:
        """The answer to a question from the triples that RAS has retrieved; "unknown" if they do not hold it."""
        history, question = text.rsplit("Question: ", 1)
        facts = {(key(fact.subject), fact.predicate, fact.object) for fact in parse_triples(history).triples}
        return self.questions[question].answer(facts) or "unknown"

    def plan(self, text: str) -> str:
        """RAS's next action: the sub-query after those that were asked, whatever they found, or the end."""
        history, question = text.rsplit("Question: ", 1)
        done = history.count("[SUBQ]")
        subqueries = self.questions[question].subqueries
        if done == len(subqueries):
            return "[SUFFICIENT]"
        return f"[SUBQ] {subqueries[done]}"


def chain(facts: list[Fact]) -> Question | None:
    """A question for the last object of facts, of which each is about the object of the one before.

    None if the table lacks words for a predicate. Of several wordings, one is drawn by the facts.
    """
    chance = " ".join(map(str, facts))
    start = facts[0][0]
    phrase = name_in_sentence(start)
    for _, predicate, _ in facts[:-1]:
        forms = TABLE["refer"].get(predicate)
        if not forms:
            return None
        if phrase != name_in_sentence(start):
            # A nested phrase must be the last part of the outer phrase.
            forms = [form for form in forms if form.endswith("{x}")]
        phrase = forms[draw_number(chance + predicate, len(forms))].format(x=phrase)
    asks = [TABLE["ask"].get(predicate) for _, predicate, _ in facts]
    if not all(asks):
        return None

    def answer(known_facts: set[Fact]) -> str:
        """Follow the predicates from the first subject; "" unless this leads to one name."""
        names = {start}
        for _, predicate, _ in facts:
            objects: set[str] = set()
            for name in names:
                objects |= objects_of(known_facts, name, predicate)
            names = objects
        return only_name(names)

    subqueries = []
    for forms, (subject, _, _) in zip(asks, facts):
        subqueries.append(forms[draw_number(chance, 2)].format(x=name_in_sentence(subject)))
    # The second form is for short phrases.
    last_form = asks[-1][draw_number(chance + "!", 2) if len(facts) < 3 else 0]
    return Question(last_form.format(x=phrase), subqueries, answer)


def only_name(names: set[str]) -> str:
    """The only name, or "" if there is none or several: a question with several answers has no right one."""
    if len(names) != 1:
        return ""
    (name,) = names
    return name


def comparison(facts: list[Fact], wanted: str) -> Question | None:
    """A question which of two things has less or more of a predicate, or whether both have the same.

    None if the table lacks words for it.

    Args:
        wanted: The test, as the prompt of `build questions` names it (`facts.ComparisonTest`).
    """
    (a, predicate, _), (b, _, _) = facts
    test = {"smaller or earlier": "less", "larger or later": "more"}.get(wanted, "same")
    form = TABLE[test].get(predicate)
    if not form:
        return None

    def answer(known_facts: set[Fact]) -> str:
        """Compare the values of both things; "" unless each has one value in the facts."""
        values_of_a = objects_of(known_facts, a, predicate)
        values_of_b = objects_of(known_facts, b, predicate)
        if len(values_of_a) != 1 or len(values_of_b) != 1:
            return ""
        value_of_a = values_of_a.pop()
        value_of_b = values_of_b.pop()
        if test == "same":
            return "yes" if value_of_a == value_of_b else "no"
        a_is_less = number_in(value_of_a) < number_in(value_of_b)
        return a if a_is_less == (test == "less") else b

    ask = TABLE["ask"][predicate][0]
    subqueries = [ask.format(x=name_in_sentence(a)), ask.format(x=name_in_sentence(b))]
    return Question(form.format(a=name_in_sentence(a), b=name_in_sentence(b)), subqueries, answer)


def number_in(text: str) -> float:
    """The number in a value such as "1,200 kg"."""
    return float(re.sub(r"[^\d.]", "", text))


class Condition(NamedTuple):
    """One of two conditions on a thing, in the table's words.

    Attributes:
        owner: Who designed, leads, supplies or pays for the thing.
        predicate: The thing's predicate, such as "designer".
        kind: What the thing is called in the question.
        phrase: The condition in the question.
        ask: The sub-query.
    """

    owner: str
    predicate: str
    kind: str
    phrase: str
    ask: str


def intersection(facts: list[Fact]) -> Question | None:
    """A question for the thing that fulfils two conditions; None if the table has no words for them together."""
    conditions = []
    for subject, predicate, thing in facts:
        owner = thing
        if predicate in INVERSE:
            owner = subject
            predicate = INVERSE[predicate]
        if predicate not in TABLE["shared"]:
            return None
        conditions.append(Condition(owner, predicate, *TABLE["shared"][predicate]))
    a, b = conditions
    if a.kind != b.kind:
        return None

    def answer(known_facts: set[Fact]) -> str:
        """The one thing that fulfils both conditions; "" if there is none or several."""
        names = things_of_owner(known_facts, a.owner, a.predicate) & things_of_owner(known_facts, b.owner, b.predicate)
        return only_name(names)

    first = a.phrase.format(x=name_in_sentence(a.owner))
    second = b.phrase.format(x=name_in_sentence(b.owner))
    subqueries = [a.ask.format(x=name_in_sentence(a.owner)), b.ask.format(x=name_in_sentence(b.owner))]
    return Question(f"Which {a.kind} {first} and {second}?", subqueries, answer)
