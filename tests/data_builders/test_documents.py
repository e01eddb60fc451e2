import asyncio
import json
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.cli import read_lines, run
from tests.data_builders.files import LOCKED, docx, drawn_pdf, pdf
from tests.fakes import Client
from tripletune.core.data.passages import Passage, read_corpus
from tripletune.data_builders.documents import running_lines
from tripletune.data_builders.documents.build import PassageOptions, build_passages
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.extractor import TextExtractor
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.retrievers import open_retriever
from tripletune.rag.triple_store import TripleStore

MARKDOWN = """---
title: not shown

tags: [a]
---
# Handbook
The *rules* of [Velo](http://velo.example/x). All of them.

## Leave
- Twenty days.
- Ask Ida.

```
# no heading
```

| Name | Role |
|---|---|
| Ida | boss |

# Prices
Low.
"""
HTML = (
    "<title>T</title><style>p {}</style><nav>menu</nav><nav>more<main><h1>Site</h1>"
    "<p>One<br>two &amp; three.<table><tr><th>A<th>B<tr><td>1<td>2</table>"
    "<h3>Deep<a href=#deep>¶</a></h3>bare <b>text</b><h2>Next</h2><div>End.</div>"
)
PAGES = [
    ["Velo Corp 2024", "Handbook", "The com-", "pany makes bicycles in Kelm and"],
    ["sells them in Oslo.", "2. Price List", "Prices are high."],
    [],
]


