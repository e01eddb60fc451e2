"""The ASQA and ARC-Easy parts that RAS mixes into HotpotQA-SUBQ (sections 4.1 and C.4).

"We incorporate the subset of Arc-Easy (2,147 samples) and ASQA (3,897 samples) from Self-RAG's training data." What the
paper leaves open is decided so:

- **Answering records alone.** Table 4 counts the parts in the answering column, and appendix C.4 names them as a reason
  why there are more answering records than `[SUFFICIENT]` and `[NO_RETRIEVAL]` labels together. So a question of a
  part gives one answering record and no planning record.
- **History.** Without triples the record is one of direct answering: no step, `[NO_RETRIEVAL]`. With a triple file that
  covers passages of the question (ASQA's knowledge, or the passages in Self-RAG's output) it has one step: q_0 is the
  question itself and the triples are those of all its passages, as in figure 25.
- **The question** is put to the model with the words of its task at evaluation (the roles of table 5): the files
  `prompts/asqa.md` and `prompts/arc_easy.md`. The sub-query is the bare question, as in retrieval.
- **Which questions.** The first ones of the file, as many as asked for. Fewer in the file are taken as they are, and
  the card says how many are missing. Self-RAG's own file (`selfrag/selfrag_train_data`) is where the paper's are from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tripletune.data_builders.hotpotqa_subq.annotations import TripleFile
from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question, UnlabelledQuestion
from tripletune.models.data.records import Action, Record, Step
from tripletune.models.data.triples import Triple

PROMPTS = Path(__file__).parents[1] / "prompts"


@dataclass(frozen=True)
class Part:
    """A part of the mix.

    Attributes:
        count: Questions of it in the paper.
        prompt: The file with the words in which a question is put; `{question}` is the benchmark's own.
    """

    count: int
    prompt: str


# By reader.
PARTS: Mapping[str, Part] = {"asqa": Part(3_897, "asqa.md"), "arc_easy": Part(2_147, "arc_easy.md")}


class PartTeacher:
    """Labels the questions of a part: one answering record each.

    It has the methods of `data_builders.annotations.Teacher` too, but there is no plan to be had from it.

    Args:
        reader: A key of `PARTS`.
        triple_file: JSON lines `{"title", "text", "triples"}` of the questions' passages; None leaves every history
            empty.
        issues: Counts malformed triples of that file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the reader has no part, or the file is malformed.
    """

    def __init__(self, reader: str, triple_file: str | None = None, issues: Counter[str] | None = None) -> None:
        if reader not in PARTS:
            raise ValueError(f"{reader!r} is not a part of the mix; the parts are {', '.join(PARTS)}")
        self.prompt = PROMPTS / PARTS[reader].prompt
        self._template = self.prompt.read_text(encoding="utf-8").strip()
        self._triples = TripleFile(triple_file, issues) if triple_file else None
        given = f"triples of {Path(triple_file).name}" if triple_file else "no triples"
        self.name = f"gold answers, {given}"

    async def records(self, question: Question) -> list[Record]:
        """The one answering record of a question."""
        step = self._step(question)
        return [
            Record(
                id=f"{question.source}:{question.id}:answer",
                question_id=question.id,
                task="answering",
                question=self._template.replace("{question}", question.question),
                action=Action.SUFFICIENT if step else Action.NO_RETRIEVAL,
                steps=(step,) if step else (),
                answers=question.answers,
                source=question.source,
            )
        ]

    async def helpful_documents(self, question: Question) -> list[int]:
        """Never known: a part has answers and no plans."""
        raise UnlabelledQuestion(DropReason.NO_ANNOTATION, "a part of the mix has no plans")

    async def subqueries(self, question: Question, documents: list[int]) -> list[str]:
        """Never known: a part has answers and no plans."""
        raise UnlabelledQuestion(DropReason.NO_ANNOTATION, "a part of the mix has no plans")

    async def triples(self, question: Question, document: int) -> list[Triple]:
        """The triples of one passage, where the triple file covers it."""
        return self._triples.of(question.passages[document]) if self._triples else []

    def _step(self, question: Question) -> Step | None:
        found = [(p, self._triples.of(p)) for p in question.passages] if self._triples else []
        covered = [(passage, triples) for passage, triples in found if triples]
        if not covered:
            return None
        facts = dict.fromkeys(triple for _, triples in covered for triple in triples)
        return Step(question.question, tuple(facts), "\n".join(passage.content for passage, _ in covered))


def open_part(reader: str, annotations: str | None, issues: Counter[str] | None = None) -> PartTeacher:
    """The teacher of a source that is a part; see `PartTeacher` for arguments and errors."""
    return PartTeacher(reader, annotations, issues)


def shortages(parts: Mapping[str, tuple[str, int, int, int]]) -> list[str]:
    """Sentences for the card on parts that hold fewer questions than were asked for.

    Args:
        parts: By source: its reader, the number asked for, the number that gave records and the number left out.
    """
    sentences = []
    for source, (reader, wanted, labelled, left_out) in parts.items():
        reasons = [f"{left_out:,} were left out"] if left_out else []
        reasons += ["its file has no more"] if labelled + left_out < wanted else []
        if labelled < wanted:
            gave = f"Source {source} ({reader}) gave {labelled:,} of the {wanted:,} questions asked for"
            sentences.append(f"{gave}; {' and '.join(reasons)}.")
    return sentences
