"""The program `tripletune ask`: one question with every step (`rag/ask.py`), or a file of questions (`eval/ask.py`).

A file of questions runs as in `tripletune eval run`, without gold answers: the same command continues a stopped run and
asks failed questions again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.program import run_program
from tripletune.rag.costs import PRICE_HELP, read_prices
from tripletune.rag.system_options import ManyQuestionsOptions, SystemOptions, add_system_arguments, teacher_of


def _build_parser(many_questions: bool) -> CommandParser:
    """The command line; `many_questions` adds what only a file of questions needs.

    With one question these options would have no effect, so they are unknown then.
    """
    parser = CommandParser(
        prog="tripletune ask",
        description="Answer one question and show every step, or all questions of a file.",
        others="an option of the system, for example max_passages=10; repeatable",
        example='tripletune ask "Who wrote it?" --model runs/demo/export --corpus mine --triples triples.jsonl\n'
        "  tripletune ask --questions questions.jsonl --output runs/answers --llm openai:NAME --corpus mine …",
    )
    add = parser.add_argument
    add("question", nargs="?", help="one question, in quotes")
    add("--json", action="store_true", help="print the answer as one JSON object, with sources, triples and cost")
    group = parser.add_argument_group("many questions")
    group.add_argument("--questions", metavar="FILE",
        help="answer all questions of a file: JSON lines, or a .txt file with one question per line")  # fmt: skip
    group.add_argument("--output", metavar="DIR",
        help="folder for answers.jsonl; the same command continues and asks failed questions again")  # fmt: skip
    if many_questions:
        add_arguments(group, ManyQuestionsOptions, only=("limit", "concurrency", "max_failed"))
    group = add_system_arguments(parser)
    group.add_argument("--price", action="append", default=[], metavar="IN,OUT", help=PRICE_HELP)
    return parser


def _answer(args: argparse.Namespace) -> int | None:
    """Answer one question, or a file of questions, and print or write the answers; return the exit code, None for 0."""
    asks_one = args.question is not None and args.questions is None and args.output is None
    asks_many = args.question is None and args.questions is not None and args.output is not None
    if not asks_one and not asks_many:
        raise ValueError("give one question, or --questions FILE with its --output DIR")
    teacher = teacher_of(args)
    if asks_many:
        from tripletune.eval.ask import answer_questions_of_file

        return answer_questions_of_file(args, teacher)
    # Imported here, since `--help` and a wrong command line need no index and no client of a model.
    from tripletune.rag.ask import ask_question

    ask_question(args.question, from_arguments(SystemOptions, args), teacher, read_prices(args.price), args.json)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, with the exit codes of `tripletune eval run`."""
    words = sys.argv[1:] if argv is None else argv
    flags = {word.partition("=")[0] for word in words}
    shows_options = bool(flags & {"--help", "-h"}) or "_ARGCOMPLETE" in os.environ
    args = _build_parser(many_questions="--questions" in flags or shows_options).parse_args(words)
    stopped = "stopped; the answers are kept, run the same command again to continue"
    return run_program(lambda: _answer(args), stopped=stopped)


if __name__ == "__main__":
    sys.exit(main())