def build(tmp_path, files, *words, output="mine"):
    """Write these documents beside those that are there; rows of the corpus, and what was printed."""
    for name, content in files.items():
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    ran = run("build passages", "--documents", tmp_path / "docs", "--output", tmp_path / output, *words)
    assert ran.code == 0, ran.err
    return read_lines(tmp_path / output / "corpus.jsonl"), ran.out


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a/b.md", MARKDOWN, [
            ("Handbook", "The rules of Velo. All of them."),
            ("Handbook › Leave", "Twenty days.\nAsk Ida.\n# no heading\nName | Role\nIda | boss"),
            ("Prices", "Low."),
        ]),
        ("c.HTML", HTML, [
            ("Site", "One two & three.\nA | B\n1 | 2"), ("Site › Deep", "bare text"), ("Site › Next", "End."),
        ]),
        ("d.docx", docx([("Title", "T"), ("Normal", "Of it."), ("Heading1", "A & B"), ("Normal", "One."),
                         ("Heading2", "Sub"), ("Normal", "Two.")]),
         [("T", "Of it."), ("T › A & B", "One."), ("T › A & B › Sub", "Two.")]),
        ("b.md", "# A\n## B\n## C\nText.\n# D\n", [("A › C", "Text.")]),
        ("tags.md", "# A\nRun prog --name <title> or <Select id=x/>.\n\n<nav>\n\n## B\n<button>Go</button> there.\n\n"
         "<nav><p>menu</nav>\n<p>Shown.\n\n- A <style> one\n\n<script>a</script>\n\nA <nav-x>b</nav-x>.\n\n<script> c",
         [("A", "Run prog --name <title> or <Select id=x/>.\n<nav>"),
          ("A › B", "<button>Go</button> there.\nShown.\nA <style> one\nA b.\n<script> c")]),
        ("toml.md", "+++\n# c\ntitle = \"x\"\n[extra]\na.b = 1\n+++\nBob.", [("", "Bob.")]),
        ("words.md", "---\nLast edited: 2024\n\n# c\ntags:\n- a\nflow: [a,\n  b\n]\n---\nBob.", [("", "Bob.")]),
        ("json.md", '{\n"title": "x"\n}\n\nBob.', [("", "Bob.")]),
        ("cut.txt", "Of Jean-\nLuc and Rolls-\nRoyce, COVID-\n19, 1990–\n1995, a state-of-the-\nart "
         "infor-\nmation, Haus- \nund Hof, a well-\nknown and well-known.", [("",
         "Of Jean-Luc and Rolls-Royce, COVID-19, 1990–1995, a state-of-the-art information, Haus- und Hof, "
         "a well-known and well-known.")]),
        ("rule.md", "---\n\nThe first: about Ada.\n\n---\n\nBob.\n", [("", "The first: about Ada.\nBob.")]),
        ("line.md", "---\nAbout Ada.\n\n---\nBob.\n", [("", "About Ada.\nBob.")]),
        ("key.md", "---\n\"my-key\":\n- a\n---\nBob.\n", [("", "Bob.")]),
        ("cells.html", "<p>Of <b>t</b>wo.<table><tr><th><p>City</p></th><th>\n<div>Size</div></th></tr><tr><td><p>Rome"
         "<p>(IT)</td><td><ul><li>3</li></ul></td></tr></table><p>One.</p><p>Two.</p><table><tr><td><h1>A</h1>"
         "<p>In it.</p><p>End.</p><td>Side</table>",
         [("", "Of two.\nCity | Size\nRome (IT) | 3\nOne.\nTwo."), ("A", "In it.\nEnd.\nSide")]),
        ("t.docx", docx([("Normal", "All."), ("Normal", [["City", "Size"], ["Rome", "3"]]), ("Normal", "After.")]),
         [("", "All.\nCity | Size\nRome | 3\nAfter.")]),
        ("soft.html", "<h1>Ver&shy;trag</h1><p>&shy;</p><p>Die Frist be&shy;trägt\u200b drei Ta\xadge.",
         [("Vertrag", "Die Frist beträgt\u200b drei Tage.")]),
        ("soft.csv", "title,text\nVer\xadtrag,Ta\xadge.\n", [("Vertrag", "Tage.")]),
        ("soft.txt", "Die Frist be\xad\nträgt drei Ta\xadge.", [("", "Die Frist beträgt drei Tage.")]),
        ("e.txt", "One line\nand another.\n\nA paragraph.", [("", "One line and another.\nA paragraph.")]),
        ("f.jsonl", '{"contents": "One.", "title": 7}\n{"contents": "One."}\n{"contents": "Two."}\n',
         [("7", "One."), ("", "One."), ("", "Two.")]),
        ("g.json", '[{"text": "One.", "name": "N"}]', [("N", "One.")]),
        ("h.csv", 'title;body\nX;"a ""b"", c;d"\nY;"two\n\nparts"\n', [("X", 'a "b", c;d'), ("Y", "two\nparts")]),
        ("i.tsv", "text\tid\nOne, two.\t1\n", [("", "One, two.")]),
    ],
)  # fmt: skip
def test_each_kind_of_document_is_read_under_its_headings(tmp_path, name, content, expected):
    rows, _ = build(tmp_path, {name: content})
    assert [(row.get("heading", ""), row["text"]) for row in rows] == expected
    assert {row["document"] for row in rows} == {name}
    assert [row["title"] for row in rows] == [" › ".join(filter(None, (name, heading))) for heading, _ in expected]
    text = "\n".join(row["text"] for row in rows)
    assert all(text[slice(*row["position"])] == row["text"] for row in rows)
    (first, *_) = read_corpus(tmp_path / "mine")
    assert (first.id, first.source["document"]) == (Passage(first.title, first.text).id, name)


def test_a_page_of_a_pdf_is_cited_and_a_sentence_over_two_pages_is_one(tmp_path):
    rows, out = build(tmp_path, {"a.pdf": pdf(PAGES, [("Handbook", 0), ("Price  List", 1)])})
    assert [(row.get("heading"), row["page"], row["text"]) for row in rows] == [
        (None, 1, "Velo Corp 2024"),
        ("Handbook", 1, "The company makes bicycles in Kelm and sells them in Oslo."),
        ("Price List", 2, "Prices are high."),
    ]
    assert "pages without text (1): a.pdf" in out
    rows, out = build(tmp_path, {"a.pdf": pdf([["The same."], ["The same."], ["Other."]])})
    assert [(row["page"], row["text"]) for row in rows] == [(1, "The same."), (3, "Other.")]
    assert "passages that repeat another passage of the document (1): a.pdf" in out


