"""IRCoT: retrieval interleaved with a chain of thought (Trivedi et al., 2023).

The question is searched first. Then the model adds one thought at a time, which is the next query, until a thought
holds the answer. Where the paper leaves a choice: a thought that was searched before ends the loop; a prompt has at
most 15 distinct passages (the paper's number). As in the paper, a reader then answers from all passages;
`last_thought=yes` reads the answer from the last thought, which saves a call.
"""

from __future__ import annotations

from dataclasses import dataclass

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import one_line
from tripletune.core.options import setting
from tripletune.llm.reading.answers import ANSWER_PHRASE
from tripletune.llm.reading.lines import ABBREVIATION, lines_of, unquoted
from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, prompt_files, show_passages
from tripletune.rag.search.retrievers import split_sentences
from tripletune.rag.systems import System, Tools
from tripletune.rag.systems._rounds import Move, RoundOptions, Rounds, announced_answer
from tripletune.rag.systems.ppr import PageRank, PprOptions, prompt_digests

_own_prompt_digests = prompt_files("ircot", READER, names=("ircot", READER))


@dataclass(frozen=True, slots=True)
class IRCoTOptions(RoundOptions):
    """Settings of a run; see `RoundOptions`."""

    last_thought: bool = setting(False, "use the answer in the last thought; no: a reader answers")
    graph: bool = setting(False, "search by PageRank over triples: HippoRAG with IRCoT (GEAR, tables 2, 3)")
    synonyms: float | None = setting(0.8, "with graph: minimum cosine of two names of one thing, as in ppr", above=0)

    def answers_in_loop(self) -> bool:
        """See `RoundOptions.answers_in_loop`; usually a reader answers."""
        return self.last_thought and RoundOptions.answers_in_loop(self)


async def ircot(question: str, search: str, tools: Tools, options: IRCoTOptions) -> Trace:
    """Answer one question with IRCoT; see `System.run`.

    Each round shows all passages found so far and all thoughts, and the model writes one more thought, which is the
    next search. A thought with "So the answer is" ends the loop.
    """
    rounds = Rounds("ircot", question, search, tools, options)
    if options.graph:
        rounds.retriever = PageRank("ircot", tools, _ppr_options(options), rounds.llm, rounds.trace)
    thoughts: list[str] = []
    move: Move | None = Move(query=search)
    while move is not None and not move.answer:
        await rounds.search(move.query)
        earlier = "\n".join(["Thoughts so far:", *thoughts]) if thoughts else "There are no thoughts yet."
        user = f"{show_passages(rounds.shown)}\n\nQuestion: {one_line(question)}\n\n{earlier}"
        move = await rounds.next_move("think", rounds.chat(user), _read_thought)
        if move is not None:
            thoughts.append(move.text)
    rounds.trace.details["thoughts"] = thoughts
    answer = ""
    if move is not None and options.last_thought:
        answer = move.answer
    return await rounds.finish(answer)


def _read_thought(text: str) -> Move:
    """Read the first sentence of a reply, or the answer that its line announces, or the line after a single sentence.

    Other text is dropped: it was written without a search for the first sentence.
    """
    lines = [line._replace(text=unquoted(line.text)) for line in lines_of(text) if line.text]
    while len(lines) > 1 and lines[0].text.endswith(":") and not ANSWER_PHRASE.search(lines[0].text):
        lines = lines[1:]  # "Here is the next thought:"
    if not lines:
        raise UnusableReply("empty_thought", "There is no thought: write the next one, as one sentence.")
    thought = _first_sentence(lines[0].text)
    is_one_sentence = thought == " ".join(lines[0].text.split())
    earlier = ""
    for number, line in enumerate(lines[:2] if is_one_sentence else lines[:1]):
        announced = announced_answer(lines, number)
        if announced is not None:
            return Move(answer=announced.answer, text=f"{earlier}{announced.words} {announced.answer}")
        earlier = f"{line.text} "
    return Move(query=thought, text=thought)


def _first_sentence(line: str) -> str:
    """The first sentence of a line; a period of an abbreviation ("the U.S. He …") is not taken for its end."""
    first, *others = split_sentences(line)
    for sentence in others:
        if not ABBREVIATION.search(first):
            break
        first = f"{first} {sentence}"
    return first


def _ppr_options(options: IRCoTOptions) -> PprOptions:
    """The options of the search by PageRank: HippoRAG 2's defaults, but for the options that IRCoT has itself."""
    return PprOptions(synonyms=options.synonyms, repairs=options.repairs)


def _prompt_digests(options: IRCoTOptions) -> dict[str, str]:
    """Digests of the prompts for `System.files`: IRCoT's, and with `graph` also those of the search by PageRank."""
    digests = dict(prompt_digests(_ppr_options(options))) if options.graph else {}
    return digests | dict(_own_prompt_digests(options))


SYSTEM = System(
    name="ircot",
    run=ircot,
    needs_triples=lambda options: options.graph,
    needs_reranker=lambda options: options.graph and options.synonyms is not None,
    searches_triples=lambda options: options.graph,
    searches_both=True,
    options=IRCoTOptions,
    model="llm",
    files=_prompt_digests,
)
