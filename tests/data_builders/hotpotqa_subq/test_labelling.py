import asyncio
import json

import pytest

from tripletune.data_builders.hotpotqa_subq.annotations import TripleFile
from tripletune.data_builders.hotpotqa_subq.labelling import LabelOptions, label_question
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions
from tripletune.data_builders.hotpotqa_subq.questions import Question
from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple

PASSAGES = (Passage("Gold", "g"), Passage("Also gold", "a"), *(Passage(f"Other {n}", f"o{n}") for n in range(4)))
QUESTION = Question(
    id="q1", question="Who?", answers=("Ann",), passages=PASSAGES, supporting=(0, 1), type="bridge", source="hotpotqa"
)


class Teacher:
    name = "fake"

    async def helpful_documents(self, question):
        return [0, 1]

    async def subqueries(self, question, documents):
        return ["Who first?", "Who next?"]

    async def triples(self, question, document):
        return [Triple(question.passages[document].title, "is", "here")]


@pytest.fixture
def triple_file(tmp_path):
    path = tmp_path / "triples.jsonl"
    # "Other 3" is not covered: a passage without triples can't be a distractor.
    rows = [{"title": p.title, "text": p.text, "triples": [[p.title, "is", "there"]]} for p in PASSAGES[:5]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TripleFile(path)


def label(**options):
    return asyncio.run(label_question(QUESTION, Teacher(), False, LabelOptions(**options)))


def test_without_the_option_a_step_holds_the_kept_document_alone():
    assert [[t.subject for t in step.triples] for step in label()[-1].steps] == [["Gold"], ["Also gold"]]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_distractors_join_every_step_and_are_never_kept_documents(triple_file, count):
    steps = label(distractors=count, triple_file=triple_file)[-1].steps
    for gold, step in zip(("Gold", "Also gold"), steps):
        subjects = [triple.subject for triple in step.triples]
        assert subjects.count(gold) == 1
        others = set(subjects) - {gold}
        assert len(others) == min(count, 3)
        assert others <= {"Other 0", "Other 1", "Other 2"}
        assert all(subject in step.text for subject in subjects)


def test_distractors_hang_on_seed_and_question_alone(triple_file):
    one, two = (label(distractors=2, triple_file=triple_file, seed=3) for _ in range(2))
    assert one == two
    orders = {label(distractors=2, triple_file=triple_file, seed=seed)[-1].steps for seed in range(12)}
    assert len(orders) > 1
    places = {step.triples[0].subject == "Gold" for steps in orders for step in steps[:1]}
    assert places == {True, False}  # the kept document does not always stand first


def test_distractors_need_their_triples(tmp_path):
    with pytest.raises(ValueError, match="--triple-file"):
        BuildOptions(output=str(tmp_path), distractors=1)
