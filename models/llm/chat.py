"""From the turns of a chat to the tokens of a local model's prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from models.llm.client import CallError, Message


class ChatEncoder:
    """A tokenizer with its chat template.

    Args:
        tokenizer: The model's tokenizer.
        model: The model's name, for messages.
        template_options: More arguments of the template, for example {"enable_thinking": False}.
        plain: For base models, which have no template: the turns' texts, with a blank line after each.

    Raises:
        ValueError: the tokenizer has no chat template and `plain` is not set.
    """

    def __init__(
        self, tokenizer: Any, model: str, template_options: Mapping[str, Any] | None = None, plain: bool = False
    ) -> None:
        self.tokenizer, self.model, self.plain = tokenizer, model, plain
        self.template_options = dict(template_options or {})
        if not plain and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"model {model} has no chat template, so it is a base model: name its chat version (often ...-Instruct "
                "or ...-it), or set plain=True to give it the turns' texts as they are"
            )
        self._system_apart = plain or self._takes_system()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The prompt's tokens, up to where the reply begins.

        Raises:
            CallError: the template refuses the turns.
        """
        turns: list[dict[str, Any]] = [dict(message) for message in messages]
        if self.plain:
            text = "".join(f"{turn['content']}\n\n" for turn in turns)
            return list(self.tokenizer(text)["input_ids"])
        if not self._system_apart:
            turns = join_system(turns)
        try:
            text = self._render(turns)
        except jinja2.TemplateError as error:
            roles = ", ".join(str(turn["role"]) for turn in turns)
            raise CallError(f"{self.model}: its chat template refuses the turns {roles}: {error}") from None
        # The template writes the special tokens itself.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, turns: list[dict[str, Any]]) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **self.template_options
            )
        )

    def _takes_system(self) -> bool:
        """Whether the template knows system turns (Gemma's, for one, refuses them)."""
        try:
            self._render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
        except jinja2.TemplateError:
            return False
        return True


def join_system(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The system's texts in front of the first user turn, for templates without a system role."""
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    rest = [dict(turn) for turn in turns if turn["role"] != "system"]
    if system and rest and rest[0]["role"] == "user":
        rest[0]["content"] = "\n\n".join([*system, rest[0]["content"]])
    elif system:
        rest.insert(0, {"role": "user", "content": "\n\n".join(system)})
    return rest
