"""Self-Ask: follow-up questions with intermediate answers (Press et al., 2023), each answered from a search.

Where this differs from the paper: the paper's search engine answers follow-up questions, but here the reader answers
them from the retrieved passages. If no search is left, or a follow-up question is repeated, the reader answers the main
question from all passages.
"""

from __future__ import annotations

import re

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import one_line
from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, bare_answer, prompt_files
from tripletune.rag.systems import System, Tools
from tripletune.rag.systems._rounds import Move, RoundOptions, Rounds

_FOLLOW_UP = re.compile(r"follow[ -]?up(?: question)?:[ \t]*(\S[^\n]*)", re.IGNORECASE)
_FINAL = re.compile(r"so the (?:final )?answer is:?\s*([^\s:][^\n]*)", re.IGNORECASE)


async def self_ask(question: str, search: str, tools: Tools, options: RoundOptions) -> Trace:
    """Answer one question with Self-Ask; see `System.run`."""
    rounds = Rounds("self_ask", question, search, tools, options)
    # The prompt is the question, then two lines per follow-up question.
    asked = f"Question: {one_line(question)}"
    notes: list[str] = []
    move = await rounds.move("follow_up", rounds.chat(asked), _read)
    while move is not None and not move.answer:
        passages = await rounds.search(move.query)
        answer = one_line(await rounds.read(move.query, passages))
        notes += [f"Follow up: {move.query}", f"Intermediate answer: {answer}"]
        move = await rounds.move("follow_up", rounds.chat("\n".join([asked, *notes])), _read)
    rounds.trace.details["follow_ups"] = notes
    return await rounds.finish(move.answer if move is not None else "")


def _read(text: str) -> Move:
    """Read the first follow-up question or final answer of a reply; later text is dropped."""
    follow_up = _FOLLOW_UP.search(text)
    final = _FINAL.search(text)
    if final and not (follow_up and follow_up.start() < final.start()):
        answer = bare_answer(final[1]).rstrip(".")
        if answer:
            return Move(answer=answer, text=text)
    if follow_up:
        return Move(query=follow_up[1].strip(), text=text)
    raise UnusableReply(
        "no_follow_up", 'Write one line: "Follow up: " and a question, or "So the final answer is: " and the answer.'
    )


SYSTEM = System(
    name="self_ask",
    run=self_ask,
    options=RoundOptions,
    model="llm",
    files=prompt_files("self_ask", READER, names=("self_ask", READER)),
)