def test_what_a_pdf_repeats_on_its_pages_is_left_out_and_its_title_is_a_heading(tmp_path):
    def page(number, *lines):
        text = [(72, 700 - 14 * place, 11, line) for place, line in enumerate(lines)]
        return [(72, 760, 9, "Annual Report 2024"), *text, (300, 30, 9, f"{number + 6} | Velo")]

    pages = [
        page(1, "It sells bicycles in", "the coun-"),
        page(2, "tryside of Kelm.", "1,450 crowns."),
        page(3, "The end."),
    ]
    rows, out = build(
        tmp_path, {"a.pdf": drawn_pdf(pages, "/Title (Velo in 2024)"), "b.pdf": drawn_pdf(pages[2:], "/Title (a.docx)")}
    )
    assert [(row["title"], row["page"], row["text"]) for row in rows] == [
        ("a.pdf › Velo in 2024", 1, "It sells bicycles in the countryside of Kelm."),
        ("a.pdf › Velo in 2024", 2, "1,450 crowns."),
        ("a.pdf › Velo in 2024", 3, "The end."),
        ("b.pdf", 1, "Annual Report 2024\nThe end.\n9 | Velo"),
    ]
    assert "headers, footers and page numbers left out (1): a.pdf (6)" in out


def test_large_and_bold_lines_of_a_pdf_without_outline_are_headings(tmp_path):
    def below(top, *lines):
        return [(72, top - 14 * place, 11, line) for place, line in enumerate(lines)]

    first = [
        (72, 760, 22, "The Tide Laboratory"),
        (72, 735, 14, "by Hugo Marr"),
        (72, 690, 15, "Buoys and"),
        (72, 672, 15, "gauges"),
        (72, 650, 11, "Lantern Buoy", "bold"),
        *below(634, "The Lantern Buoy was built in 1931", "and lies off Velsund."),
        (72, 580, 11, "A boat visits it each month.", "bold"),
        *below(560, "It carries"),
        (72, 530, 11, "Depth", "bold"),
        (200, 530, 11, "40 m"),
        *below(500, "People"),
    ]
    second = [
        *below(700, "of Kelm."),
        (72, 650, 11, "Hugo Marr", "bold"),
        *below(630, "He leads it."),
        (72, 590, 22, "End"),
    ]
    rows, _ = build(tmp_path, {"a.pdf": drawn_pdf([first, second], "/Title (The tide laboratory)")})
    buoy = "The tide laboratory › Buoys and gauges › Lantern Buoy"
    assert [(row.get("heading"), row["page"], row["text"]) for row in rows] == [
        ("The tide laboratory", 1, "by Hugo Marr"),
        (buoy, 1, "The Lantern Buoy was built in 1931 and lies off Velsund.\nA boat visits it each month. It carries\n"
         "Depth 40 m\nPeople of Kelm."),
        ("The tide laboratory › Buoys and gauges › Hugo Marr", 2, "He leads it.\nEnd"),
    ]  # fmt: skip


def test_a_heading_as_large_as_the_title_of_the_pdf_above_it_is_another_heading(tmp_path):
    page = [
        (72, 760, 18, "Lesk Ceramics:"),
        (72, 740, 18, "Report 2023"),
        (72, 718, 18, "The"),
        (72, 698, 18, "company"),
        (72, 670, 11, "It makes stoneware in Marlow, and has done so since it was founded in 1952."),
        (72, 630, 18, "Staff"),
        (72, 600, 11, "It has 43 employees, three more than a year before."),
    ]
    rows, _ = build(tmp_path, {"a.pdf": drawn_pdf([page], "/Title (Lesk Ceramics: Report 2023)")})
    title = "Lesk Ceramics: Report 2023"
    assert [row["heading"] for row in rows] == [f"{title} › The company", f"{title} › Staff"]


