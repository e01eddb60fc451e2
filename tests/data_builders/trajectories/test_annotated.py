"""Gold steps as CIRAG's decisions: what each round shows, keeps and asks, what is left out, and the real files."""

import json
import re
from collections import Counter

import pytest

from tests.cli import write_lines
from tests.data_builders.rows import shared
from tripletune.core.data.pairs import read_trajectories
from tripletune.data_builders.trajectories.build import main
from tripletune.eval.suites.decisions import decision_cases
from tripletune.rag.systems.cirag.integration import read_decision

DUNE = "Where was the author of Dune born?"
FACTS = {
    "Dune": [["Dune", "written by", "Frank Herbert"], ["Dune", "set on", "Arrakis"]],
    # The last one names the answer, too, but nothing of the query.
    "Frank Herbert": [["Frank Herbert", "born in", "Tacoma"], ["Pierce County", "seat in", "Tacoma"]],
    "Emma": [["Emma", "written by", "Jane Austen"]],
    "Jane Austen": [["Jane Austen", "born in", "Steventon"]],
}


def musique_row(name, book, author, place):
    """A question of two hops, with two paragraphs of its own."""
    paragraphs = [(book, f"By {author}."), (author, f"Of {place}.")]
    return {
        "id": name,
        "question": f"Where was the author of {book} born?",
        "answer": place,
        "answer_aliases": [],
        "answerable": True,
        "paragraphs": [
            {"idx": number, "title": title, "paragraph_text": text, "is_supporting": True}
            for number, (title, text) in enumerate(paragraphs)
        ],
        "question_decomposition": [
            {"id": 1, "question": f"{book} >> author", "answer": author, "paragraph_support_idx": 0},
            {"id": 2, "question": "Where was #1 born?", "answer": place, "paragraph_support_idx": 1},
        ],
    }


@pytest.fixture
def musique(tmp_path):
    """Two questions that can be labelled, and one whose facts do not name its answer."""
    rows = [
        musique_row("q1", "Dune", "Frank Herbert", "Tacoma"),
        musique_row("q2", "Emma", "Jane Austen", "Steventon"),
        musique_row("q3", "Emma", "Jane Austen", "Bath"),
    ]
    rows[2]["paragraphs"][1]["paragraph_text"] = "Of Steventon."
    write_lines(tmp_path / "musique.jsonl", rows)
    texts = {"Dune": "By Frank Herbert.", "Frank Herbert": "Of Tacoma."}
    texts |= {"Emma": "By Jane Austen.", "Jane Austen": "Of Steventon."}
    triples = [{"title": title, "text": texts[title], "triples": rows} for title, rows in FACTS.items()]
    write_lines(tmp_path / "triples.jsonl", triples)
    return f"musique:{tmp_path}/musique.jsonl:{tmp_path}/triples.jsonl"


def build(folder, *more):
    assert main(["--output", str(folder), *more]) == 0
    return list(read_trajectories(folder)), json.loads((folder / "statistics.json").read_text())


def test_gold_steps_are_decisions(musique, tmp_path):
    (first, second), statistics = build(tmp_path / "out", "--source", musique)
    assert (first.question_id, second.question_id) == ("q1", "q2")
    assert first.model == "annotated: gold decompositions, triples of triples.jsonl"
    assert [turn["role"] for turn in first.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert first.learned == (False, False, True, False, True)
    assert first.messages[1]["content"].startswith(f"[[## Original Query ##]]\n{DUNE}\n\n[[## fact_before")
    one, two = decision_cases([first])
    assert [triple.as_list() for triple in one.gold.core] == [FACTS["Dune"][0]]
    assert one.gold.query == "Where was Frank Herbert born?"
    assert one.gold.thought == f"Dune: written by Frank Herbert. Still missing: {one.gold.query}"
    assert [triple.as_list() for triple in two.gold.core] == [FACTS["Frank Herbert"][0]]
    assert two.gold.query == ""
    assert two.gold.thought.endswith("the query can be answered: Tacoma.")
    # Both facts of the passage, and those of the other question that are of no use.
    others = [*FACTS["Emma"], *FACTS["Jane Austen"]]
    for case, title in ((one, "Dune"), (two, "Frank Herbert")):
        shown = sorted(triple.as_list() for triple in case.candidates)
        assert shown == sorted([*FACTS[title], *others])
        # The form has no fault that the loop would count.
        assert read_decision(first.messages[2 * case.round]["content"], case.candidates).faults == ()
    assert statistics["build"]["drops"]["all"] == {"the facts do not hold the answer": 1}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Annotated, not a model's" in card
    assert "of annotated: gold decompositions" in card
    without, _ = build(tmp_path / "without", "--source", musique, "--distractors", "0")
    (case, _) = decision_cases(without[:1])
    assert sorted(triple.as_list() for triple in case.candidates) == sorted(FACTS["Dune"])


def test_evidence_triples_are_core_facts(tmp_path):
    row = {
        "_id": "q1",
        "type": "compositional",
        "question": DUNE,
        "context": [["Dune", ["By Frank Herbert."]], ["Frank Herbert", ["Of Tacoma."]]],
        "supporting_facts": [["Dune", 0], ["Frank Herbert", 0]],
        "evidences": [["Dune", "author", "Frank Herbert"], ["Frank Herbert", "place of birth", "Tacoma"]],
        "answer": "Tacoma",
    }
    write_lines(tmp_path / "wiki.jsonl", [row])
    (only,), _ = build(tmp_path / "out", "--source", f"two_wiki:{tmp_path}/wiki.jsonl")
    one, two = (case.gold for case in decision_cases([only]))
    assert [[triple.as_list() for triple in decision.core] for decision in (one, two)] == [
        [row["evidences"][0]],
        [row["evidences"][1]],
    ]
    assert "Frank Herbert" in one.query
    assert only.model == "annotated: 2WikiMultiHopQA evidence"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--source", "hotpotqa:x.jsonl:y.jsonl"], "hotpotqa has no annotation of what each step finds"),
        (["--source", "musique:x.jsonl"], "add a triple file"),
        (["--source", "MUSIQUE", "--results", "runs/x"], "name --results .* or --source"),
        ([], "name --results .* or --source"),
        (["--source", "MUSIQUE", "--no-repairs", "--system", "t2rag"], "no_repairs: without effect with --source"),
        (["--results", "runs/x", "--distractors", "1"], "distractors has no effect without source"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(more, message, musique, tmp_path, capsys):
    arguments = [musique if word == "MUSIQUE" else word for word in more]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_published_files_give_hundreds_of_trajectories(tmp_path):
    wiki = f"two_wiki:{shared('2wikimultihopqa_train.jsonl')}"
    musique = f"musique:{shared('musique_ans_train.jsonl')}:{shared('openie_musique_silver.jsonl')}"
    found, _ = build(tmp_path / "out", "--source", wiki, "--source", musique)
    by_teacher = Counter(one.model.partition(",")[0] for one in found)
    assert by_teacher["annotated: 2WikiMultiHopQA evidence"] > 300
    assert by_teacher["annotated: gold decompositions"] > 50
    for case in decision_cases(found):
        assert set(case.gold.core) <= set(case.candidates)
        assert not case.gold.faults
