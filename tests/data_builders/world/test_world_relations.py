import string

import pytest

from tripletune.data_builders.world.relations import RELATION_OF, RELATIONS, RELATIONS_OF_KIND, WH_WORDS

FIELDS = {
    "ask": {"x"},
    "refer": {"x"},
    "verb": {"o"},
    "full": {"s", "o"},
    "less": {"a", "b"},
    "more": {"a", "b"},
    "same": {"a", "b"},
}


def placeholders(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda r: f"{r.kind}-{r.predicate}")
def test_every_wording_has_its_places(relation):
    for name, wanted in FIELDS.items():
        wordings = getattr(relation, name)
        assert len(set(wordings)) == len(wordings)
        assert all(placeholders(wording) == wanted for wording in wordings), name
    assert relation.verb or relation.full
    assert all(question.endswith("?") for question in (*relation.ask, *relation.less, *relation.more, *relation.same))


def test_relations_that_are_followed_can_be_named_at_any_depth():
    followed = [r for r in RELATIONS if r.target]
    assert all(any(phrase.endswith("{x}") for phrase in r.refer) for r in followed)
    assert all(r.target in RELATIONS_OF_KIND for r in followed)
    assert not [r for r in RELATIONS if r.refer and not r.target]


def test_each_kind_has_enough_to_say_and_no_predicate_twice():
    assert len(RELATION_OF) == len(RELATIONS)
    assert all(3 <= len(relations) <= 7 for relations in RELATIONS_OF_KIND.values())
    assert {r.target for r in RELATIONS if r.act} <= set(WH_WORDS)


def test_questions_have_several_wordings():
    assert all(len(r.ask) > 1 for r in RELATIONS)