def test_a_heading_alone_is_no_passage_but_a_list_of_headings_is(tmp_path):
    files = {
        "a.md": "# Staff\n## Ann\n## Bo\n## Cy\nShe dives.\n# Closing\n",
        "b.docx": docx([("Title", "Report"), ("Heading1", "Costs"), ("Normal", "None."), ("Heading1", "End")]),
        "c.md": "# Only a title\n",
    }
    rows, out = build(tmp_path, files)
    assert [(row["title"], row["text"]) for row in rows] == [
        ("a.md › Staff", "Ann\nBo"), ("a.md › Staff › Cy", "She dives."), ("b.docx › Report › Costs", "None."),
    ]  # fmt: skip
    assert "headings without text left out (2): a.md; b.docx" in out
    assert "left out, without text (1): c.md (only a heading)" in out


def test_the_last_cell_of_a_table_is_no_page_number(tmp_path):
    cells = [(72, 700, 11, "Bike"), (200, 700, 11, "Seats"), (72, 686, 11, "Gull"), (200, 686, 11, "2")]
    rows, _ = build(
        tmp_path, {"a.pdf": drawn_pdf([[*cells, (72, 672, 11, "Tern"), (200, 672, 11, "1"), (300, 30, 9, "- 1 -")]])}
    )
    assert [row["text"] for row in rows] == ["Bike | Seats\nGull | 2\nTern | 1"]


def test_initials_cut_names_and_text_beyond_the_page_of_a_pdf(tmp_path):
    first = [(72, 686, 36, "A"), (104, 706, 12, "nn Vel was born in Kelm"), (104, 690, 12, "and moved to the city of"),
             (72, 670, 12, "Velsund. Its poet is Jean-"), (72, -40, 12, "secret")]  # fmt: skip
    rows, notes = build(tmp_path, {"a.pdf": drawn_pdf([first, [(72, 700, 12, "Luc Vel of Rell.")]])})
    text = "Ann Vel was born in Kelm and moved to the city of Velsund. Its poet is Jean-Luc Vel of Rell."
    assert [" ".join(row["text"].split()) for row in rows] == [text]
    assert "characters beyond the page left out (1): a.pdf (6)" in str(notes)


def test_parquet_has_a_column_that_is_named(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "docs").mkdir()
    pq.write_table(pa.table({"answer": ["One.", None], "text": ["x", "y"]}), tmp_path / "docs" / "a.parquet")
    rows, out = build(tmp_path, {}, "--text-column", "answer")
    assert [row["text"] for row in rows] == ["One."]
    assert "rows without text (1): a.parquet" in out


def test_all_text_columns_that_are_named_are_read(tmp_path):
    files = {
        "a.csv": "product,price,site,note\nTG-40,1200,Kelm,Sold out.\nTG-50,,Rell,\n,,Velsund,\n",
        "b.jsonl": json.dumps({"product": "TG-60", "price": 1300}) + "\n" + json.dumps({"product": "TG-70"}) + "\n",
        "c.csv": "price\n1400\n",
        "d.csv": "text,content\nA mill.,A bridge.\n",
    }
    rows, out = build(tmp_path, files, "--text-column", "note,product,price")
    assert [row["text"] for row in rows] == [
        "note: Sold out. product: TG-40; price: 1200", "product: TG-50", "product: TG-60; price: 1300", "TG-70", "1400",
    ]  # fmt: skip
    assert "rows with columns that are not read (site) (1): a.csv (3)" in out
    assert "d.csv (the columns are text, content; name one with --text-column)" in out
    rows, _ = build(tmp_path, files)
    assert [row["text"] for row in rows] == ["A mill."], "the default names are alternatives"


