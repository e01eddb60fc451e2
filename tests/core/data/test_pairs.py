import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli import write_lines
from tests.core.data.test_triples import TRIPLE
from tripletune.core.data.pairs import (
    ExtractionPair,
    entity_triple,
    is_only_a_name,
    predicate_words,
    read_pairs,
    render_source,
)
from tripletune.core.data.triples import Triple, format_triples, plain_markers
from tripletune.llm.reply_triples import ExtractionReply, read_reply

PAIR = ExtractionPair("a:1", "Oslo is in Norway.", "Oslo", (Triple("Oslo", "located in", "Norway"),), "a")


@settings(deadline=None)
@given(st.lists(TRIPLE, max_size=5, unique=True))
def test_what_is_rendered_is_read_back(triples):
    assert read_reply(format_triples(triples)) == ExtractionReply(tuple(triples))


@settings(deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from('(S>|PO)["],\\{}<think> NONE'), st.characters())))
def test_reading_a_reply_never_fails(text):
    reply = read_reply(text)
    assert reply.malformed >= 0
    assert len(set(reply.triples)) == len(reply.triples)


@settings(deadline=None)
@given(st.lists(TRIPLE, min_size=1, max_size=3, unique=True), st.integers(min_value=1))
def test_a_cut_off_reply_keeps_every_triple_before_the_cut(triples, cut):
    text = format_triples(triples)
    cut %= len(text)
    whole = 0
    while whole < len(triples) and len(format_triples(triples[: whole + 1])) <= cut:
        whole += 1
    assert list(read_reply(text[:cut]).triples[:whole]) == triples[:whole]


def test_the_title_stands_before_the_text():
    assert PAIR.source_text == "Oslo: Oslo is in Norway."
    assert render_source("", " Two \n lines\t") == "Two lines"
    assert PAIR.target == "(S> Oslo| P> located in| O> Norway)"
    assert ExtractionPair("n", "Hello there!").target == ""


@pytest.mark.parametrize(
    ("title", "text", "expected"),
    [
        ("Oslo", "Oslo", True),
        ("Oslo", " oslo. ", True),
        ("Oslo", "", True),
        ("Oslo", "Oslo is a city.", False),
        ("", "Oslo", False),
        ("", "", False),
    ],
)
def test_a_passage_that_is_only_a_name(title, text, expected):
    assert is_only_a_name(title, text) is expected
    assert str(entity_triple("Oslo")) == "(S> Oslo| P> is| O> Oslo)"


@pytest.mark.parametrize(
    ("reply", "triples", "malformed", "unreadable"),
    [
        ("(<S> a| <P> b| <O> c), (<S> d| <P> e| <O> f (g))", [("a", "b", "c"), ("d", "e", "f (g)")], 0, False),
        ("(S> a| P> b| O> c), (S> lost| P> b), (S> d| P> e| O> f)", [("a", "b", "c"), ("d", "e", "f")], 1, False),
        ("<think>(S> x| P> y| O> z)</think>\n(S> a| P> b| O> c)", [("a", "b", "c")], 0, False),
        ('{"triples": [["a", "b", "c"], ["d", "e", 1958]]}', [("a", "b", "c"), ("d", "e", "1958")], 0, False),
        ('```json\n[["a", "b \\"c\\"", "d"], ["e", "f', [("a", 'b "c"', "d")], 1, False),
        ('[["a", "b"], ["c", "d", "e"], ["f", "g", "h", "i"]]', [("c", "d", "e")], 2, False),
        ("I am sorry, I can't do that.", [], 0, True),
        ("", [], 0, False),
        (" NONE. ", [], 0, False),
        ("No facts found", [], 0, False),
        ('{"triples": []}', [], 0, False),
    ],
)  # fmt: skip
def test_replies(reply, triples, malformed, unreadable):
    read = read_reply(reply)
    assert [tuple(triple.as_list()) for triple in read.triples] == triples
    assert (read.malformed, read.unreadable) == (malformed, unreadable)
    assert read.is_malformed is (malformed > 0 or unreadable)


def test_repeated_triples_are_counted():
    read = read_reply("(S> a| P> b| O> c), (S> d| P> e| O> f), (S> a| P> b| O> c)")
    assert (len(read.triples), read.repeated, read.is_malformed) == (2, 1, False)


def test_markers_and_predicates():
    assert plain_markers("( <S> a|<P> b|  <O> c)") == "( S> a|P> b|  O> c)"
    assert plain_markers("a <S> b") == "a <S> b"
    words = {"birthPlace": "birth place", "birth_place": "birth place", "Nationality": "nationality", "A": "a",
             "CEO of": "CEO of", "isPartOf": "is part of", "born in": "born in", "rd1Team": "rd1 team"}  # fmt: skip
    assert {name: predicate_words(name) for name in words} == words


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_pairs_come_back_from_files(tmp_path, ending):
    pairs = [PAIR, ExtractionPair("b", "Nothing is said.")]
    path = tmp_path / f"train-00000.{ending}"
    if ending == "jsonl":
        write_lines(path, (pair.to_json() for pair in pairs))
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist([pair.to_json() for pair in pairs]), path)
    assert list(read_pairs(tmp_path, "train")) == pairs
    assert list(read_pairs(path)) == pairs


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "a", "triples": []}, "lacks text"),
        ({"id": "a", "text": " ", "triples": []}, "the text is empty"),
        ({"id": "a", "text": "t", "triples": [["a", "b"]]}, "three strings"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    write_lines(path, [row])
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{message}"):
        list(read_pairs(path))


def test_pairs_of_a_table_and_of_an_array(tmp_path):
    (tmp_path / "pairs.csv").write_text('text,triples\nAda lives.,"[[""Ada"", ""is"", ""alive""]]"\n')
    (tmp_path / "pairs.json").write_text('[{"text": "Ada lives.", "triples": [["Ada", "is", "alive"]]}]')
    for name in ("pairs.csv", "pairs.json"):
        (pair,) = read_pairs(tmp_path / name)
        assert (pair.text, pair.triples) == ("Ada lives.", (Triple("Ada", "is", "alive"),))
