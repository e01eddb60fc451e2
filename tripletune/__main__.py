"""The `tripletune` command: every program of the package under one name."""

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
    "demo": ("recipes.demo", "data, training, evaluation, export and one answer on two CPU cores"),
}


def usage(group: str = "") -> str:
    """The list of programs whose names begin with `group`."""
    rows = "\n".join(f"  {name:22} {about}" for name, (_, about) in PROGRAMS.items() if name.startswith(group))
    return f"usage: tripletune PROGRAM [OPTIONS]\n\n{rows}\n\n`tripletune PROGRAM --help` shows its options.\n"


def main() -> None:
    """Run the program that the command line names; an unknown name ends it with exit code 2."""
    words = sys.argv[1:]
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in PROGRAMS and len(words) >= length:
            module, *first = PROGRAMS[name][0].split()
            sys.argv = [f"tripletune {name}", *first, *words[length:]]
            runpy.run_module(f"tripletune.{module}", run_name="__main__", alter_sys=True)
            return
    if not [word for word in words if word not in ("-h", "--help", "build")]:
        sys.stdout.write(usage("build" if "build" in words else ""))
        return
    from tripletune.models.options import nearest

    hint = nearest(" ".join(words[:2]), PROGRAMS) or nearest(words[0], PROGRAMS)
    sys.stderr.write(f"error: there is no program {' '.join(words[:2])}{hint}\n\n{usage()}")
    sys.exit(2)


if __name__ == "__main__":
    main()