@pytest.mark.parametrize(
    ("text", "encoding", "read"),
    [
        ("Müller wohnt in Köln und heißt Jürgen.", "cp1252", "cp1252"),
        ("Zażółć gęślą jaźń, proszę bardzo.", "cp1250", "cp1250"),
        ("Привет, это короткий текст о городе Москва.", "cp1251", "cp1251"),
        ("これは日本語の文章です。東京に住んでいます。", "shift_jis", "cp932"),
        ("Grüße aus Köln.", "utf-16", "utf-16"),
        ("Grüße aus Köln.", "utf-8-sig", None),
        ("a" * 70_000 + " Grüße.", "utf-8", None),
        (
            "The old house stands near the river.\n" * 2_000 + " Straße am Nordufer, Grüße aus München, schöne Häuser.",
            "cp1252",
            "cp1252",
        ),
    ],
)
def test_encodings(tmp_path, text, encoding, read):
    rows, out = build(tmp_path, {"a.txt": text.encode(encoding)}, "--size", "100000")
    assert [row["text"].replace("\n", "") for row in rows][-1].endswith(text[-12:])
    assert (f"read as {read} (1): a.txt" in out) == (read is not None)


POLISH = "Miasto Świnoujście leży nad morzem, a mieszkańcy żyją z żeglugi i są dumni."
PAGE = f'<html><head><meta charset="{{}}"></head><body><p>{POLISH}</p></body></html>'


@pytest.mark.parametrize(
    ("name", "content", "text", "said"),
    [
        ("cut.txt", "Die Käufer für Bü".encode()[:-1], "Die Käufer für B\ufffd", "not UTF-8 (1): cut.txt"),
        ("long.txt", ("Käufer. " * 9_000 + "500 €").encode()[:-1], None, "not UTF-8 (1): long.txt (2)"),
        ("stray.md", "Grüße aus ".encode() + b"K\xf6ln.", "Grüße aus K\ufffdln.", "not UTF-8 (1): stray.md"),
        ("stray.html", PAGE.format("iso-8859-1").encode() + b"\xe9", f"{POLISH}\n\ufffd", "not UTF-8 (1): stray.html"),
        ("valid.txt", "Was \ufffd\ufffd before.", "Was \ufffd\ufffd before.", None),
        ("end.txt", b"A text that ends with a caf\xe9", "A text that ends with a café", "read as cp1252 (1): end.txt"),
        ("a.html", PAGE.format("iso-8859-2").encode("iso-8859-2"), POLISH, "read as iso-8859-2 (1): a.html"),
        ("b.htm", f"<?xml encoding='ISO-8859-2'?><p>{POLISH}".encode("iso-8859-2"), POLISH, "read as ISO-8859-2 (1)"),
        ("c.html", b"<META content='text/html; charset=iso-8859-15'>500 \xa4", "500 €", "read as iso-8859-15 (1)"),
        ("d.html", b"<meta charset=iso-8859-1>\x93So gro\xdf\x94, sagt K\xf6ln.", "“So groß”, sagt Köln.", "cp1252"),
        ("e.html", PAGE.format("utf-16").encode("cp1250"), POLISH, "read as cp1250 (1): e.html"),
        ("f.html", PAGE.format("nothing").encode("cp1250"), POLISH, "read as cp1250 (1): f.html"),
        ("g.txt", PAGE.format("cp1251").encode("cp1250"), None, "read as cp1250 (1): g.txt"),
    ],
)
def test_damaged_utf8_stays_utf8_and_html_declares_its_encoding(tmp_path, name, content, text, said):
    rows, out = build(tmp_path, {name: content}, "--size", "100000")
    assert text in (None, "\n".join(row["text"] for row in rows))
    assert said in out if said else "(1)" not in out


