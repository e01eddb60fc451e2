"""Turn structured inputs into token ids and graphs, in training and in inference.

Token order (RAS, sections 3.4 and D.2): BOS and opening of the user turn, ONE graph placeholder, instruction, history
and question, closing of the turn, label, end of sequence. Marker strings are ordinary text. If a prompt is too long,
triples of its oldest step are dropped first, but never the instruction or the question; the graph keeps all triples.
Within a step, the triples of the lowest-ranked passage are dropped first.

With `prompt_order: history_first` (ours) the history comes before placeholder, instruction and question, so that all
prompts of a question share a prefix.

With `prompt_order: interleaved` (ours) a question is one growing sequence: both instructions, the question, and for
each step the planner's reply, the step's triples and one graph token for the step. A prompt that had to be shortened
no longer continues the previous prompt.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from tripletune.core.calls import PromptTooLong
from tripletune.core.data.graph_settings import PromptSettings
from tripletune.core.data.records import ModelInput, Record, Step
from tripletune.core.data.rendering import load_instructions, render, render_growing, render_parts
from tripletune.core.files import read_json, write_json
from tripletune.models.control_tokens import template_ids, text_ids
from tripletune.models.graph_llm.graphs import SampleGraph, build_graph
from tripletune.models.local.chat import TEMPLATE_OPTIONS, dated_template
from tripletune.models.run_folders import PROCESSOR

GRAPH_TOKEN = "<|graph|>"
# Private-use characters mark instruction and body in a chat template, since no text contains them.
_INSTRUCTION = "\ue000instruction\ue001"
_BODY = "\ue000body\ue001"


class PromptFrame(NamedTuple):
    """The texts of a prompt format around instruction and body.

    Attributes:
        opening: Text before the instruction.
        middle: Text between instruction and body.
        closing: Text after the body, up to the beginning of the reply.
    """

    opening: str
    middle: str
    closing: str


class ShortenedPrompt(NamedTuple):
    """A prompt that fits.

    Attributes:
        input_ids: The prompt's tokens.
        dropped: Number of triples, or of words of raw text, that it lost.
    """

    input_ids: list[int]
    dropped: int


class EncodedLabel(NamedTuple):
    """A label as a model learns it.

    Attributes:
        ids: Its tokens with the end-of-sequence token, unless it was truncated.
        marker_tokens: How many of the first tokens spell the action marker of a planning record; else 0.
    """

    ids: list[int]
    marker_tokens: int


class QuestionTooLong(PromptTooLong, ValueError):
    """A question is too long for the model, even without evidence."""


@dataclass(kw_only=True)
class ProcessorSettings(PromptSettings):
    """Settings of a processor, saved beside its tokenizer; the instructions are INST_Plan and INST_Ans.

    With `prompt_format` "plain" a prompt is instruction, blank line, body and line break; "llama2" writes [INST]
    instruction, blank line, body [/INST]. With `prompt_text` "joined", instruction, blank line and body are one text
    for the tokenizer, as in the authors' code (framework/models/graphllm.py): tokenizers that begin each text with a
    space (LLaMA-2) then write no spaces at the blank line.

    Attributes:
        loop: Options of the loop as the training data had them, by the names of `LoopOptions`.
    """

    planning_instruction: str
    answering_instruction: str
    use_graph: bool = True
    graph_pooling: str = "subgraphs"
    loop: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """A prompt as a model reads it.

    Attributes:
        input_ids: The prompt's tokens.
        graphs: The graph of each placeholder.
        truncated_triples: Number of triples that were dropped to fit.
        truncated_words: Number of words of raw text that were dropped to fit.
    """

    input_ids: list[int]
    graphs: list[SampleGraph[str]]
    truncated_triples: int = 0
    truncated_words: int = 0


class GraphLLMProcessor:
    """Render, tokenise and truncate inputs for a `GraphLLM`; `use_graph` adds a placeholder to the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ProcessorSettings) -> None:
        """Add the placeholder to the tokenizer, and tokenise once what all prompts have in common.

        The frame of the prompt format is cut at instruction and body, and each piece is tokenised alone, as the pieces
        of a prompt are: tokenised together, the last character of a piece could join the first of the next.
        """
        self.tokenizer = tokenizer
        self.settings = settings
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{tokenizer.name_or_path}: no end-of-sequence token: set one in tokenizer_config.json")
        self.graph_token_id: int | None = None
        # The tokens of a graph: its placeholder, or none.
        self._graph_tokens: list[int] = []
        if settings.use_graph:
            tokenizer.add_tokens([GRAPH_TOKEN], special_tokens=True)
            self.graph_token_id = int(tokenizer.convert_tokens_to_ids(GRAPH_TOKEN))
            self._graph_tokens = [self.graph_token_id]
        frame = self._prompt_frame()
        self._opening = template_ids(tokenizer, frame.opening)
        self._closing = template_ids(tokenizer, frame.closing)
        if settings.prompt_text == "joined":
            if settings.prompt_order != "instruction_first":
                raise ValueError(
                    f"data.prompt_text joined: data.prompt_order is {settings.prompt_order}, which places its parts "
                    "itself: set prompt_order to instruction_first, or leave prompt_text out"
                )
            if frame.middle.strip():
                raise ValueError(
                    "data.prompt_text joined: the chat template writes its own tokens between instruction and body: "
                    "set data.prompt_format to plain or llama2, or leave prompt_text out"
                )
        self._middle = frame.middle
        middle = template_ids(tokenizer, frame.middle)
        self._instructions = {"planning": settings.planning_instruction, "answering": settings.answering_instruction}
        # The tokens before the body of a prompt, by task.
        self._heads: dict[str, list[int]] = {}
        for task, instruction in self._instructions.items():
            if settings.prompt_order == "interleaved":
                # One sequence serves both tasks; its graphs follow the steps.
                head = [*self._opening, *self.encode_text("\n".join(self._instructions.values()))]
            else:
                head = [*self._opening, *self._graph_tokens, *self.encode_text(instruction)]
            self._heads[task] = head + middle

    def encode_input(self, sample: ModelInput, evidence: str | None = None) -> EncodedInput:
        """Encode prompt and graphs of an input; `evidence` overrides the setting `evidence`.

        Only the prompt is shortened: a graph takes one token, however many triples it has.
        """
        evidence = evidence or self.settings.evidence
        prompt = self.prompt(sample, evidence)
        triples = words = 0
        if len(prompt) > self.settings.max_input_tokens:
            prompt, dropped = self._shorten_prompt(sample, evidence)
            if evidence == "triples":
                triples = dropped
            else:
                words = dropped
        return EncodedInput(prompt, self._graphs_of_placeholders(sample), triples, words)

    def _graphs_of_placeholders(self, sample: ModelInput) -> list[SampleGraph[str]]:
        """The graph of each placeholder: one for all steps, or one per step in an interleaved prompt.

        A `graph_of` of the sample replaces the steps in the graph but not in the prompt, to test what the graph
        contributes.
        """
        if not self.settings.use_graph:
            return []
        steps = sample.steps if sample.graph_of is None else sample.graph_of
        pooling = self.settings.graph_pooling
        if self.settings.prompt_order == "interleaved":
            return [build_graph(steps[number : number + 1], pooling) for number in range(len(sample.steps))]
        return [build_graph(steps, pooling)]

    def encode_label(self, record: Record, long_labels: Literal["error", "truncate"] = "error") -> EncodedLabel:
        """Return the label's tokens, and how many of them spell the action marker.

        The label of a planning record begins with the marker; the label of an answering record has no marker.

        Args:
            long_labels: What to do with a label of more than `max_label_tokens`: "error", or "truncate" without an
                end-of-sequence token, which would teach the model to stop inside a sentence. (The authors' code adds
                the token: framework/models/graphllm.py.)
        """
        ids = [*self.encode_text(record.label), int(self.tokenizer.eos_token_id)]
        limit = self.settings.max_label_tokens
        if len(ids) > limit and long_labels == "error":
            raise ValueError(
                f"record {record.id!r}: the label has {len(ids)} tokens, but max_label_tokens is {limit}: raise "
                "max_label_tokens, or set data.long_labels to truncate or skip"
            )
        ids = ids[:limit]
        if record.task != "planning":
            return EncodedLabel(ids, 0)
        # A token may join the marker's end with the text after it, so the common prefix is counted.
        marker_tokens = 0
        # Both end where the shorter one does: a truncated label may end inside the marker.
        for marker_token, label_token in zip(self.encode_text(record.action.value), ids, strict=False):
            if marker_token != label_token:
                break
            marker_tokens += 1
        return EncodedLabel(ids, marker_tokens)

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Write the tokenizer and the settings; transformers' trainer passes `kwargs`, which have no effect here."""
        self.tokenizer.save_pretrained(folder)
        write_json(Path(folder) / PROCESSOR, dataclasses.asdict(self.settings))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> GraphLLMProcessor:
        """Read a folder written by `save_pretrained`."""
        from tripletune.models.loading import load_tokenizer

        return cls(load_tokenizer(folder), ProcessorSettings(**read_json(Path(folder) / PROCESSOR)))

    @classmethod
    def create(cls, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> GraphLLMProcessor:
        """Create a processor; the default instructions are those of `tripletune/prompts/models`.

        Args:
            settings: Fields of `ProcessorSettings`; a wrong name is a `TypeError` of that dataclass.
        """
        instructions = {f"{task}_instruction": text for task, text in load_instructions().items()}
        return cls(tokenizer, ProcessorSettings(**instructions | settings))

    def without_graph(self) -> GraphLLMProcessor:
        """Return a processor without graph placeholder, to evaluate a model that was trained with it (RAS, table 2)."""
        return GraphLLMProcessor(self.tokenizer, dataclasses.replace(self.settings, use_graph=False))

    def prompt(self, sample: ModelInput, evidence: str) -> list[int]:
        """The whole prompt, without truncation, in the token order of the setting `prompt_order` (see the module).

        Training and inference both call this, so a model always reads the form that it was trained on. Parts are
        tokenised apart where the order allows it, so that common beginnings have equal tokens.

        Args:
            sample: The question and its steps.
            evidence: What a step shows: its triples, its text, or only the graph.

        Returns:
            Token ids, with placeholders for graph tokens.
        """
        if self.settings.prompt_text == "joined":
            text = f"{self._instructions[sample.task]}{self._middle}{render(sample, evidence)}"
            return [*self._opening, *self._graph_tokens, *self.encode_text(text), *self._closing]
        if self.settings.prompt_order == "instruction_first":
            return [*self._heads[sample.task], *self.encode_text(render(sample, evidence)), *self._closing]
        history, question = render_parts(sample, evidence)
        if self.settings.prompt_order == "interleaved":
            prompt = [*self._heads[sample.task], *self.encode_text(question), *self._closing]
            for piece in render_growing(sample, evidence):
                # None stands for the graph of a step.
                prompt += self._graph_tokens if piece is None else self.encode_text(piece)
            return prompt
        prompt = list(self._opening)
        if history:
            prompt += self.encode_text(f"{history}\n\n")
        prompt += self._graph_tokens
        prompt += self.encode_text(f"{self._instructions[sample.task]}\n\n{question}")
        return prompt + self._closing

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a text, without control tokens."""
        return text_ids(self.tokenizer, [text])[0]

    def _prompt_frame(self) -> PromptFrame:
        """The frame of the setting `prompt_format`.

        A chat template may write the BOS token itself, so only the other formats add it here.
        """
        prompt_format = self.settings.prompt_format
        if prompt_format == "auto":
            prompt_format = "chat" if getattr(self.tokenizer, "chat_template", None) else "plain"
        bos = self.tokenizer.bos_token or ""
        if prompt_format == "plain":
            return PromptFrame(bos, "\n\n", "\n")
        if prompt_format == "llama2":
            return PromptFrame(f"{bos}[INST] ", "\n\n", " [/INST]")
        return self._chat_frame()

    def _chat_frame(self) -> PromptFrame:
        """The frame of the chat template, found by rendering two marks in the places of instruction and body.

        The instruction is the system turn, if the template has one and the order allows it; else both are one user
        turn. A template that writes a mark twice or not at all, or changes it, is refused.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "data.prompt_format chat: the tokenizer lacks a chat template; set plain, or use a chat model"
            )
        system = [{"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": _BODY}]
        user = [{"role": "user", "content": f"{_INSTRUCTION}\n\n{_BODY}"}]
        # With the history first, the instruction belongs to the user's turn.
        ways = [user] if self.settings.prompt_order == "history_first" else [system, user]
        template = dated_template(self.tokenizer.get_chat_template())
        for messages in ways:
            try:
                text = self.tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=False, add_generation_prompt=True, **TEMPLATE_OPTIONS
                )
            except jinja2.TemplateError:
                continue  # many templates reject a system message, and the sandbox rejects code
            if text.count(_INSTRUCTION) == 1 and text.count(_BODY) == 1:
                opening, _, after_instruction = text.partition(_INSTRUCTION)
                middle, _, closing = after_instruction.partition(_BODY)
                return PromptFrame(opening, middle, closing)
        raise ValueError("the tokenizer's chat template changes the text of messages; set data.prompt_format to plain")

    def _shorten_prompt(self, sample: ModelInput, evidence: str) -> ShortenedPrompt:
        """Drop triples (or words of raw text) until the prompt fits: first those of the oldest step, from its end.

        Raises:
            QuestionTooLong: The prompt does not fit even without any of them.
        """
        limit = self.settings.max_input_tokens
        # What can be dropped of each step.
        units = [_droppable_units(step, evidence) for step in sample.steps]

        def prompt_without(count: int) -> list[int]:
            """The prompt without `count` units: all of the first steps' go before one of a later step goes.

            Units are triples or pieces of text, and of a step the last ones go first. Sub-queries stay, since they say
            what was asked before.
            """
            steps = []
            for step, step_units in zip(sample.steps, units, strict=True):
                dropped = min(count, len(step_units))
                # What is left to drop of the steps after this one.
                count -= dropped
                kept = step_units[: len(step_units) - dropped]
                if not step_units:
                    steps.append(step)
                elif evidence == "triples":
                    steps.append(dataclasses.replace(step, triples=tuple(kept)))
                else:
                    steps.append(dataclasses.replace(step, text="".join(kept)))
            return self.prompt(dataclasses.replace(sample, steps=tuple(steps)), evidence)

        # Dropping more never makes a prompt longer, so bisection finds the smallest number that fits.
        most = sum(len(step_units) for step_units in units)
        count = bisect_left(range(most), True, key=lambda count: len(prompt_without(count)) <= limit)
        prompt = prompt_without(count)
        if len(prompt) > limit:
            raise QuestionTooLong(
                f"question {sample.question[:80]!r}: without any evidence the prompt still has "
                f"{len(prompt) - limit} tokens more than max_input_tokens={limit} allows: raise max_input_tokens"
            )
        return ShortenedPrompt(prompt, count)


def _droppable_units(step: Step, evidence: str) -> list[Any]:
    """What a prompt that is too long can lose of a step: its triples, or words of its text; nothing of the graph.

    The units are `Triple`s with the evidence "triples", else texts that joined are the step's text.
    Words of more than 20 characters are dropped in pieces, since some scripts have no spaces.
    """
    if evidence == "triples":
        return list(step.triples)
    if evidence == "text":
        return re.findall(r"\s*\S{1,20}", step.text)
    return []
