"""TH-RAG's graph, with a subtopic for each article and a topic for each kind, and the labels that a question needs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.models.llm import Message


def _extract(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The statements of an article."""
    title = messages[-1]["content"].removeprefix("Title: ").split("\n", 1)[0]
    article, kind = oracle.world.articles[title], oracle.world.entities[title].kind
    labels = {"subtopic": f"about {title}", "main_topic": kind}
    return json.dumps(
        [
            {
                "triple": triple.as_list(),
                "sentence": article.sentences[article.sentence_of[triple.predicate]],
                "subject": labels,
                "object": {"subtopic": f"{triple.predicate} of {title}", "main_topic": kind},
            }
            for triple in article.triples
        ],
        ensure_ascii=False,
    )


def _topics(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The kinds of the articles that the question needs."""
    hops = oracle.hops(oracle.question(messages[-1]["content"].rpartition("Question: ")[2]))
    kinds = dict.fromkeys(oracle.world.entities[hop.triple.subject].kind for hop in hops)
    return json.dumps({"topics": list(kinds)})


def _subtopics(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """Those that are listed of the articles that the question needs."""
    listed, _, text = messages[-1]["content"].rpartition("Question: ")
    wanted = [f"about {hop.triple.subject}" for hop in oracle.hops(oracle.question(text))]
    return json.dumps({"subtopics": [one for one in wanted if f"\n- {one}\n" in listed]}, ensure_ascii=False)


def _answer(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The answer, where sentences and passages hold every gold fact."""
    shown, _, text = messages[-1]["content"].rpartition("\n\nQuestion: ")
    question = oracle.question(text)
    hops = oracle.hops(question)
    known = [hop.stands_in(shown) or f"[{hop.triple.subject}] {hop.sentence}\n" in f"{shown}\n" for hop in hops]
    return question.answer if all(known) else "Insufficient information"


REPLIES = {"extract": _extract, "topics": _topics, "subtopics": _subtopics, "answer": _answer}
