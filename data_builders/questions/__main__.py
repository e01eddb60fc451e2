"""The command line of `tripletune build questions`.

Exit codes: 0 done; 1 the teacher can't be reached (run again to continue), or more than a tenth of its replies were
unusable; 2 bad input; 3 calls wait for a batch's replies; 130 interrupted.

Tested in `tests/data_builders/questions/test_build.py`.
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
from tripletune.data_builders.questions.build import build_questions
from tripletune.data_builders.questions.facts import Draft
from tripletune.data_builders.questions.material import Material
from tripletune.data_builders.questions.options import QuestionBuildOptions
from tripletune.data_builders.questions.teacher import (
    MAX_TOKENS,
    READ_ROLE,
    RECALL_ROLE,
    WORD_ROLE,
    load_question_prompts,
    prompt_name,
    reading_calls,
    wording_text,
)
from tripletune.llm.backends import LLMOptions, add_chat_model, open_client
from tripletune.llm.prices import BATCH, cost_lines, prices_per_million

# Estimates of a dry run: tokens of a reply by role, and characters of a question.
_REPLY_TOKENS = {WORD_ROLE: 80, READ_ROLE: 6, RECALL_ROLE: 6}
_QUESTION_CHARACTERS = 110


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
    stopped = "interrupted; replies received so far are in the ledger, run the command again to continue"
    return run_program(lambda: _run_command(parsed), stopped=stopped)


def _run_command(parsed: argparse.Namespace) -> None:
    """Run a parsed command. The ledger lies beside the output, since a build that starts again replaces the folder."""
    options = from_arguments(QuestionBuildOptions, parsed)
    if parsed.dry_run:
        _show_costs(options, parsed.price, parsed.tokenizer, parsed.teacher == BATCH)
        return
    ledger = parsed.teacher_ledger or f"{parsed.output.rstrip('/')}.ledger.sqlite"
    llm = from_arguments(LLMOptions, parsed, "teacher", ledger=ledger)
    check_new(parsed.output, [ledger])
    numbers = build_questions(options, parsed.output, parsed.overwrite, partial(open_client, llm), llm.sampling(1))
    print(f"{parsed.output}: {listed(numbers)}")


def _show_costs(options: QuestionBuildOptions, price: str | None, tokenizer: str | None, batch: bool) -> None:
    """Print calls, tokens and cost without a call: of one draft per question, and of as many as `--tries` allows.

    Args:
        options: The options of the build, whose drafts are really made.
        price: Dollars per million tokens read and written, as text; None shows no dollars.
        tokenizer: Counts tokens; None divides characters by four.
        batch: Whether calls go through a Batch API, at half the price.
    """
    # A mistyped price is said before the drafts are made, which takes minutes on a large corpus.
    prices = prices_per_million(price, batch)
    material = Material(options)
    drafts: list[Draft] = []
    for split, number in options.wanted().items():
        drafts += islice(material.drafts(split), number)
    stages = _calls_and_tokens(drafts, material, tokenizer)
    if tokenizer:
        counted = f"with the tokenizer of {tokenizer}"
    else:
        counted = "as characters / 4 (no --tokenizer)"
    wanted = sum(options.wanted().values())
    print(f"{len(drafts):,} drafts; nothing was sent")
    if len(drafts) < wanted:
        print(f"{wanted:,} questions are wanted, and the triples give no more drafts: add documents, or lower --count")
    print("\n".join(cost_lines(stages, prices, counted, batch, once="one draft per question", tries=options.tries)))
    print(f"A rejected draft is replaced by another draft, up to {options.tries:g} drafts per question (--tries).")


def _calls_and_tokens(drafts: Sequence[Draft], material: Material, tokenizer: str | None) -> dict[str, list[float]]:
    """Numbers of calls, input tokens and output tokens by role; without a tokenizer, a token is four characters.

    The question does not exist yet, so a text of usual length stands for it.
    """
    count = token_counter(tokenizer) if tokenizer else lambda text: len(text) // 4
    prompts = load_question_prompts(material.options.prompts)
    question = "q" * _QUESTION_CHARACTERS
    stages: dict[str, list[float]] = {role: [0, 0, 0] for role in MAX_TOKENS}
    for draft in drafts:
        passages = material.passages_of(draft)
        turns = [(WORD_ROLE, wording_text(draft, passages))]
        for call in reading_calls(question, passages):
            turns.append((call.role, call.text))
        for role, text in turns:
            numbers = stages[role]
            numbers[0] += 1
            numbers[1] += count(f"{prompts.texts[prompt_name(role)]}\n{text}")
            numbers[2] += _REPLY_TOKENS[role]
    return stages


if __name__ == "__main__":
    sys.exit(main())