def test_rows_of_which_text_may_be_lost_are_counted(tmp_path):
    table = 'A\t"Dune" is old.\nB\t"The start.\nC\tJane wrote Emma.\nD\tLeo wrote "War".\nE\t"Two\nlines."\n'
    files = {"a.csv": "title,text\nDune,A novel, set on Arrakis.\nEmma,Short.\n", "b.tsv": f"title\ttext\n{table}"}
    files["c.csv"] = 'title,text\nA,"With a\ttab,\nand a line."\n'
    files["d.csv"] = "title,text,site,since\nAda,Leads.,Oslo,1990\nBo,Cooks.,,\nCy,Drives.,Rome,\n"
    rows, out = build(tmp_path, files)
    for said in (out, (tmp_path / "mine" / "README.md").read_text()):
        assert "rows with more fields than the header (1): a.csv\n" in said
        assert "rows that a quote without end seems to join (1): b.tsv\n" in said
        assert "rows with columns that are not read (site, since) (1): d.csv (2)\n" in said
    assert [row["text"] for row in rows if row["document"] == "c.csv"] == ["With a tab, and a line."]


def test_what_can_not_be_read_is_named_by_reason_and_stops_nothing(tmp_path):
    docs = tmp_path / "docs"
    files = {
        "good.txt": "Good.", "blank.md": " \n\n", "empty.md": "", "binary.txt": bytes(range(64)) * 9, "noend": "x",
        "image.png": "x", ".hidden.md": "x", ".git/a.md": "x", "broken.pdf": b"%PDF-1.4 junk", "broken.docx": b"PK",
        "locked.pdf": pdf([["a"]], extra=LOCKED), "scan.pdf": pdf([[], []]), "other.csv": "a,b\n1,2\n",
        "bad.jsonl": '{"text": "fine"}\nnot json\n', "cut.parquet": b"PAR1", "number.jsonl": '{"text": 7}\n',
    }  # fmt: skip
    docs.mkdir()
    (docs / "link.md").symlink_to(docs / "good.txt")
    (docs / "out").symlink_to(tmp_path)
    os.mkfifo(docs / "pipe.txt")
    rows, out = build(tmp_path, files)
    assert [row["document"] for row in rows] == ["good.txt"]
    reasons = {
        "hidden": [".git", ".hidden.md"], "empty": ["empty.md"], "without text": ["blank.md", "scan.pdf (scanned"],
        "needs a password": ["locked.pdf"], "links, which are not followed": ["link.md", "out"],
        "binary": ["binary.txt"], "of a kind that is not read": ["image.png (.png)", "noend (no ending)"],
        "not a regular file": ["pipe.txt"],
        "damaged": ["bad.jsonl (2: not", "broken.docx", "broken.pdf", "cut.parquet", "number.jsonl (1: text"],
        "no text column": ["other.csv (the columns are a, b; name one with --text-column)"],
    }  # fmt: skip
    card = (tmp_path / "mine" / "README.md").read_text()
    lines = {line.split(" (")[0]: line for line in card.splitlines() if line.startswith("- ")}
    assert set(lines) == {f"- left out, {reason}" for reason in reasons}
    for reason, names in reasons.items():
        line = lines[f"- left out, {reason}"]
        assert f"({len(names)}): " in line
        assert all(name in line for name in names)
    assert "1 documents: 1 new; 1 passages new, 0 gone, 1 in all" in out


def test_where_nothing_can_be_read_it_says_why(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.png").write_text("x")
    words = ["--output", tmp_path / "mine"]
    ran = run("build passages", "--documents", tmp_path / "docs", *words)
    assert ran.code == 2
    assert ran.error.endswith("docs: no document was found; left out, of a kind that is not read (1): a.png (.png)")
    assert run("build passages", "--documents", tmp_path / "none", *words).error.endswith(f"{tmp_path / 'none'}")
    assert not (tmp_path / "mine" / "corpus.jsonl").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "corpus.jsonl").write_text("mine")
    ran = run("build passages", "--documents", tmp_path / "docs", "--output", tmp_path / "other")
    assert "files that this program did not make (corpus.jsonl)" in ran.error


