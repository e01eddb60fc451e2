"""The command line of `tripletune build questions`.

Exit codes: 0 done; 1 the teacher can't be reached (run again to continue), or more than a tenth of its replies were
unusable; 2 bad input; 3 calls wait for a batch's replies; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.files import check_new
from tripletune.core.program import run_program
from tripletune.data_builders.datasets import listed, token_counter
from tripletune.data_builders.questions.build import Material, QuestionBuildOptions, build_questions
from tripletune.data_builders.questions.teacher import (
    MAX_TOKENS,
    WORD_ROLE,
    load_question_prompts,
    reading_calls,
    wording_text,
)
from tripletune.llm.backends import LLMOptions, add_chat_model, open_client
from tripletune.llm.prices import cost_lines

# Estimates: tokens of a wording, tokens of a short answer, characters of a question.
_WORDING, _ANSWER, _QUESTION = 80, 6, 110


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="tripletune build questions",
        description="Make questions over your corpus with a teacher, split by document.",
        example="tripletune build questions --corpus mine --triples mine.triples.sqlite --llm openai:MODEL "
        "--output data/questions",
    )
    add_arguments(parser, QuestionBuildOptions)
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="folder for the questions")
    add("--overwrite", action="store_true", help="replace questions in the output folder")
    add("--dry-run", action="store_true", help="send nothing; show calls and tokens for one draft per question")
    add("--price", metavar="IN,OUT", help="dollars per million tokens read and written, for --dry-run")
    add("--tokenizer", help="count the tokens of --dry-run with this model's tokenizer")
    add_chat_model(parser.add_argument_group("teacher"))
    parsed = parser.parse_args(arguments)
    kept = "interrupted; replies received so far are in the ledger, run the command again to continue"
    return run_program(lambda: _run(parsed), stopped=kept)


def _run(parsed: argparse.Namespace) -> None:
    options = from_arguments(QuestionBuildOptions, parsed)
    if parsed.dry_run:
        return _show(options, parsed.price, parsed.tokenizer)
    ledger = parsed.teacher_ledger or f"{parsed.output.rstrip('/')}.ledger.sqlite"
    llm = from_arguments(LLMOptions, parsed, "teacher", ledger=ledger)
    check_new(parsed.output, [ledger])
    numbers = build_questions(options, parsed.output, parsed.overwrite, partial(open_client, llm), llm.sampling(1))
    print(f"{parsed.output}: {listed(numbers)}")


def _show(options: QuestionBuildOptions, price: str | None, tokenizer: str | None) -> None:
    material, prompts = Material(options), load_question_prompts(options.prompts)
    count = token_counter(tokenizer) if tokenizer else lambda text: len(text) // 4
    stages: dict[str, list[float]] = {role: [0, 0, 0] for role in MAX_TOKENS}
    drafts = [one for part, wanted in options.wanted().items() for one in islice(material.drafts(part), wanted)]
    for draft in drafts:
        calls = [(WORD_ROLE, wording_text(draft, material.of(draft)))]
        for role, text in [*calls, *reading_calls("q" * _QUESTION, material.of(draft))]:
            read = count(f"{prompts.texts[role.replace('.', '_')]}\n{text}")
            for place, more in enumerate((1, read, _WORDING if role == WORD_ROLE else _ANSWER)):
                stages[role][place] += more
    counted = f"with the tokenizer of {tokenizer}" if tokenizer else "as characters / 4 (no --tokenizer)"
    lines = [f"{len(drafts):,} drafts; nothing was sent", *cost_lines(stages, price, counted)]
    lines.append(f"A rejected draft is replaced by another draft, up to {options.tries:g} drafts per question.")
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
