import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripletune.core.data.triples import Triple, format_triples, parse_triples, triples_from_json

# Text that is likely to break a reader, mixed with arbitrary characters of every script.
PIECES = st.sampled_from(
    [*"()|>,'[\"\\", "(S>", "| P>", "|P>", "| O>", "|  O>", "), (", "(<S>", "| <P>", "<think>", "NONE", "é", "日本"]
)
FIELD = (
    st.lists(st.one_of(PIECES, st.text(max_size=6)), min_size=1, max_size=6)
    .map("".join)
    .filter(lambda text: text.split())
)
TRIPLE = st.builds(Triple, FIELD, FIELD, FIELD)


@given(st.lists(TRIPLE, max_size=5))
def test_any_names_survive_a_round_trip(triples):
    parsed = parse_triples(format_triples(triples))
    assert list(parsed.triples) == triples
    assert parsed.malformed == 0


@given(st.lists(TRIPLE, min_size=1, max_size=3), st.lists(TRIPLE, min_size=1, max_size=3))
def test_a_malformed_triple_takes_no_neighbour_with_it(before, after):
    text = f"{format_triples(before)}, (S> lost| P> no object), {format_triples(after)}"
    parsed = parse_triples(text)
    assert list(parsed.triples) == before + after
    assert parsed.malformed == 1


@given(st.text())
def test_reading_never_fails(text):
    parsed = parse_triples(text)
    assert parsed.malformed >= 0


def test_ordinary_names_are_written_unchanged():
    triple = Triple("Zeno (of Elea), the younger", "born in", 'Elea | "Velia"')
    assert str(triple) == '(S> Zeno (of Elea), the younger| P> born in| O> Elea | "Velia")'


def test_white_space_is_folded():
    assert Triple(" a\n b ", "p\t", "o") == Triple("a b", "p", "o")


@pytest.mark.parametrize("fields", [("", "p", "o"), ("s", " \n", "o"), ("s", "p", "")])
def test_an_empty_field_is_an_error(fields):
    with pytest.raises(ValueError, match="is empty"):
        Triple(*fields)


@pytest.mark.parametrize(
    ("text", "expected", "malformed"),
    [
        # the list as Python prints it, which is how published records hold it
        ("['(S> a| P> b| O> c)', \"(S> it's| P> b| O> d)\"]", [("a", "b", "c"), ("it's", "b", "d")], 0),
        ("(S> a| P> b| O> c)\nThat is all (as far as I know).", [("a", "b", "c")], 0),
        ("Here you are: (S> a| P> b| O> c). No more.", [("a", "b", "c")], 0),
        ("(S>a|P>b|O>c)(S> d |P> e |O> f)", [("a", "b", "c"), ("d", "e", "f")], 0),
        ("(S> a| P> b| O> c", [], 1),
        ("(S> a| O> c| P> b)", [], 1),
        ("(S> a| P> b| O> c), (S> d| P> e", [("a", "b", "c")], 1),
        ("(S> A (B)| P> b (of)| O> C (D) E)", [("A (B)", "b (of)", "C (D) E")], 0),
        # a neighbour without its opening marker is lost alone
        ("(S> a| P> b| O> c), S> d (e)| P> f| O> g)", [("a", "b", "c")], 1),
        ("(S> a| P> b| O> c (d)), (d| P> f| O> g), (S> h| P> i| O> j)", [("a", "b", "c (d)"), ("h", "i", "j")], 1),
        ("(S> a| P> b| O> c| P> d| O> e)", [("a", "b", "c| P> d| O> e")], 0),
        ("no triple here", [], 0),
    ],
)
def test_model_output(text, expected, malformed):
    parsed = parse_triples(text)
    assert [tuple(triple.as_list()) for triple in parsed.triples] == expected
    assert parsed.malformed == malformed


@pytest.mark.parametrize("row", [["a", "b"], "abc", ["a", "b", 3], ["a", "", "c"], None])
def test_bad_json_rows_are_named(row):
    with pytest.raises(ValueError, match=r"^file:7: "):
        triples_from_json([["a", "b", "c"], row], "file:7")


@pytest.mark.parametrize(
    "text",
    [
        '[["Ida", "born in", "Kelm"]]',
        "[['Ida', 'born in', 'Kelm']]",
        '[{"head": "Ida", "relation": "born in", "tail": "Kelm"}]',
        "(S> Ida| P> born in| O> Kelm)",
        '["(S> Ida| P> born in| O> Kelm)"]',
        "[(S> Ida| P> born in| O> Kelm)]",
    ],
)
def test_a_text_holds_triples_as_a_list_or_between_markers(text):
    assert triples_from_json(text, "file:7") == (Triple("Ida", "born in", "Kelm"),)
    assert triples_from_json("[]", "file:7") == triples_from_json("", "file:7") == ()


@pytest.mark.parametrize("text", ['["Ida", "born in", "Kelm"]', '[["Ida", "Kelm"]]', '[["Ida", "born in"'])
def test_a_list_as_text_that_is_no_list_of_triples_is_named(text):
    with pytest.raises(ValueError, match=r"^file:7: .*triple"):
        triples_from_json(text, "file:7")
