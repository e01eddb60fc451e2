"""ReAct: thoughts alternate with the actions `Search[...]` and `Finish[...]` (Yao et al., 2023).

After every search, a turn shows its passages. Where the paper leaves a choice: a repeated search, or a search beyond
the limit, ends the loop, and the reader answers from all passages (in the paper there is no answer).
"""

from __future__ import annotations

import re

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import one_line
from tripletune.llm.reading.lines import unquoted, without_emphasis
from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, prompt_files, show_passages
from tripletune.rag.systems import System, Tools
from tripletune.rag.systems._rounds import Move, RoundOptions, Rounds

_LINE = re.compile(r"^\W*action\b", re.IGNORECASE | re.MULTILINE)
_ACTION = re.compile(r"\b(search|finish)\s*(?:\d+\s*)?\[((?:[^\[\]\n]|\[[^\[\]\n]*\])*)\]", re.IGNORECASE)


async def react(question: str, search: str, tools: Tools, options: RoundOptions) -> Trace:
    """Answer one question with ReAct; see `System.run`.

    The chat grows by a thought with an action, and by the passages that the action's search found, with the number of
    searches left.
    """
    rounds = Rounds("react", question, search, tools, options)
    chat = rounds.chat(f"Question: {one_line(question)}")
    move = await rounds.next_move("act", chat, _read_action)
    while move is not None and not move.answer:
        passages = await rounds.search(move.query)
        left = options.max_rounds - len(rounds.trace.steps)
        budget = f"Searches left: {left}" if left else "No search is left: finish now, with your best answer."
        chat += [
            {"role": "assistant", "content": move.text},
            {"role": "user", "content": f"Observation\n{show_passages(passages)}\n\n{budget}"},
        ]
        move = await rounds.next_move("act", chat, _read_action)
    return await rounds.finish(move.answer if move is not None else "")


def _read_action(text: str) -> Move:
    """Read the first action of a reply; the reply is cut after it, since observations there are invented."""
    line = _LINE.search(text)  # a thought may name an action
    action = _ACTION.search(text, line.end() if line else 0)
    argument = unquoted(without_emphasis(action[2])) if action else ""
    if action is None or not argument:
        raise UnusableReply("no_action", "There is no action: end with Search[what to search] or Finish[the answer].")
    text_with_action = text[: action.end()]
    if action[1].lower() == "search":
        return Move(query=argument, text=text_with_action)
    return Move(answer=argument, text=text_with_action)


SYSTEM = System(
    name="react",
    run=react,
    options=RoundOptions,
    model="llm",
    files=prompt_files("react", READER, names=("react", READER)),
)
