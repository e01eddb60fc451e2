"""System prompts of loops and builders, and the client for one question.

Our prompts lie in `tripletune/prompts`, one folder per kind of caller; a user's folder may replace them.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tripletune.core.calls import (
    CallError,
    Completion,
    LLMClient,
    Message,
    PromptTooLong,
    RoleClients,
    Sampling,
    SetupError,
    UnusableReply,
    with_sample_seed,
)
from tripletune.core.files import own_or_packaged, read_prompt

logger = logging.getLogger(__name__)
T = TypeVar("T")
_ROOT = Path(__file__).parents[2]
# Number of characters of a call's key that a trace stores.
CALL_NAME = 16
# Prefixes of tallies: calls by role, and replies that could not be read.
CALLS = "calls."
UNREADABLE = "unreadable."
# The role under which a Graph-LLM's unreadable plans are noted.
TRAINED_PLANNER = "plan"
# Characters of such a reply that a trace keeps.
_EXAMPLE = 200
_READING = {"entities", "extract", "joint", "triples"}
# If a prompt is too long, the next attempt keeps this share of its evidence.
_KEPT = 0.85
# Evidence of so few characters is not shortened further.
_LEAST = 100


class CallTrace(Protocol):
    """What a trace of a question notes of its calls; `tripletune.rag.Trace` does, which imports this package.

    Attributes:
        details: JSON values by name; `QuestionClient` says what it adds.
        cached: By role, calls and tokens that came from the ledger.
    """

    details: dict[str, Any]
    cached: dict[str, list[int]]

    def count(self, completion: Completion) -> None:
        """Add a call and its tokens to the sums of the question."""

    def tally(self, name: str, /) -> None:
        """Add 1 to a tally."""


class AnswerSettings(Protocol):
    """What of `rag.systems.AnswerOptions` the call of an answer depends on."""

    @property
    def max_answer_tokens(self) -> int:
        """Maximum tokens of the reply."""

    @property
    def needs_scores(self) -> bool:
        """Whether the log-probabilities of the reply are needed."""


class PromptError(ValueError):
    """The prompts of a run can't be read, so every question would fail."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """System prompts and their files by name; our files have paths relative to the project's root."""

    texts: Mapping[str, str]
    files: Mapping[str, str]

    def chat(self, name: str, user: str) -> list[Message]:
        """A chat with the system prompt `name` and one user turn."""
        return [{"role": "system", "content": self.texts[name]}, {"role": "user", "content": user}]

    def digests(self) -> dict[str, str]:
        """SHA-256 of each prompt by its name, for settings and cards: another prompt makes other results."""
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.texts.items()}


@lru_cache(maxsize=16)
def load_prompts(
    names: tuple[str, ...], folder: str | Path | None = None, room: str = "systems", home: Path | None = None
) -> PromptSet:
    """Read prompts by name, each from the first place that has it: a user's `folder`, `home`, our folder.

    Args:
        folder: A folder of custom prompts, from the option `prompts`.
        room: The folder in `tripletune/prompts`.
        home: The folder of the prompts of a system from another package, such as `Path(__file__).parent`.

    Raises:
        PromptError: There is no such folder, it holds no prompt or one with another name, or a prompt is missing,
            empty or unreadable.
    """
    # Prompts of ours are named by their path in the project, a user's by the path that was given.
    files = {name: f"tripletune/prompts/{room}/{name}.md" for name in names}
    paths = {name: _ROOT / file for name, file in files.items()}
    if home is not None:
        for name in names:
            path = home / f"{name}.md"
            if path.is_file():
                paths[name] = path
                files[name] = str(path)
    if folder is not None:
        folder = Path(own_or_packaged(folder))
        if not folder.is_dir():
            raise PromptError(f"no such folder of prompts: {folder}")
        known = ", ".join(f"{name}.md" for name in names)
        several = ""
        if room == "systems":
            several = "; of several systems, each has its own folder: --set SYSTEM.prompts=FOLDER"
        own_prompts = sorted(folder.glob("*.md"))
        if not own_prompts:
            raise PromptError(f"{folder} itself holds no prompt; the prompts are {known}")
        for path in own_prompts:
            if path.stem not in paths:
                raise PromptError(f"{path}: there is no prompt with this name here; the prompts are {known}{several}")
            paths[path.stem] = path
            files[path.stem] = str(path)
    missing = [f"{name}.md" for name, path in paths.items() if not path.is_file()]
    if home is not None and missing:
        raise PromptError(
            f"{home} lacks the prompt {', '.join(missing)}: an installed package needs its prompts as package data, "
            "for example in pyproject.toml under [tool.setuptools.package-data]"
        )
    try:
        texts = {name: read_prompt(path) for name, path in paths.items()}
    except (OSError, ValueError) as error:
        raise PromptError(str(error)) from error
    return PromptSet(texts, files)


NO_PROMPTS = PromptSet({}, {})


def reads_passages(role: str) -> bool:
    """Whether a role's calls read a passage of the corpus, independently of a question."""
    return bool(set(role.split(".")[1:2]) & _READING)


