import json
from collections import Counter

import pytest

from tests.cli import read_lines
from tripletune.core.data.passages import read_corpus
from tripletune.core.files import file_digest
from tripletune.data_builders.world import SPLITS
from tripletune.data_builders.world.build import WorldOptions, generate_world, write_world
from tripletune.data_builders.world.questions import KINDS

OPTIONS = WorldOptions(seed=3, train=120, validation=40, test=40, noise=0.1)
FILES = {
    f"{split}{ending}" for split in SPLITS for ending in (".jsonl", ".teacher.jsonl", ".corpus.jsonl", ".triples.jsonl")
}
DEMO = "Director,Author,Founder,Mayor,Birthplace,Birth year,Country,River"
# Of `.corpus.jsonl`, `.jsonl`, `.teacher.jsonl` and `.triples.jsonl`: results that others have measured depend on them.
NOISY = ["fca82f84c55c9b86", "a181c234df82f99f", "848e83327ae25f54", "9ac4af895e3d39f0"]
EXAM = ["21e96a40c449f889", "124bd6a6435819d4", "77029c9827787fd7", "efb293ff44c4ff34"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "made"
    write_world(OPTIONS, folder)
    return folder


@pytest.mark.parametrize(
    ("options", "digests"),
    [
        (WorldOptions(seed=3, train=60, validation=0, test=0, noise=1.0, comparison=0.4, intersection=0.4), NOISY),
        (
            WorldOptions(
                train=0, validation=0, test=40, common_knowledge=0.15, about=DEMO, wordings=1, one_hop=0.42,
                two_hop=0.36, three_hop=0.03, four_hop=0, comparison=0.1, intersection=0.09,
            ),
            EXAM,
        ),
    ],
    ids=["noisy names, all kinds of questions", "what the demo is examined in"],
)  # fmt: skip
def test_the_world_of_a_seed_stays_the_same(options, digests, tmp_path):
    write_world(options, tmp_path / "world")
    files = sorted((tmp_path / "world").glob("*.jsonl"))
    assert [file_digest(file)[:16] for file in files] == digests


def test_a_split_does_not_depend_on_the_others():
    alone = generate_world(WorldOptions(seed=3, train=0, validation=0, test=40, noise=0.1), "test")
    assert alone == generate_world(OPTIONS, "test")


def test_no_two_splits_share_an_article_or_a_question(folder):
    for name, key in ((".corpus.jsonl", "title"), (".jsonl", "question"), (".jsonl", "_id")):
        texts = [{row[key] for row in read_lines(folder / f"{split}{name}")} for split in SPLITS]
        assert len(set.union(*texts)) == sum(map(len, texts))


def test_supporting_sentences_state_what_is_needed(folder):
    teacher = {row["_id"]: row for row in read_lines(folder / "train.teacher.jsonl")}
    for row in read_lines(folder / "train.jsonl"):
        gold = teacher[row["_id"]]
        assert [title for title, _ in row["supporting_facts"]] == gold["helpful"]
        if gold["kind"] in ("1-hop", "2-hop", "3-hop", "4-hop"):
            stated = [dict(row["context"])[title][index] for title, index in row["supporting_facts"]]
            assert all(found in text for found, text in zip([*gold["helpful"][1:], row["answer"]], stated))


def test_store_and_corpus_cover_every_paragraph_with_the_text_a_reader_sees(folder):
    corpus = {passage.title: passage.text for passage in read_corpus(folder / "train.corpus.jsonl")}
    store = read_lines(folder / "train.triples.jsonl")
    assert corpus == {row["title"]: row["text"] for row in store}
    assert all(3 <= len(row["triples"]) <= 7 for row in store)
    for row in read_lines(folder / "train.jsonl"):
        assert all(corpus[title] == " ".join(s.strip() for s in sentences) for title, sentences in row["context"])


def test_the_manifest_counts_what_was_written(folder):
    manifest = json.loads((folder / "world.json").read_text())
    assert {path.name for path in folder.iterdir()} == FILES | {"world.json"}
    assert manifest["options"]["seed"] == 3
    for split in SPLITS:
        counted = Counter(row["kind"] for row in read_lines(folder / f"{split}.teacher.jsonl"))
        assert manifest["splits"][split]["kinds"] == {kind: counted[kind] for kind in KINDS} == OPTIONS.counts(split)
        assert all(counted.values())
        assert manifest["splits"][split]["articles"] == len(read_lines(folder / f"{split}.corpus.jsonl"))


@pytest.mark.parametrize("names", [["train.jsonl"], ["train.jsonl", "world.json", "notes.txt"]])
def test_files_that_are_no_world_are_never_replaced(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match="did not make"):
        write_world(OPTIONS, tmp_path, overwrite=True)
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_counts_add_up_and_follow_the_shares():
    for train in (1, 7, 33, 600):
        assert sum(WorldOptions(train=train).counts("train").values()) == train
    assert WorldOptions(train=600).counts("train") == {
        "1-hop": 132, "2-hop": 211, "3-hop": 63, "4-hop": 27, "comparison": 53, "intersection": 42, "common": 72,
    }  # fmt: skip
    only = WorldOptions(train=50, common_knowledge=0, one_hop=0, three_hop=0, four_hop=0, comparison=0, intersection=0)
    assert only.counts("train")["2-hop"] == 50


def test_an_unknown_relation_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"about: 'Directr' is not one of .*did you mean Director"):
        WorldOptions(about="Directr,Author")
    with pytest.raises(ValueError, match=r"wordings: -99: a relation has at most \d wordings"):
        WorldOptions(wordings=-99)