def test_several_paths_are_named_from_the_folder_that_holds_them(tmp_path):
    for name in ("x/docs/a.md", "y/docs/a.md", "z.md", "y/other.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Text.")
    paths = [tmp_path / one for one in ("x/docs", "y/docs", "y/docs/a.md", "z.md")]
    build_passages(PassageOptions(), paths, tmp_path / "mine")
    assert [one.title for one in read_corpus(tmp_path / "mine")] == ["x/docs/a.md", "y/docs/a.md", "z.md"]


def sentences(count, seed=0):
    rng = random.Random(seed)
    return " ".join(f"Part {rng.randrange(10**6)} of it is in {rng.randrange(10**6)}." for _ in range(count))


def test_only_what_has_changed_is_read_and_counted(tmp_path, monkeypatch):
    files = {
        "a.md": f"# A\n{sentences(400)}\n## B\nEnd.",
        "b.txt": sentences(9, 1),
        "c.txt": "Gone. Soon.",
        "d.txt": "D",
    }
    before, out = build(tmp_path, files)
    assert f"4 documents: 4 new; {len(before)} passages new, 0 gone, {len(before)} in all" in out
    read = []
    from tripletune.data_builders.documents import build as module

    plain = module.read_blocks
    monkeypatch.setattr(module, "read_blocks", lambda path, *more: read.append(path.name) or plain(path, *more))
    (tmp_path / "docs" / "c.txt").unlink()
    (tmp_path / "docs" / "d.txt").write_text("")
    after, out = build(tmp_path, {"a.md": f"# A\nA new sentence. {files['a.md'][4:]}", "e.txt": "New."})
    assert sorted(read) == ["a.md", "d.txt", "e.txt"]
    old, new = ({row["id"] for row in rows} for rows in (before, after))
    changes = f"{len(new - old)} passages new, {len(old - new)} gone, {len(after)} in all"
    assert f"4 documents: 1 changed, 1 kept, 1 no longer read, 1 new, 1 deleted; {changes}" in out
    assert 2 <= len(new - old) <= 5 < len(before) / 2
    # Built at once it has the same bytes; with another size it is read again.
    build(tmp_path, {}, output="again")
    for name in ("corpus.jsonl", "README.md"):
        assert (tmp_path / "mine" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    _, out = build(tmp_path, {"e.txt": "Newer."}, "--size", "500")
    assert "3 documents: 2 read with other options, 1 changed" in out


def test_options_that_an_earlier_build_had_are_named(tmp_path, monkeypatch):
    files = {"a.md": "A.", "b.csv": "name,notes\nTG-40,It hums.\n"}
    columns = ["--text-column", "notes,my notes"]
    before, out = build(tmp_path, files, *columns, "--size", 500)
    assert "--" not in out
    _, out = build(tmp_path, {})
    assert "1 read with other options, 1 no longer read" in out
    again = "give --text-column 'notes,my notes' again to have the earlier passages"
    assert f"\n  --text-column was 'notes,my notes', now the default: {again}\n" in out
    assert "\n  --size was 500, now 1000: give --size 500 again to have the earlier passages\n" in out
    after, out = build(tmp_path, {}, *columns, "--size", 500, "--title-column", "name")
    assert (
        "\n  --title-column was the default, now name: leave out --title-column to have the earlier passages\n" in out
    )
    assert (after[0], after[1]["heading"]) == (before[0], "TG-40")
    monkeypatch.setattr("tripletune.data_builders.documents.build._VERSION", 0)
    _, out = build(tmp_path, {}, *columns, "--size", 500, "--title-column", "name")
    assert ("2 read in another way than before;" in out, "--" in out) == (True, False)


def test_a_folder_with_none_of_the_documents_is_warned_of(tmp_path):
    build(tmp_path, {"a.md": "A.", "b.md": "B."})
    (tmp_path / "docs" / "a.md").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "c.md").write_text("C.")
    for folder, warned in (("docs", False), ("other", True)):
        ran = run("build passages", "--documents", tmp_path / folder, "--output", tmp_path / "mine")
        assert (f"{tmp_path / 'other'} has none of the 1 documents from which" in ran.err) is warned


