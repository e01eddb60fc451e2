import numpy as np
import pytest

from tripletune.core.data.triples import Triple
from tripletune.rag.triples.relations import Use, Uses, induce, relation_of
from tripletune.rag.triples.vocabulary import Objects


def relations(*spellings, kind=Objects.NAME):
    return [relation_of(Use(spelling, kind)) for spelling in spellings]


@pytest.mark.parametrize(
    ("spellings", "reverse"),
    [
        (["directed by", "director", "was directed by"], ["directed", "director of", "is the director of"]),
        (["founded by", "founder", "established by"], ["founded", "founder of"]),
        (["writer", "written by"], ["wrote", "also wrote"]),
        (["located in", "location", "is situated in", "is located on"], ["location of"]),
        (["member", "has member"], ["member of", "is a member of"]),
        (["starring", "stars"], ["starred in"]),
        (["birth place", "born in", "place of birth", "birthplace"], ["birthplace of"]),
        (["type", "type of", "is a type of"], []),
        (["population", "has a population of"], ["population of"]),
        (["rank", "ranked"], ["rank of"]),
    ],
)  # fmt: skip
def test_spellings_of_one_relation_have_one_root_and_a_direction(spellings, reverse):
    found, turned = relations(*spellings), relations(*reverse)
    assert len({relation.root for relation in found + turned}) == 1
    assert not any(relation.is_reversed for relation in found)
    assert all(relation.is_reversed for relation in turned)


@pytest.mark.parametrize(
    "spellings",
    [
        ("birth place", "death place"), ("director", "direction"), ("composed by", "composed of"),
        ("owner", "owns"), ("located in", "located near"), ("founded by", "founded in"),
        ("based in", "based on"), ("founded in", "found in"),
    ],
)  # fmt: skip
def test_other_relations_stay_apart(spellings):
    first, second = relations(*spellings)
    assert first.root != second.root


def test_the_object_says_whether_a_place_or_a_time_is_meant():
    born = [relation_of(Use("born in", kind)).root for kind in (Objects.NAME, Objects.YEAR, Objects.DATE)]
    assert born == [relation_of(Use(f"birth {word}", Objects.NAME)).root for word in ("place", "year", "date")]
    year = [relation_of(Use(spelling, Objects.YEAR)).root for spelling in ("released in", "released", "release year")]
    assert len(set(year)) == 1


def uses(*sources):
    counted = Uses()
    for triples in sources:
        counted.add(Triple(*words.split("/")) for words in triples)
    return counted


def test_the_first_source_names_a_relation_and_sources_count_alike():
    few = ["Kelm/country/Vubu", "Kelm/director/Ada"]
    many = ["A/directed by/B"] * 6 + ["A/directed/B"] * 3 + ["A/likes/B"]
    groups = induce(uses(few, many), 2)
    # (1/2 + 9/10) / 2 and (1/2 + 0) / 2; "likes" has (0 + 1/10) / 2.
    assert [group.leading.spelling for group in groups] == ["director", "country"]
    turned = {use.spelling: is_reversed for use, (is_reversed, _) in groups[0].members.items()}
    assert turned == {"director": False, "directed by": False, "directed": True}
    (first,) = induce(uses(many, few), 1)
    assert first.leading.spelling == "directed by"


def test_vectors_join_names_that_no_word_tells_apart():
    # Everything has the same vector, so the rules decide alone.
    triples = ["A/occupation/poet", "A/profession/poet", "A/birth place/X", "A/death place/X", "A/owns/X", "X/owner/A"]
    groups = induce(uses(triples), 10, lambda names: np.ones((len(names), 3)), 0.9)
    joined = {}
    for group in groups:
        joined[group.leading.spelling] = sorted(use.spelling for use in group.members)
    assert joined["birth place"][0] == "birth place"
    together = next(names for names in joined.values() if "occupation" in names)
    assert "profession" in together
    for names in joined.values():
        assert not {"birth place", "death place"} <= set(names)
        assert not {"owns", "owner"} <= set(names)
