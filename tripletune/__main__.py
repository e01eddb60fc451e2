"""The `tripletune` command: every program of the package under one name."""

import argparse
import os
import runpy
import sys

PROGRAMS = {
    "build passages": ("data_builders.documents.build", "passages of documents: Markdown, PDF, HTML, DOCX, tables"),
    "build subq": ("data_builders.hotpotqa_subq", "HotpotQA-SUBQ from questions and a teacher"),
    "build questions": ("data_builders.questions", "questions over your own corpus, made and checked by a teacher"),
    "build pairs": ("data_builders.text_to_triples", "text-to-triples pairs"),
    "build trajectories": ("data_builders.trajectories", "chats of a teacher in a loop, for distillation"),
    "build corpus": ("data_builders.corpus", "passages of benchmark files, for retrieval"),
    "build world": ("data_builders.world.build", "questions about a fictional world"),
    "data": ("data_builders", "look at a data set: stats, validate, peek; read released records"),
    "train": ("train", "train a task: ras, text-to-triples, cirag-distill, … (`tripletune train` lists them)"),
    "iterate": ("recipes.expert_iteration", "train a student on its own best runs, round after round"),
    "ray": ("recipes.ray_corpus", "label questions, extract triples and embed a corpus on a Ray cluster"),
    "ask": ("eval.ask", "answer a question with a system and show every step, or a file of questions"),
    "serve": ("serve", "answer questions over HTTP as a model of OpenAI's API, with a page to watch"),
    "rag": ("rag", "extract triples of a corpus, index it"),
    "eval": ("eval", "run systems on tasks, compare and report"),
    "checkpoints": ("checkpoints", "export, verify and merge trained models"),
    "ledger": ("models.llm.programs ledger", "look after stored replies of language models"),
    "batch": ("models.llm.programs batch", "submit and fetch calls of a Batch service"),
    "doctor": ("doctor", "what is installed, which devices there are, what is missing and what to do"),
    "demo": ("recipes.demo", "data, training, evaluation, export and one answer on two CPU cores"),
}


def usage(group: str = "") -> str:
    """The list of programs in `group`."""
    rows = "\n".join(f"  {name:22} {about}" for name, (_, about) in PROGRAMS.items() if name.startswith(group))
    return f"usage: tripletune PROGRAM [OPTIONS]\n\n{rows}\n\n`tripletune PROGRAM --help` shows its options.\n"


def main() -> None:
    """Run the program that the command line names; an unknown name ends it with exit code 2."""
    words = sys.argv[1:] if "_ARGCOMPLETE" not in os.environ else _words_before_tab()
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in PROGRAMS and len(words) >= length:
            module, *first = PROGRAMS[name][0].split()
            sys.argv = [f"tripletune {name}", *first, *words[length:]]
            runpy.run_module(f"tripletune.{module}", run_name="__main__", alter_sys=True)
            return
    if words == ["--version"]:
        from tripletune.models.program import code_version, versions

        found = {"tripletune": " ".join(code_version().values()), "python": sys.version.split()[0]}
        rows = found | versions(("torch", "transformers"))
        sys.stdout.writelines(f"{name} {version}\n" for name, version in rows.items())
        return
    if not [word for word in words if word not in ("-h", "--help", "build")]:
        sys.stdout.write(usage("build" if "build" in words else ""))
        return
    from tripletune.models.options import nearest

    hint = nearest(" ".join(words[:2]), PROGRAMS) or nearest(words[0], PROGRAMS)
    sys.stderr.write(f"error: there is no program {' '.join(words[:2])}{hint}\n\n{usage()}")
    sys.exit(2)


def _words_before_tab() -> list[str]:
    """The words before the tab key where they name a program, whose parser completes them; else they are, here."""
    import argcomplete

    _, _, _, (_, *words), _ = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    programs = dict(PROGRAMS)
    if words[:1] == ["train"]:
        from tripletune.models.program import names_in

        tasks = [name.replace("_", "-") for name in names_in("tripletune.train.tasks")]
        programs = dict.fromkeys((f"train {task}" for task in tasks), programs["train"])
    name = next((name for name in (" ".join(words[:2]), *words[:1]) if name in programs), "")
    # How many words of the line are the program's name; one that begins with its own name, as `ledger`, reads it again.
    count = len(name.split()) - (" " in programs[name][0]) if name else len(words)
    os.environ["_ARGCOMPLETE"] = str(1 + count)
    if not name:
        parser, known = argparse.ArgumentParser(add_help=False), [one.split() for one in programs]
        following = {one[len(words)] for one in known if one[: len(words)] == words and len(one) > len(words)}
        parser.add_argument("program", choices=sorted(following))
        argcomplete.autocomplete(parser)
    return words


if __name__ == "__main__":
    main()