def test_one_more_folder_does_not_rename_all_documents(tmp_path):
    before, _ = build(tmp_path, {"a.md": "A.", "b.md": "B."})
    (tmp_path / "more.md").write_text("C.")
    ran = run("build passages", "--documents", tmp_path / "docs", tmp_path / "more.md", "--output", tmp_path / "mine")
    assert (ran.code, "a.md in" in ran.error, "would become docs/a.md" in ran.error) == (2, True, True)
    assert build(tmp_path, {})[0] == before


def test_what_comes_after_reads_new_passages_alone(tmp_path):
    texts = {"a.md": f"# A\n{sentences(200)}", "b.txt": sentences(20, 1)}
    store, encoded = TripleStore(tmp_path / "triples.sqlite"), []

    def encode(rows, kind):
        encoded.extend(rows)
        return np.ones((len(rows), 4))

    def after():
        """Passages that an extractor and an encoder read."""
        embedder = Embedder("counting", encode)
        assert embedder.width == 4
        encoded.clear()
        client = Client(answer=lambda asked: "(S> a| P> b| O> c)")
        extraction = CorpusExtraction(TextExtractor(client, "instruction"), store)
        asyncio.run(extraction.run(read_corpus(tmp_path / "mine")))
        open_retriever("dense", tmp_path / "mine", tmp_path / "index", embedder)
        return len(client.asked), len(encoded)

    before, _ = build(tmp_path, texts)
    assert after() == (len(before), len(before))
    rows, _ = build(tmp_path, {"a.md": texts["a.md"].replace("# A", "# A\nA new sentence."), "c.txt": "New."})
    added = len({row["id"] for row in rows} - {row["id"] for row in before})
    assert after() == (added, added)
    assert added < len(rows) / 2


KILLED = """
import os, signal, sys
from pathlib import Path
from tripletune.data_builders.documents import build
plain = build.read_blocks
def read(path, *more):
    for number, block in enumerate(plain(path, *more)):
        if path.name == "b.txt" and number:
            os.kill(os.getpid(), signal.SIGKILL)
        yield block
build.read_blocks = read
build.build_passages(build.PassageOptions(), [sys.argv[1]], sys.argv[2])
"""


@pytest.mark.parametrize("update", [False, True])
def test_a_build_that_was_killed_is_continued(tmp_path, update):
    files = {"a.txt": "A.", "b.txt": "B.\n\nC.", "d.txt": "D."}
    if update:
        old, _ = build(tmp_path, {name: "Old. " for name in files})
    else:
        build(tmp_path, files, output="other")
    for name, text in files.items():
        (tmp_path / "docs" / name).write_text(text)
    words = [sys.executable, "-c", KILLED, tmp_path / "docs", tmp_path / "mine"]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    corpus = tmp_path / "mine" / "corpus.jsonl"
    assert read_lines(corpus) == old if update else not corpus.exists()
    rows, out = build(tmp_path, {})
    assert "1 kept, 2 changed" in out if update else "1 kept, 2 new" in out
    assert [row["text"] for row in rows] == ["A.", "B.\nC.", "D."]


def test_an_own_file_beside_the_corpus_stays(tmp_path):
    build(tmp_path, {"a.txt": "A."})
    (tmp_path / "mine" / "triples.sqlite").write_text("mine")
    build(tmp_path, {"a.txt": "B."})
    assert (tmp_path / "mine" / "triples.sqlite").read_text() == "mine"
    assert json.loads((tmp_path / "mine" / "corpus.jsonl").read_text())["text"] == "B."


@pytest.mark.parametrize("line", ["3", "Page 3 of 12", "Seite 3 von 12", "Pagina 3 van 12", "- 3/12 -"])
def test_a_page_number_is_known_in_other_languages(line):
    assert running_lines._PAGE_NUMBER.fullmatch(line)[1] == "3"
    assert running_lines._repetition_keys("Velo 3 van 12", 2) & running_lines._repetition_keys("Velo 4 van 12", 3)
