"""The `tripletune` command: every program of the package under one name."""

import argparse
import os
import runpy
import sys

PROGRAMS = {
    "build passages": ("data_builders.documents.build", "split documents into passages: Markdown, PDF, HTML, DOCX, …"),
    "build subq": ("data_builders.subq", "make HotpotQA-SUBQ records from questions and a teacher"),
    "build questions": ("data_builders.questions", "make questions about your own corpus, checked by a teacher"),
    "build pairs": ("data_builders.text_to_triples", "make text-to-triples pairs"),
    "build trajectories": ("data_builders.trajectories.build", "collect a teacher's chats in a loop, for distillation"),
    "build corpus": ("data_builders.corpus", "collect the passages of benchmark files, for retrieval"),
    "build world": ("data_builders.world.build", "make questions about a fictional world"),
    "data": ("data_builders", "show, check and push a data set; read released records"),
    "train": ("train", "train a task: ras, text-to-triples, cirag-distill, … (`tripletune train` lists them)"),
    "iterate": ("recipes.expert_iteration", "train a student on its own best runs, in several rounds"),
    "ray": ("recipes.ray_corpus", "label questions, extract triples and embed a corpus on a Ray cluster"),
    "ask": ("ask", "answer a question and show every step, or answer a file of questions"),
    "serve": ("serve", "answer questions over an OpenAI-compatible HTTP API, with a page to watch"),
    "rag": ("rag", "extract the triples of a corpus, and index a corpus"),
    "eval": ("eval", "run systems on tasks, compare runs and write reports"),
    "checkpoints": ("checkpoints", "export, verify, merge, convert and push trained models"),
    "ledger": ("llm.programs ledger", "show, check, import and export stored calls of language models"),
    "batch": ("llm.programs batch", "submit and fetch calls of a Batch service"),
    "doctor": ("doctor", "show what is installed, which devices exist, what is missing and how to add it"),
    "demo": ("recipes.demo", "make data, train, evaluate, export and answer a question on two CPU cores"),
}


def usage(group: str = "") -> str:
    """Return the usage text with the programs in `group`."""
    rows = "\n".join(f"  {name:22} {about}" for name, (_, about) in PROGRAMS.items() if name.startswith(group))
    return f"usage: tripletune PROGRAM [OPTIONS]\n\n{rows}\n\n`tripletune PROGRAM --help` shows its options.\n"


def main() -> None:
    """Run the program that the command line names; exit with code 2 if there is no such program."""
    words = sys.argv[1:] if "_ARGCOMPLETE" not in os.environ else _words_before_tab()
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in PROGRAMS and len(words) >= length:
            module, *first = PROGRAMS[name][0].split()
            sys.argv = [f"tripletune {name}", *first, *words[length:]]
            runpy.run_module(f"tripletune.{module}", run_name="__main__", alter_sys=True)
            return
    if words == ["--version"]:
        from tripletune.core.program import code_version, versions

        found = {"tripletune": " ".join(code_version().values()), "python": sys.version.split()[0]}
        rows = found | versions(("torch", "transformers"))
        sys.stdout.writelines(f"{name} {version}\n" for name, version in rows.items())
        return
    if not [word for word in words if word not in ("-h", "--help", "build")]:
        sys.stdout.write(usage("build" if "build" in words else ""))
        return
    from tripletune.core.options import nearest

    hint = nearest(" ".join(words[:2]), PROGRAMS) or nearest(words[0], PROGRAMS)
    sys.stderr.write(f"error: there is no program {' '.join(words[:2])}{hint}\n\n{usage()}")
    sys.exit(2)


def _words_before_tab() -> list[str]:
    """Return the words before the tab key; complete them here unless they name a program with its own parser."""
    import argcomplete

    _, _, _, (_, *words), _ = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    programs = dict(PROGRAMS)
    if words[:1] == ["train"]:
        from tripletune.core.plugins import names_in

        tasks = [name.replace("_", "-") for name in names_in("tripletune.train.tasks")]
        programs = dict.fromkeys((f"train {task}" for task in tasks), programs["train"])
    name = next((name for name in (" ".join(words[:2]), *words[:1]) if name in programs), "")
    # The number of words of the program's name, less one for programs that read their own name again, such as `ledger`.
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
