"""Self-Ask: follow-up questions with intermediate answers (Press et al., 2023), each answered from a search.

Where this differs from the paper: the paper's search engine answers follow-up questions, but here the reader answers
them from the retrieved passages. If no search is left, or a follow-up question is repeated, the reader answers the main
question from all passages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import one_line
from tripletune.llm.reading.lines import COMMENT_LABELS, Line, lines_of, unquoted
from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, prompt_files
from tripletune.rag.systems import System, Tools
from tripletune.rag.systems._rounds import Move, RoundOptions, Rounds, announced_answer

# A follow-up question behind other text of its line: "Yes. Follow up: Who?"
_FOLLOW_UP = re.compile(r"follow[ -]?up(?: question)?:[ \t]*(\S[^\n]*)", re.IGNORECASE)


async def self_ask(question: str, search: str, tools: Tools, options: RoundOptions) -> Trace:
    """Answer one question with Self-Ask; see `System.run`.

    Each follow-up question is searched and answered from its passages by a call of its own; the next call reads all
    follow-ups with their answers, but no passages.
    """
    rounds = Rounds("self_ask", question, search, tools, options)
    # The prompt is the question, then two lines per follow-up question.
    asked = f"Question: {one_line(question)}"
    notes: list[str] = []
    move = await rounds.next_move("follow_up", rounds.chat(asked), _read_follow_up)
    while move is not None and not move.answer:
        passages = await rounds.search(move.query)
        answer = one_line(await rounds.answer_by_reader(move.query, passages))
        notes += [f"Follow up: {move.query}", f"Intermediate answer: {answer}"]
        move = await rounds.next_move("follow_up", rounds.chat("\n".join([asked, *notes])), _read_follow_up)
    rounds.trace.details["follow_ups"] = notes
    return await rounds.finish(move.answer if move is not None else "")


def _read_follow_up(text: str) -> Move:
    """Read the first follow-up question or final answer of a reply; later text is dropped."""
    lines = [line for line in lines_of(text) if line.label not in COMMENT_LABELS]
    for number, line in enumerate(lines):
        announced = announced_answer(lines, number)
        if announced is not None:
            return Move(answer=announced.answer, text=text)
        question = _follow_up(line, lines[number + 1 : number + 2])
        if question:
            return Move(query=question, text=text)
    raise UnusableReply(
        "no_follow_up", 'Write one line: "Follow up: " and a question, or "So the final answer is: " and the answer.'
    )


def _follow_up(line: Line, following: Sequence[Line]) -> str:
    """The follow-up question of a line, or of the next one if the line is only the label; "" if there is none."""
    if line.label.startswith("follow"):
        if not line.text and following:
            return unquoted(following[0].text)
        return unquoted(line.text)
    later = _FOLLOW_UP.search(line.text)
    return unquoted(later[1]) if later else ""


SYSTEM = System(
    name="self_ask",
    run=self_ask,
    options=RoundOptions,
    model="llm",
    files=prompt_files("self_ask", READER, names=("self_ask", READER)),
)
