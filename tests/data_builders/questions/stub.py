"""A teacher of rules: it words drafts over a fictional world by templates and answers from the passages it is shown."""

import json
import random
import re

from tests.cli import write_lines
from tripletune.core.data.answers import normalize_answer
from tripletune.data_builders.questions.teacher import MAX_TOKENS, READ_ROLE, RECALL_ROLE, load_question_prompts
from tripletune.data_builders.world.build import WorldOptions, generate_world

_FACT = re.compile(r"^\d+\. (.*) \| (.*) \| (.*)$", re.MULTILINE)
_LINK = re.compile(r"the <(.*?)> of (.*)")
FAULTS = ("not json", "no question", "answer", "start", "copied", "short", "subquery")


class RuleTeacher:
    """Replies to the prompts of `build questions`, and writes corpus and triples of a world into a folder.

    Args:
        faults: Share of the drafts whose first wording has a fault; `stubborn`: of these, the share that stays so.
        known: Share of the questions that it answers from memory.
    """

    def __init__(self, folder, faults=0.0, stubborn=0.0, known=0.0, **options):
        self.world = generate_world(WorldOptions(validation=0, test=0, **options), "train")
        self.faults, self.stubborn, self.known = faults, stubborn, known
        write_lines(folder / "corpus.jsonl", self.world.article_rows(triples=False))
        write_lines(folder / "triples.jsonl", self.world.article_rows(triples=True))
        self.roles = dict(zip(load_question_prompts().texts.values(), MAX_TOKENS))
        self.facts = {normalize_answer(title): entity.facts for title, entity in self.world.entities.items()}

    def reply(self, messages):
        """The reply to a chat, by the role of its system prompt; a fault is drawn by the text of the prompt."""
        role, text = self.roles[messages[0]["content"]], messages[1]["content"]
        if role == RECALL_ROLE:
            question = text.removeprefix("Question: ")
            return self.answer(question) if random.Random(question).random() < self.known else "unknown"
        if role == READ_ROLE:
            passages, _, question = text.partition("\n\nQuestion: ")
            blocks = passages.removeprefix("Passages:\n").split("\n\n")
            return self.answer(question, {normalize_answer(one.split("\n")[0]) for one in blocks})
        chance = random.Random(text)
        wrong = chance.random() < self.faults and (len(messages) == 2 or chance.random() < self.stubborn)
        return self.word(text, chance.choice(FAULTS) if wrong else "")

    def word(self, text, fault):
        """The reply to a draft: a question with each `<predicate>` in brackets, by which `answer` reads it again."""
        facts, kind = _FACT.findall(text), re.match(r"Kind: (\w+)(?: \((\w+))?", text)
        (one, predicate, _), last = facts[0], facts[-1]
        if kind[1] == "chain":
            phrase = one
            for _, name, _ in facts:
                phrase = f"the <{name}> of {phrase}"
            question = f"What is {phrase}?"
        elif kind[2] == "yes":
            question = f"Have {one} and {last[0]} one <{predicate}>?"
        else:
            question = f"Which has the {kind[2]} <{predicate}>: {one} or {last[0]}?"
        subqueries = [f"What is the {name} of {subject}?" for subject, name, _ in facts]
        if fault == "answer":
            question = f"Is {last[2]} the {predicate} of {one}?"
        elif fault == "start":
            question = question.replace(one, "it")
        elif fault == "copied":
            question = f"{question[:-1]}, knowing that {text.splitlines()[-1]}?"
        elif fault == "short":
            subqueries.pop()
        elif fault == "subquery":
            subqueries[-1] = f"Is it {last[2]}?"
        if fault in ("not json", "no question"):
            return "I can't." if fault == "not json" else '{"question": ""}'
        return "Sure:\n```json\n" + json.dumps({"question": question, "subqueries": subqueries}) + "\n```"

    def answer(self, question, shown=None):
        """What the facts of the entities with these titles say; of the whole world without."""
        facts = self.facts if shown is None else {name: self.facts[name] for name in shown & self.facts.keys()}

        def value(name, predicate):
            return facts.get(normalize_answer(name), {}).get(predicate)

        if match := re.fullmatch(r"Have (.*) and (.*) one <(.*)>\?", question):
            values = [value(match[n], match[3]) for n in (1, 2)]
            return "unknown" if None in values else "Yes." if values[0] == values[1] else "No."
        if match := re.fullmatch(r"Which has the (\w+) <(.*)>: (.*) or (.*)\?", question):
            found = {name: value(name, match[2]) for name in (match[3], match[4])}
            if None in found.values():
                return "unknown"
            number = {name: float("".join(filter(str.isdigit, text))) for name, text in found.items()}
            return (min if match[1] == "smaller" else max)(number, key=number.get)
        predicates, rest = [], question.removeprefix("What is ").removesuffix("?")
        while match := _LINK.fullmatch(rest):
            predicates.append(match[1])
            rest = match[2]
        for predicate in reversed(predicates):
            if rest is not None:
                rest = value(rest, predicate)
        return rest or "It cannot be determined from the passages."
