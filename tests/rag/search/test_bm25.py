import asyncio
import json
import random

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripletune.core.data.words import analyzer, word_rules
from tripletune.rag.search import bm25_build
from tripletune.rag.search.bm25_build import RowTerms, build_bm25
from tripletune.rag.search.text_index import open_text_index

TEXT = "the river of Paris runs through old towns and cafés near Łódź it is said C++ 東京都 10⁶ towns, (1990"
WORDS = TEXT.split()


def made_rows(count, seed=1):
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        title = " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))
        text = " ".join(draw.choices([*WORDS, f"rare{number % 50}"], k=draw.randint(0, 30)))
        rows.append(f"{title}\n{text}")
    return rows


def terms_by_hand(row, language="english"):
    """The terms of a row, word by word; a title of stop words is found by them."""
    terms = analyzer(language)(row)
    title, line_break, _ = row.partition("\n")
    if line_break:
        present = set(terms)
        terms += [term for term in analyzer(language)(title.partition(" (")[0]) if term not in present]
    return terms


def library_index(rows, folder, language="english"):
    """The index that bm25s makes in memory."""
    vocabulary = {}
    numbers = [[vocabulary.setdefault(term, len(vocabulary)) for term in terms_by_hand(row, language)] for row in rows]
    index = bm25s.BM25(k1=1.5, b=0.75)
    index.index((numbers, vocabulary), create_empty_token=False, show_progress=False)
    index.save(folder, allow_pickle=False, show_progress=False)
    return index


def contents(folder):
    files = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".npy":
            files[path.name] = (np.load(path).dtype, np.load(path).tolist())
        elif not path.name.startswith("."):
            files[path.name] = json.loads(path.read_text())
    return files


@given(st.text(alphabet=st.sampled_from("aAé東京ー \n\t\u00a0\u3000́̈+#.'(1⁶½ßΣſカが가각ไทย-"), max_size=40))
def test_terms_of_words_between_spaces_are_those_of_the_whole_text(row):
    terms = RowTerms(word_rules("english"))
    for _ in range(2):  # the second time from what is remembered
        numbers = terms.numbers(row)
        names = list(terms.vocabulary)
        assert [names[number] for number in numbers] == terms_by_hand(row)


@pytest.mark.parametrize("language", ["english", "german", "none"])
def test_an_index_in_parts_is_that_of_bm25s(tmp_path, monkeypatch, language):
    monkeypatch.setattr(bm25_build, "_ROW_BITS", 4)
    monkeypatch.setattr(bm25_build, "_MERGED", 40)
    rows = [*made_rows(100), "", "of the", "The Who\nA band."]
    library_index(rows, tmp_path / "library", language)
    (tmp_path / "parts").mkdir()
    build_bm25(rows, word_rules(language), tmp_path / "parts", 1.5, 0.75)
    expected, made = contents(tmp_path / "library"), contents(tmp_path / "parts")
    expected["params.index.json"].pop("version")
    made["params.index.json"].pop("version")
    assert made == expected


def test_a_killed_build_reads_only_the_rows_that_are_not_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(bm25_build, "_ROW_BITS", 4)
    rows = made_rows(70)
    numbers = RowTerms.numbers
    read = []

    def killed_at(last):
        def read_row(self, row):
            read.append(row)
            if row == last:
                raise KeyboardInterrupt
            return numbers(self, row)

        monkeypatch.setattr(RowTerms, "numbers", read_row)

    folder = tmp_path / "index"
    wanted = ("bm25", folder, {"rows": "seventy"}, lambda: iter(rows), len(rows))
    killed_at(rows[40])
    with pytest.raises(KeyboardInterrupt):
        open_text_index(*wanted)
    read.clear()
    killed_at(None)
    open_text_index(*wanted)
    assert read == rows[32:]
    (tmp_path / "whole").mkdir()
    build_bm25(rows, word_rules("english"), tmp_path / "whole", 1.5, 0.75)
    made = contents(folder / "bm25")
    made.pop("manifest.json")
    assert made == contents(tmp_path / "whole")


def test_rankings_are_those_of_all_scores_with_ties_by_number(tmp_path):
    rows = made_rows(400)
    library = library_index(rows, tmp_path / "library")
    index = open_text_index("bm25", tmp_path / "own", {"rows": "made"}, lambda: iter(rows), len(rows))
    queries = ["rare3 rare7", "paris", "Paris towns river", "old old rare9 cafés", "the of", "nothing", "", *WORDS]
    for query in queries:
        numbers = library.get_tokens_ids(analyzer("english")(query))
        scores = library.get_scores_from_ids(numbers) if numbers else np.zeros(len(rows))
        order = [row for row in np.argsort(-scores, kind="stable").tolist() if scores[row] > 0]
        for k in (1, 3, 10, 1000):
            (ranking,) = asyncio.run(index.rank([query], k))
            assert [row for row, _ in ranking] == order[:k], (query, k)
            assert [score for _, score in ranking] == scores[order[:k]].tolist()


def test_an_index_that_bm25s_wrote_is_opened_without_a_build(tmp_path):
    rows = made_rows(50)
    wanted = ("bm25", tmp_path, {"rows": "made"}, lambda: iter(rows), len(rows))
    expected = asyncio.run(open_text_index(*wanted).rank(["rare7 Paris"], 5))
    library_index(rows, tmp_path / "bm25")
    manifest = json.loads((tmp_path / "bm25/manifest.json").read_text())
    manifest["files"]["params.index.json"] = (tmp_path / "bm25/params.index.json").stat().st_size
    (tmp_path / "bm25/manifest.json").write_text(json.dumps(manifest))
    index = open_text_index("bm25", tmp_path, {"rows": "made"}, lambda: pytest.fail("built again"), len(rows))
    assert asyncio.run(index.rank(["rare7 Paris"], 5)) == expected
