"""Which facts that an answer needs are among triples."""

import pytest

from benchmarks.facts import FactsOptions, facts, facts_of, is_given
from tests.cli import write_lines
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Hop, Question
from tripletune.core.data.triples import Triple

FILM, ADA = Passage("Kelm", "Kelm was directed by Ada Osk."), Passage("Ada Osk", "Ada Osk was born in Tol in 1903.")


def question(**fields):
    values = {"answers": ("Tol",), "passages": (FILM, ADA), "supporting": (0, 1), "type": "", "source": "musique"}
    return Question("q", "Where was the director of Kelm born?", **(values | fields))


def test_a_hop_asks_about_the_answers_before_it():
    hops = (Hop("Kelm >> director", "Ada Osk", 0), Hop("Where was #1 born?", "Tol", 1))
    first, second = facts_of(question(hops=hops))
    assert (first.passages, second.passages, second.name) == ((FILM,), (ADA,), "Tol")
    assert is_given(first, [Triple("Ada Osk", "directed", "Kelm")])
    assert is_given(second, [Triple("Ada", "birth place", "the Tol region")])
    assert not is_given(second, [Triple("Ada", "birth place", "Tolland"), Triple("Bo", "birth place", "Tol")])


@pytest.mark.parametrize(("answer", "count"), [("Tol", 1), ("yes", 0)])
def test_without_a_decomposition_the_answer_is_the_fact(answer, count):
    assert len(list(facts_of(question(answers=(answer,))))) == count


def test_gold_triples_are_facts():
    (fact,) = facts_of(question(evidences=(Triple("Kelm", "director", "Ada Osk"),)))
    assert is_given(fact, [Triple("Ada Osk", "made", "Kelm (film)")])
    assert not is_given(fact, [Triple("Ada Osk", "made", "Brin")])


def test_the_recall_of_a_file_and_of_a_vocabulary(tmp_path):
    row = {
        "id": "2hop__1", "question": "Where was the director of Kelm born?", "answer": "Tol", "answerable": True,
        "paragraphs": [
            {"idx": number, "title": passage.title, "paragraph_text": passage.text, "is_supporting": True}
            for number, passage in enumerate((FILM, ADA))
        ],
        "question_decomposition": [
            {"question": "Kelm >> director", "answer": "Ada Osk", "paragraph_support_idx": 0},
            {"question": "Where was #1 born?", "answer": "Tol", "paragraph_support_idx": 1},
        ],
    }  # fmt: skip
    triples = [
        {"title": FILM.title, "text": FILM.text, "triples": [["Kelm", "director", "Ada Osk"]]},
        {"title": ADA.title, "text": ADA.text, "triples": [["Ada Osk", "comes from", "Tol"], ["Ada Osk", "is", "x"]]},
    ]
    (tmp_path / "v.tsv").write_text("predicate\tspelling\ndirector\tdirector\n")
    options = FactsOptions(
        data=write_lines(tmp_path / "q.jsonl", [row]),
        triples=(write_lines(tmp_path / "t.jsonl", triples),),
        vocabulary=str(tmp_path / "v.tsv"),
    )
    all_triples, named = facts(options).rows
    assert (all_triples["facts"], all_triples["recall"], all_triples["triples_per_passage"]) == (2, "100.0", 1.5)
    assert (named["facts"], named["recall"], named["triples_per_passage"]) == (2, "50.0", 0.5)
