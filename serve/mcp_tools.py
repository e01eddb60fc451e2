"""The tools of an MCP server: ask a system, search passages, look up the facts about a name (`tripletune serve --mcp`).

Results have text and structured content of the same fields. Errors reach the client as `ToolError`, since the text of
any other exception does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel, Field

from tripletune.core import libraries
from tripletune.core.calls import CallError
from tripletune.core.data.passages import Passage
from tripletune.core.options import no_option
from tripletune.rag import Trace
from tripletune.rag.answering import OpenSystem
from tripletune.rag.search.opened import open_searches, search_embedder
from tripletune.rag.search.retrievers import Retriever
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.system_options import SystemOptions
from tripletune.rag.triple_store import StoredTriples
from tripletune.serve.limits import Door, refusal_of
from tripletune.serve.models import Shelf, sources_of
from tripletune.serve.protocol import progress_of

# Rows whose names are shown if none is the one that was asked for.
_SIMILAR = 5
_READS = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
_Question = Annotated[str, Field(min_length=1, description="the question, with all that it refers to")]
_System = Annotated[str, Field(description="the loop that searches and answers")]
_Query = Annotated[str, Field(min_length=1, description="words or a sentence to search for")]
_Count = Annotated[int, Field(ge=1, le=50, description="how many to return")]
_Name = Annotated[str, Field(min_length=1, description="name of a person, place or thing, as the documents write it")]


class CitedPassage(BaseModel):
    """A passage, with its document and page if the corpus has them."""

    id: str
    title: str
    text: str
    document: str | None = None
    page: int | str | None = None


class CitedFact(BaseModel):
    """A triple, with the ids of the passages that state it."""

    subject: str
    predicate: str
    object: str
    passages: list[str]


class CitedAnswer(BaseModel):
    """An answer, the passages that it was written from, and the facts that were found on the way.

    `stop_reason` says why the search ended: "sufficient" if the model had enough, else a limit.
    """

    answer: str
    sources: list[CitedPassage]
    facts: list[CitedFact]
    stop_reason: str


class FoundPassages(BaseModel):
    """Passages, best first."""

    passages: list[CitedPassage]


class EntityFacts(BaseModel):
    """Facts that name an entity as subject or object, their number in all documents, and their passages.

    Without any, `similar` has names of facts whose words are alike.
    """

    facts: list[CitedFact]
    total: int
    sources: list[CitedPassage]
    similar: list[str] = []


class _Server(MCPServer[Any]):
    """A server that refuses arguments that a tool does not have, which the library drops."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Call a tool; raises a `ToolError` for an argument that it does not have."""
        arguments_of = {tool.name: tool.input_schema["properties"] for tool in await self.list_tools()}
        for argument in arguments:
            if name in arguments_of and argument not in arguments_of[name]:
                raise ToolError(no_option(f"tool {name!r}", argument, arguments_of[name]))
        return await super().call_tool(name, arguments, context)


