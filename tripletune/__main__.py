"""The `tripletune` command: every program of the package under one name."""

import os
import sys
from collections.abc import Collection, Sequence

PROGRAMS = {
    "build passages": ("data_builders.documents.build", "split documents into passages: Markdown, PDF, HTML, DOCX, …"),
    "build subq": ("data_builders.subq", "make HotpotQA-SUBQ records from questions and a teacher"),
    "build questions": ("data_builders.questions", "make questions about your own corpus, checked by a teacher"),
    "build open-questions": (
        "data_builders.questions.open_questions",
        "make open questions about a whole corpus, for judges of long answers",
    ),
    "build pairs": ("data_builders.text_to_triples", "make text-to-triples pairs"),
    "build trajectories": ("data_builders.trajectories.build", "collect a teacher's chats in a loop, for distillation"),
    "build corpus": ("data_builders.corpus", "collect the passages of benchmark files, for retrieval"),
    "build world": ("data_builders.world.build", "make questions about a fictional world"),
    "data": ("data_builders", "count, validate, peek into, split, adapt and push data sets"),
    "train": ("train", "train a task: chat, ras, text-to-triples, … (`tripletune train` lists them)"),
    "own-documents": ("recipes.own_documents", "train a model for your documents, step by step: passages to export"),
    "iterate": ("recipes.expert_iteration", "train a student on its own best runs, in several rounds"),
    "ray": ("recipes.ray_corpus", "label questions, extract triples and embed a corpus on a Ray cluster"),
    "ask": ("ask", "answer a question and show every step, or answer a file of questions"),
    "serve": ("serve", "answer questions over an OpenAI-compatible HTTP API, with a page to watch"),
    "rag": ("rag", "extract the triples of a corpus, and index a corpus"),
    "eval": ("eval", "run systems on tasks, compare runs and write reports"),
    "checkpoints": ("checkpoints", "export, verify, merge, convert and push trained models"),
    "ledger": ("llm.programs ledger", "stats of stored calls of language models; verify, import, export them"),
    "batch": ("llm.programs batch", "status of calls in files for a Batch service; import its replies"),
    "config-schema": ("config_schema", "write the JSON Schema of YAML files, for editors that complete and check them"),
    "doctor": ("doctor", "show what is installed, which devices exist, what is missing and how to add it"),
    "demo": ("recipes.demo", "--quick: one question, in seconds; else make data, train, evaluate, export on two cores"),
}


def usage(group: str = "") -> str:
    """Return the usage text with the programs whose name begins with `group`."""
    lines = [f"  {name:22} {about}" for name, (_, about) in PROGRAMS.items() if name.startswith(group)]
    rows = "\n".join(lines)
    return f"usage: tripletune PROGRAM [OPTIONS]\n\n{rows}\n\n`tripletune PROGRAM --help` shows its options.\n"


def main() -> None:
    """Run the program that the command line names; exit with code 2 if there is no such program.

    Only the named program is imported, as the first word of a command line must not cost seconds. The program reads
    `sys.argv` as if it had been started by itself.
    """
    if "_ARGCOMPLETE" in os.environ:
        words = _words_before_tab()
    else:
        words = sys.argv[1:]
    name = _program_of(words, PROGRAMS)
    if name:
        import runpy

        # Some programs read their own name again, such as "llm.programs ledger".
        module, *own_words = PROGRAMS[name][0].split()
        sys.argv = [f"tripletune {name}", *own_words, *words[len(name.split()) :]]
        runpy.run_module(f"tripletune.{module}", run_name="__main__", alter_sys=True)
    elif words == ["--version"]:
        _show_versions()
    elif set(words) <= {"-h", "--help", "build"}:
        sys.stdout.write(usage("build" if "build" in words else ""))
    else:
        from tripletune.core.options import nearest

        asked = " ".join(words[:2])
        groups = {name.split()[0]: name for name in PROGRAMS}
        hint = nearest(asked, PROGRAMS) or nearest(words[0], groups)
        sys.stderr.write(f"error: there is no program {asked}{hint}\n\n{usage()}")
        sys.exit(2)


def _program_of(words: Sequence[str], programs: Collection[str]) -> str:
    """The program that the first words of a command line name; "" if there is none."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in programs:
            return name
    return ""


def _show_versions() -> None:
    """Print the versions that a report of a fault needs."""
    from tripletune.core.program import code_version, versions

    rows = {"tripletune": " ".join(code_version().values()), "python": sys.version.split()[0]}
    rows |= versions(("torch", "transformers"))
    sys.stdout.writelines(f"{name} {version}\n" for name, version in rows.items())


def _words_before_tab() -> list[str]:
    """Return the words before the tab key; complete them here unless they name a program with its own parser.

    The shell calls this program for each tab key. argcomplete reads in `_ARGCOMPLETE` how many words belong to the name
    of the program, and completes the words after them with the program's parser.
    """
    import argparse

    import argcomplete

    _, _, _, (_, *words), _ = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    modules = {name: module for name, (module, _) in PROGRAMS.items()}
    if words[:1] == ["train"]:
        from tripletune.core.plugins import names_in

        tasks = names_in("tripletune.train.tasks")
        modules = {f"train {task.replace('_', '-')}": modules["train"] for task in tasks}
    name = _program_of(words, modules)
    # The words before those that are completed: the name of the program, or all words if they name none.
    count = len(name.split()) if name else len(words)
    if name and " " in modules[name]:
        # This program reads the last word of its name again, such as `ledger`.
        count -= 1
    os.environ["_ARGCOMPLETE"] = str(1 + count)
    if not name:
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("program", choices=_next_words(words, modules))
        argcomplete.autocomplete(parser)
    return words


def _next_words(words: Sequence[str], programs: Collection[str]) -> list[str]:
    """The words that may follow the words of an incomplete name of a program."""
    following = set()
    for program in programs:
        names = program.split()
        if names[: len(words)] == words and len(names) > len(words):
            following.add(names[len(words)])
    return sorted(following)


if __name__ == "__main__":
    main()
