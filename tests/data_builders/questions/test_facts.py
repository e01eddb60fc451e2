import json
from collections import Counter
from itertools import islice

import pytest

from tripletune.core.calls import UnusableReply
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.data_builders.questions.drafts import draft_questions
from tripletune.data_builders.questions.facts import FactGraph
from tripletune.data_builders.questions.teacher import agrees, read_wording

ROWS = {
    "Ida Morn": "Ida Morn | employer | Velm Works; Ida Morn | born in | Osterby; Ida Morn | year of birth | 1971",
    "Tom Rask": "Tom Rask | employer | Velm Works; Tom Rask | born in | Kelm; Tom Rask | year of birth | 1980",
    "Velm Works": "The Velm Works | site | Osterby; Velm Works | product | the Velm pump; Velm Works | product | Arl",
    "Sund Yard": "Sund Yard | product | Arl; Sund Yard | product | a crane; Sund Yard | site | the capital",
    "Arl": "Arl | designer | Ida Morn; Arl | launched | 3 May 2016; the capital | river | Sarn",
    "Osterby": "Osterby | river | Sarn; Osterby | inhabitants | 4,100",
}


def graph_of(rows=ROWS):
    passages, triples = [], []
    for title, text in rows.items():
        triples.append([Triple(*row.split(" | ")) for row in text.split("; ")])
        passages.append(Passage(title, ". ".join(" ".join(triple.as_list()) for triple in triples[-1])))
    return FactGraph(passages, triples), passages


def drafts(kind, part=range(6), counts=None):
    return list(draft_questions(graph_of()[0], set(part), {kind: 1.0}, 0, Counter() if counts is None else counts))


def paths(found):
    return {" > ".join([*draft.given, draft.answer]) for draft in found}


def test_chains_follow_relations_of_one_object_over_passages_that_differ():
    assert "Velm Works > the Velm pump" not in paths(drafts("1-hop"))
    assert paths(drafts("2-hop")) == {
        "Ida Morn > The Velm Works > Osterby",
        "Tom Rask > The Velm Works > Osterby",
        "The Velm Works > Osterby > Sarn",
        "Ida Morn > Osterby > Sarn",
        "The Velm Works > Osterby > 4,100",
        "Ida Morn > Osterby > 4,100",
        "Arl > Ida Morn > 1971",
        "Arl > Ida Morn > Osterby",
        "Arl > Ida Morn > Velm Works",
    } - {"Ida Morn > The Velm Works > Osterby"}  # the first passage names Osterby already


def test_paths_into_the_other_part_are_dropped_and_counted():
    counts = Counter()
    assert paths(drafts("2-hop", [1, 2], counts)) == {"Tom Rask > The Velm Works > Osterby"}
    assert counts.total() == 2  # The Velm Works > Osterby > Sarn or 4,100


def test_a_fact_that_goes_leaves_the_other_drafts_as_they_were():
    firms = {f"Firm {n}": f"Firm {n} | site | Town {n % 5}; Firm {n} | founder | Ida {n}" for n in range(20)}
    people = {f"Person {n}": f"Person {n} | employer | Firm {n % 20}; Person {n} | boss | Ida {n}" for n in range(60)}
    towns = {f"Town {n}": f"Town {n} | river | River {n}" for n in range(5)}
    found = []
    for changed in ({}, {"Person 7": "Person 7 | boss | Ida 7"}, {"Person 59": "Person 59 | boss | Ida 59"}):
        graph, passages = graph_of(firms | people | towns | changed)
        made = draft_questions(graph, set(range(len(passages))), {"2-hop": 2.0, "3-hop": 1.0}, 0, Counter())
        found.append([draft.id for draft in islice(made, 60)])
    for other in found[1:]:
        assert len({*found[0]} & {*other}) >= 54


def test_comparisons_and_intersections():
    found = drafts("comparison")
    years = {(one.test, one.answer) for one in found if one.facts[0].predicate == "year of birth"}
    assert years == {("smaller or earlier", "Ida Morn"), ("larger or later", "Tom Rask")}
    assert {one.answer for one in found if one.facts[0].predicate == "employer"} == {"yes"}
    (shared,) = drafts("intersection")
    assert ({*shared.given}, shared.answer) == ({"Velm Works", "Sund Yard"}, "Arl")


def test_yes_and_no_are_equally_frequent():
    """Of 24 people two live in each of the first four towns, so 4 pairs share a town, and 272 do not."""
    towns = [number % 4 if number < 8 else number for number in range(24)]
    rows = {f"Person {number}": f"Person {number} | town | Town {town}" for number, town in enumerate(towns)}
    graph, passages = graph_of(rows)
    answers = Counter()
    for draft in draft_questions(graph, set(range(len(passages))), {"comparison": 1.0}, 0, Counter()):
        answers[draft.answer] += 1
    assert answers["yes"] == 4
    assert answers["no"] in (4, 5)


DRAFT = next(one for one in drafts("2-hop") if one.answer == "Sarn" and one.given[0] == "Ida Morn")
GOOD = json.dumps({
    "question": "What flows through Ida Morn's birthplace?",
    "subqueries": ["Where was Ida Morn born?", "What is Osterby's river?"],
})  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("Ida Morn's birthplace", "her birthplace", 'must name "Ida Morn"'),
        ("birthplace?", "Osterby?", 'must not name "Osterby"'),
        ("birthplace?", "town, Ida Morn year of birth 1971 Ida Morn born in it?", "stands in a passage"),
        ("Osterby's river", "the town's river", 'must name "Osterby"'),
        ("river?", "river, Sarn?", 'must not name "Sarn"'),
        ('born?", ', 'born?", "Where?", ', "needs 2 sub-queries"),
        ("birthplace?", "birthplace.", "one question mark"),
    ],
)
def test_wordings_are_checked(old, new, wrong):
    passages = [graph_of()[1][fact.passage] for fact in DRAFT.facts]
    assert read_wording(GOOD, DRAFT, passages, 6).subqueries[0] == "Where was Ida Morn born?"
    with pytest.raises(UnusableReply, match=wrong):
        read_wording(GOOD.replace(old, new), DRAFT, passages, 6)


@pytest.mark.parametrize(
    ("reply", "right"),
    [("The Sarn.", True), ("the river Sarn", True), ("Answer: Sarn\nIt is.", True), ("Lune", False), ("unknown", False),
     ("", False), ("The passages do not mention the Sarn", False)],
)  # fmt: skip
def test_agreement(reply, right):
    assert agrees(reply, DRAFT) is right


def test_agreement_on_a_comparison():
    draft = next(one for one in drafts("comparison") if one.test == "larger or later")
    assert agrees("Tom Rask", draft)
    assert not agrees("Tom Rask is younger than Ida Morn", draft)
