import pytest

from tests.cli import write_lines
from tests.fakes import Client
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.rag.answering import open_tools
from tripletune.rag.system_options import SystemOptions
from tripletune.rag.systems import find_system
from tripletune.rag.triple_store import open_triples
from tripletune.rag.triples.names import EntityNames, read_decisions, read_names

HEAD = "merge\tname\tinto\n"


def names(tmp_path, *lines, head=HEAD):
    path = tmp_path / "entities.tsv"
    path.write_text(head + "".join(f"{line}\n" for line in lines))
    return path


def test_only_lines_that_say_yes_count_and_chains_end(tmp_path):
    path = names(tmp_path, "yes\tU.S.\tUS", "Yes\tUS\tUnited States", "no\tOslo\tNorway", 'y\t"The ""X"""\tX  x')
    found = read_names(path)
    assert found.replaced == {"U.S.": "United States", "US": "United States", 'The "X"': "X x"}
    assert read_decisions(path)["Oslo", "Norway"] is False
    assert found.digest != read_names(names(tmp_path, "yes\tU.S.\tUS")).digest
    assert read_names(names(tmp_path, "no\tOslo\tNorway")).digest == ""


def test_triples_are_renamed_each_once_and_what_names_an_entity_stays():
    view = EntityNames({"U.S.": "US", "USA": "US"}, "d")
    triples = [
        Triple("Oslo", "trades with", "U.S."),
        Triple("Oslo", "trades with", "USA"),
        Triple("USA", "also known as", "U.S."),
    ]
    assert view.of(triples) == (Triple("Oslo", "trades with", "US"), Triple("USA", "also known as", "U.S."))


def test_a_store_is_read_through_the_names_and_stays_as_it_is(tmp_path):
    passage = {"title": "", "text": "Oslo trades.", "triples": [["Oslo", "trades with", "U.S."]]}
    source = write_lines(tmp_path / "triples.jsonl", [passage])
    copy = tmp_path / "triples.sqlite"
    view = open_triples(source, copy, entities=names(tmp_path, "yes\tU.S.\tUS"))
    assert view.get(Passage("", "Oslo trades.")) == (Triple("Oslo", "trades with", "US"),)
    assert view.get(Passage("", "Other.")) is None
    plain = open_triples(source, copy)
    assert plain.get(Passage("", "Oslo trades.")) == (Triple("Oslo", "trades with", "U.S."),)
    assert view.identity[:3] == plain.identity
    assert len(view.identity) == 4


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_line_that_names_nothing_in_the_triples_is_reported(tmp_path, caplog, is_kept):
    passage = {"title": "", "text": "Oslo trades.", "triples": [["Oslo", "trades with", "U.S."]]}
    source, copy = write_lines(tmp_path / "t.jsonl", [passage]), tmp_path / "triples.sqlite"
    if is_kept:
        open_triples(source, copy).close()
    caplog.set_level("INFO", "tripletune.rag.triples.names")
    path = names(tmp_path, "yes\tU.S.\tUS", "no\tRome\tRoma", "yes\tCastelby\tSelby")
    open_triples(source, copy, entities=path).close()
    open_triples(source, copy, entities=names(tmp_path, "yes\tU.S.\tUS", "yes\tOslo\tChristiania")).close()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"{source}: 1 name merged; 1 line names nothing in the triples: Castelby ({path}:4)"),
        ("INFO", f"{source}: 2 names merged"),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["maybe\tA\tB"], r"entities.tsv:2: the column merge must say yes or no, found 'maybe'"),
        (["yes\tA\t "], "the columns name and into must both be filled"),
        (["yes\tA\tB", "yes\tA\tC"], r"entities.tsv:3: 'A' is merged into 'B' and into 'C': say no to one"),
        (["yes\tA\tB", "yes\tB\tC", "yes\tC\tA"], "A -> B -> C -> A goes in a circle"),
    ],
)
def test_files_that_cannot_be_applied_are_refused(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_names(names(tmp_path, *lines))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="must name the columns merge, name, into, separated by tabs; into, merge, name is"
    ):
        read_names(names(tmp_path, head="merge,name,into\n"))
    with pytest.raises(FileNotFoundError, match="`tripletune rag entities` writes one"):
        read_names(tmp_path / "none.tsv")


@pytest.mark.parametrize("name", ["ras", "t2rag", "gear", "ppr", "thrag", "standard"])
def test_every_system_with_triples_reads_the_names(tmp_path, name, caplog):
    passage = {"title": "", "text": "Oslo trades.", "triples": [["Oslo", "trades with", "U.S."]]}
    corpus = write_lines(tmp_path / "corpus.jsonl", [passage])
    entities = str(names(tmp_path, "yes\tU.S.\tUS"))
    system = find_system(name)
    options = SystemOptions(system=name, triples=str(corpus), entities=entities)
    tools = open_tools(options, system, system.options(), corpus, tmp_path / "index", llm=Client("x"))
    renamed = Triple("Oslo", "trades with", "US")
    if name == "thrag":
        assert tools.names.of([Triple("Oslo", "trades with", "U.S.")]) == (renamed,)
    elif name == "standard":
        assert f"--entities {entities} has no effect: standard reads no triples" in caplog.text
    elif name == "ras":
        assert tools.store.get(Passage("", "Oslo trades.")) == (renamed,)
    else:
        assert list(tools.triples) == [renamed]
