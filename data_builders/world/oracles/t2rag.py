"""T2RAG's clues, filled from the propositions that are shown, and its answer from resolved clues."""

from __future__ import annotations

from collections.abc import Sequence

from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.models.llm import Message
from tripletune.models.llm.replies import triple_rows
from tripletune.rag.chat_generator import REFUSAL


def _decompose(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """A clue for each hop; what one hop finds is the subject of the hop that reads its article."""
    hops = [hop.triple for hop in oracle.hops(oracle.question(messages[-1]["content"].removeprefix("Question: ")))]
    rows = []
    for number, hop in enumerate(hops):
        earlier = (f"?x{place}" for place in range(number) if hops[place].object == hop.subject)
        rows.append((next(earlier, hop.subject), hop.predicate, f"?x{number}"))
    return "Reasoning: one fact after the other.\nTriples:\n" + "\n".join(" | ".join(row) for row in rows)


def _resolve(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The open clues of which the propositions know an unknown; a clue is read again with what another one gave."""
    clues, _, shown = messages[-1]["content"].partition("\n\nPropositions:\n")
    facts = [tuple(fields) for _, fields in triple_rows(shown.partition("\n\nPassages:\n")[0])]
    opened = dict(triple_rows(clues.partition("\n\nResolved clues:\n")[0]))
    known: dict[str, str] = {}
    filled: dict[str, str] = {}
    for _ in opened:
        for number, fields in opened.items():
            subject, predicate, unknown = (known.get(field, field) for field in fields)
            found = [fact[2] for fact in facts if fact[:2] == (subject, predicate)]
            if found:
                known[fields[2]] = found[0]
                filled[number] = f"[{number}] {subject} | {predicate} | {found[0]}"
            elif subject != fields[0]:
                filled[number] = f"[{number}] {subject} | {predicate} | {unknown}"
    return "\n".join(filled.values()) or "(none)"


def _answer(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The answer, where the clues hold every gold fact."""
    text, _, clues = messages[-1]["content"].removeprefix("Question: ").partition("\n\nClues:\n")
    question = oracle.question(text)
    rows = [fields for _, fields in triple_rows(clues)]
    enough = all(hop.triple.as_list() in rows for hop in oracle.hops(question))
    return f"Answer: {question.answer if enough else REFUSAL}"


REPLIES = {"decompose": _decompose, "resolve": _resolve, "answer": _answer}