class QuestionClient(LLMClient):
    """An `LLMClient` for one question; it need not be closed, because the inner client belongs to the run.

    Args:
        client: The client of the run.
        trace: The question's `tripletune.rag.Trace`, to which calls and tokens are added. Its tallies count the calls
            of each role (`calls.<role>`), the replies that were cut off (`cut_off.<role>`) and the replies that could
            not be read, with repaired ones among them (`unreadable.<role>`). Its details hold under "tokens" the prompt
            and completion tokens of each role (and tokens read from and written to the provider's cache), under "read"
            key and tokens of each call that reads a passage, under "calls" the first characters of the ledger keys, and
            under "unreadable" the reason and the beginning of each role's first unreadable reply. Its `cached` counts
            calls and tokens that came from the ledger.
        question_id: The question's id, for the ledger's uses.
        sampling: How replies are sampled; each call sets its own maximum length.
        system: The system that makes the calls, for the roles of `ask`; its prompts are named `<system>_<call>`.
        prompts: The prompts of the system, by name.
        repairs: Maximum repair turns for an unreadable reply.
        shorten: Shortens a chat that is too long for the model, or returns None, so that the call fails; the tallies
            count shortened prompts.
        scored_role: The role of the answer, if its log-probabilities are needed; "": they are not. The first call to
            the model of this role then asks for them, too, so that nothing else is paid where there are none.
    """

    def __init__(
        self,
        client: LLMClient,
        trace: CallTrace,
        question_id: str = "",
        sampling: Sampling | None = None,
        *,
        system: str = "",
        prompts: PromptSet = NO_PROMPTS,
        repairs: int = 1,
        shorten: Callable[[Sequence[Message]], list[Message] | None] | None = None,
        scored_role: str = "",
    ) -> None:
        self.model = client.model
        self.behind = (client,)
        self.enforces_schemas = client.enforces_schemas
        self.system = system
        self.prompts = prompts
        # The user turns of the last answered chat, on one line.
        self.sent: str | None = None
        self._client = client
        self._trace = trace
        self._question_id = question_id
        self._repairs = repairs
        self._sampling = sampling or Sampling()
        self._shorten = shorten
        # Emptied by the first call that asks for log-probabilities.
        self._scored_role = scored_role

    def up_to(self, max_tokens: int) -> Sampling:
        """The sampling of a call whose reply has at most `max_tokens` tokens."""
        return replace(self._sampling, max_tokens=max_tokens)

    def for_answer(self, options: AnswerSettings) -> Sampling:
        """The sampling of a call whose whole reply is an answer."""
        return replace(self._sampling, max_tokens=options.max_answer_tokens, scored=options.needs_scores)

    async def ask(
        self, call: str, asked: str | Sequence[Message], parse: Callable[[str], T], max_tokens: int,
        repaired: Counter[str] | None = None, schema: str | None = None,
    ) -> T:  # fmt: skip
        """Call the model and parse the reply, with repair turns; see `llm.replies.ask`.

        The role of the call is `<system>.<call>`. `asked` is the chat, or the user turn that follows the system prompt
        `<system>_<call>`. `repaired` counts the reasons of repair turns. A reply that was cut off is read as far as it
        goes, as the papers' limits on replies ask for. `schema` is a JSON schema that the server keeps replies to.
        """
        if isinstance(asked, str):
            asked = self.prompts.chat(f"{self.system}_{call}", asked)
        role = f"{self.system}.{call}"

        def read(reply: str) -> T:
            """Parse a reply; one that can't be read is noted, also if a repair follows."""
            try:
                return parse(reply)
            except UnusableReply as error:
                self.note_unreadable(role, reply, error)
                raise

        # Imported here: systems are classes with options first, and only a loop reads replies.
        from tripletune.llm.replies import ask

        return await ask(
            self,
            asked,
            read,
            role=role,
            sampling=replace(self.up_to(max_tokens), schema=schema),
            repairs=self._repairs,
            repaired=repaired,
            parts=True,
        )

    def note_unreadable(self, role: str, reply: str, error: UnusableReply) -> None:
        """Count a reply that could not be read, and keep the question's first as an example; see `trace`."""
        note_unreadable(self._trace, role, reply, error.reason)

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat; see `LLMClient.chat`. The default of `question_id` is this question's id.

        A prompt that is too long is shortened step by step (`shorten`) until it fits, or nothing is left to leave out.
        What was sent at last is noted in `sent`, and the trace says that it was shortened.

        Raises:
            SetupError: The answer's log-probabilities are needed, and the first reply has none.
        """
        sampling = with_sample_seed(sampling or self._sampling)
        must_be_scored = self._answers(role)
        if must_be_scored:
            self._scored_role = ""
            sampling = replace(sampling, scored=True)
        question_id = question_id or self._question_id
        sent = messages
        while True:
            try:
                completion = await self._client.chat(sent, role=role, sampling=sampling, question_id=question_id)
                break
            except PromptTooLong:
                shorter = self._shorten(sent) if self._shorten else None
                if shorter is None:
                    raise
                sent = shorter
        user_turns = [turn["content"] for turn in sent if turn["role"] == "user"]
        self.sent = " ".join(" ".join(user_turns).split())
        if sent is not messages:
            self._trace.tally(f"shortened.{role}")
        self._record_in_trace(completion, role)
        if must_be_scored and completion.text and completion.scores is None:
            raise SetupError(
                f"{self.model} sends no log-probabilities, which abstain compares: set confidence to support, or to "
                "agreement with answer_samples, for example 5"
            )
        return completion

    def _answers(self, role: str) -> bool:
        """Whether log-probabilities are needed, and the model of a role also answers."""
        if not self._scored_role or not isinstance(self._client, RoleClients):
            return bool(self._scored_role)
        return self._client.of_role(role) is self._client.of_role(self._scored_role)

    def _record_in_trace(self, completion: Completion, role: str) -> None:
        """Add a call to the trace; see `trace` of this class.

        The keys of the details, and the order of the counts under "tokens", are those that costs, reports and
        trajectories read in stored results (`rag/costs.py`, `data_builders/trajectories`).
        """
        self._trace.count(completion)
        self._trace.tally(f"{CALLS}{role}")
        # Sorted, because the order in which concurrent calls are answered must not change a result.
        insort(self._trace.details.setdefault("calls", {}).setdefault(role, []), completion.key[:CALL_NAME])
        counts = [completion.prompt_tokens, completion.completion_tokens]
        if completion.cache_read or completion.cache_written:
            counts += [completion.cache_read, completion.cache_written]
        _add_to_sums(self._trace.details.setdefault("tokens", {}).setdefault(role, [0, 0]), counts)
        if reads_passages(role):
            insort(
                self._trace.details.setdefault("read", {}).setdefault(role, []), [completion.key[:CALL_NAME], *counts]
            )
        if completion.cached:
            _add_to_sums(self._trace.cached.setdefault(role, [0, 0, 0]), [1, *counts])
        if not completion.is_whole:
            self._trace.tally(f"cut_off.{role}")


def note_unreadable(trace: CallTrace, role: str, reply: str, reason: str) -> None:
    """Count in a trace a reply that could not be read, and keep the first of its role as an example."""
    trace.tally(f"{UNREADABLE}{role}")
    examples = trace.details.setdefault("unreadable", {})
    examples.setdefault(role, [reason, reply.strip()[:_EXAMPLE]])


async def ask_of_passage(
    client: QuestionClient, call: str, user: str, parse: Callable[[str], T], max_tokens: int, issues: Counter[str]
) -> T | None:
    """Make a call about one of many passages by `QuestionClient.ask`; return None if no reply can be used.

    Args:
        issues: Counts `refused` and `repairs` by role; the client's trace counts replies that could not be read.
    """
    # Here, so that the help of commands does not import the ledger.
    from tripletune.llm.ledger_client import RetriesExhausted

    role = f"{client.system}.{call}"
    repaired = Counter[str]()
    try:
        return await client.ask(call, user, parse, max_tokens, repaired)
    except UnusableReply:
        return None
    except (RetriesExhausted, SetupError):
        raise
    except CallError as error:
        # Otherwise, a content filter that refuses a passage would fail every question that retrieves it.
        logger.warning("%s: a passage gets no reply: %s", role, error)
        issues[f"refused.{role}"] += 1
    finally:
        issues[f"repairs.{role}"] += repaired.total()
    return None


def less_evidence(messages: Sequence[Message]) -> list[Message] | None:
    """Cut 15 % of the longest user turn: before the line of the question, or at the end if this line comes first.

    This drops the worst evidence. None is returned if almost no evidence is left.
    """
    user_turns = [place for place, turn in enumerate(messages) if turn["role"] == "user"]
    place = max(user_turns, key=lambda place: len(messages[place]["content"]))
    text = messages[place]["content"]
    evidence, mark, question = text.rpartition("\nQuestion:")
    if not mark or text.startswith("Question:"):
        evidence, mark, question = text, "", ""
    kept = evidence[: int(_KEPT * len(evidence))].rstrip()
    if len(kept) <= _LEAST:
        return None
    turn: Message = {"role": "user", "content": f"{kept}\n{mark}{question}" if mark else kept}
    return [*messages[:place], turn, *messages[place + 1 :]]


def _add_to_sums(sums: list[int], counts: Sequence[int]) -> None:
    """Add counts to sums in place; either may be longer."""
    sums[:] = map(sum, zip_longest(sums, counts, fillvalue=0))
