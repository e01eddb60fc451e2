"""First-thought prefix: a teacher's first decision begins with what it thought about the question alone.

An option beyond the paper, after work on distilling agents (Kang et al., 2025, which CIRAG cites for its loss): a
teacher that acts at once reasons less well than one that has begun to reason. A server can't be made to go on from half
a reply, so the thought is shown in the first prompt, and put in front of the thought that comes back. Students get no
prefix: a trajectory has the prompt without it and the decision with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tripletune.models.llm.client import Message
from tripletune.models.llm.replies import without_thoughts
from tripletune.rag.systems.cirag.options import FIRST_THOUGHT_PROMPT, CiragOptions
from tripletune.rag.systems.prompt_files import PromptSet
from tripletune.rag.systems.question_client import QuestionClient

FIRST_THOUGHT_ROLE = "cirag.first_thought"
_BEFORE, _AFTER = "\n\n[[## first_thought ##]]\n", "\n\nBegin your thought with this and go on from it."
_THOUGHT = re.compile(r"\[\[\s*#{1,4}\s*thought\s*#{0,4}\s*\]\]:?\s*", re.IGNORECASE)


async def first_thought(question: str, llm: QuestionClient, prompts: PromptSet, options: CiragOptions) -> str:
    """What the integrator thinks about the question before it has seen a fact, on one line.

    Args:
        question: The main question x.
        llm: The integrator.
        prompts: Has the prompt `cirag_first_thought`.
        options: Limits.
    """
    messages = prompts.chat(FIRST_THOUGHT_PROMPT, f"Query: {question}")
    sampling = llm.up_to(options.max_integration_tokens)
    completion = await llm.chat(messages, role=FIRST_THOUGHT_ROLE, sampling=sampling)
    # No marker may be read in it.
    return " ".join(without_thoughts(completion.text).split()).replace("[[", "[ [")


def show_thought(messages: Sequence[Message], thought: str) -> list[Message]:
    """The first prompt with the thought below its candidates."""
    *before, last = messages
    return [*before, {"role": last["role"], "content": f"{last['content']}{_BEFORE}{thought}{_AFTER}"}]


def hide_thought(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Undo `show_thought`.

    Returns:
        The chat without the thought, and the thought; empty where none was shown.
    """
    hidden: list[Message] = []
    thought = ""
    for turn in messages:
        content, found, rest = turn["content"].partition(_BEFORE)
        if turn["role"] == "user" and found:
            thought, _, later = rest.partition(_AFTER)
            turn = {"role": "user", "content": content + later}
        hidden.append(turn)
    return hidden, thought


def begin_with(reply: str, thought: str) -> str:
    """A reply whose thought begins with the first thought, as if the model had gone on from it."""
    text = without_thoughts(reply).strip()
    if not text or not thought:
        return reply
    marker = _THOUGHT.search(text)
    if marker is None:
        return f"[[## thought ##]]\n{thought}\n\n{text}"
    rest = text[marker.end() :]
    if " ".join(rest.split()).startswith(thought):
        return text
    return f"{text[: marker.end()]}{thought} {rest}"