class ToolServer:
    """The tools over the systems of a server.

    Args:
        door: Limits the questions at the same time and their seconds.
        passages: The search of passages; None without a corpus.
        triples: The search of triples; None without triples that were extracted before.
    """

    def __init__(self, shelf: Shelf, door: Door, passages: Retriever | None, triples: TripleIndex | None) -> None:
        self._shelf = shelf
        self._door = door
        self._passages = passages
        self._triples = triples
        self._loading: asyncio.Task[None] | None = None

    def make_server(self) -> MCPServer[Any]:
        """Make the server, with the tools that this corpus allows."""
        systems = ", ".join(self._shelf.loops)
        about = (
            "Questions about a collection of documents. Answers name their sources: cite them. "
            f"The systems of `ask` are {systems}; without `system`, {self._default_system} answers."
        )
        server = _Server("tripletune", version=libraries.installed("tripletune"), instructions=about)
        server.add_tool(self.ask, annotations=_READS)
        if self._passages is not None:
            server.add_tool(self.search, annotations=_READS)
        if self._triples is not None:
            server.add_tool(self.facts_about, annotations=_READS)
        return server

    async def run(self) -> None:
        """Serve stdin and stdout until the client closes its end; models load while the first calls wait."""
        self._loading = asyncio.create_task(self._shelf.warm_up())
        try:
            await self.make_server().run_stdio_async()
        finally:
            self._loading.cancel()

    @property
    def _default_system(self) -> str:
        """The system that answers if a call names none: the first of the shelf, which puts RAS first."""
        return next(iter(self._shelf.loops))

    async def ask(self, question: _Question, context: Context[Any], system: _System = "") -> CitedAnswer:
        """Answer a question from the documents, in several searches where one document is not enough.

        Progress has a line for each plan and each search. An empty answer means that none was found.
        """
        name = system or self._default_system
        if name not in self._shelf.loops:
            raise ToolError(f"there is no system {name!r}; the systems are {', '.join(self._shelf.loops)}")
        opened = self._shelf.loops[name]
        with _errors_for_client():
            async with self._door.place():
                if self._loading is not None:
                    await asyncio.shield(self._loading)
                trace = await _answer_with_progress(opened, question, context)
        facts = [CitedFact(**fields) for fields in sources_of(opened, trace)["triples"]]
        shown = [trace.found[key] for key in trace.shown or trace.found if key in trace.found]
        return CitedAnswer(
            answer=trace.answer, sources=_cited_passages(shown), facts=facts, stop_reason=trace.stop_reason
        )

    async def search(self, query: _Query, top_k: _Count = 5) -> FoundPassages:
        """Find the passages of the documents that fit a query best."""
        with _errors_for_client():
            # Without a corpus `make_server` does not offer this tool.
            hits = await cast(Retriever, self._passages).retrieve(query, top_k)
        return FoundPassages(passages=_cited_passages(hit.passage for hit in hits))

    async def facts_about(self, name: _Name, limit: _Count = 20) -> EntityFacts:
        """List the facts (subject, predicate, object) of all documents that name an entity, with their passages."""
        triples = cast(TripleIndex, self._triples)  # else `make_server` does not offer this tool
        similar: dict[str, None] = {}
        passages: dict[str, Passage] = {}
        facts = []
        with _errors_for_client():
            rows = await triples.about(name)
            if not len(rows):
                (ranking,) = await triples.search([name], _SIMILAR)
                for row, _ in ranking:
                    similar |= dict.fromkeys((triples[row].subject, triples[row].object))
            # Triples and passages are read from files, which may fail like the search.
            for row in rows[:limit].tolist():
                stating = [triples.passages[position] for position in triples.passages_of(row).tolist()]
                passages |= {passage.id: passage for passage in stating}
                subject, predicate, object_ = triples[row].as_list()
                ids = [passage.id for passage in stating]
                facts.append(CitedFact(subject=subject, predicate=predicate, object=object_, passages=ids))
        return EntityFacts(
            facts=facts, total=len(rows), sources=_cited_passages(passages.values()), similar=list(similar)
        )


def open_tool_server(shelf: Shelf, door: Door, options: SystemOptions) -> ToolServer:
    """Open the searches of the tools: those of the systems, or if these lack one, their own in the same index."""
    loops = list(shelf.loops.values())
    passages = next((loop.tools.retriever for loop in loops if loop.tools.retriever is not None), None)
    triples = next((loop.tools.triples for loop in loops if loop.tools.triples is not None), None)
    # Triples that a system extracts in its loop are none that could be looked up.
    is_stored = any(isinstance(loop.tools.store, StoredTriples) for loop in loops)
    if options.corpus and (passages is None or (triples is None and is_stored)):
        scratch = loops[0].scratch
        index = Path(options.index or scratch.name)  # type: ignore[union-attr]
        embedder = search_embedder(options) if options.retriever != "bm25" else None
        searches = open_searches(replace(options, triples=options.triples if is_stored else None), index, embedder)
        passages, triples = searches
    return ToolServer(shelf, door, passages, triples)


async def _answer_with_progress(system: OpenSystem, question: str, context: Context[Any]) -> Trace:
    """Answer a question; the client hears of each plan and each search by a line of progress."""
    async with aclosing(system.steps(question)) as steps:
        done = 0
        async for step in steps:
            if isinstance(step, Trace):
                return step
            done += 1
            await context.report_progress(done, message=progress_of(step).line)
    raise CallError(f"{system.system.name} has ended without an answer")


@contextmanager
def _errors_for_client() -> Iterator[None]:
    """Turn the errors of a block into errors whose text the client gets."""
    try:
        yield
    except Exception as error:
        raise ToolError(str(refusal_of(error))) from None


def _cited_passages(passages: Iterable[Passage]) -> list[CitedPassage]:
    """Passages as tools return them; document and page are there only if the corpus has them."""
    sources = []
    for passage in passages:
        place = passage.source or {}
        source = CitedPassage(
            id=passage.id,
            title=passage.label,
            text=passage.text,
            document=str(place["document"]) if "document" in place else None,
            page=place.get("page"),
        )
        sources.append(source)
    return sources
