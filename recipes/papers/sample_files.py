"""Write the public files that the scripts beside it read, as a sample: a made-up world in each published layout.

    python recipes/papers/sample_files.py FOLDER

The layouts are those that the projects' own code reads: RAS's training data, WikiOFGraph, Atlas's dumps, Self-RAG's and
ALCE's evaluation files, HotpotQA, 2WikiMultiHopQA and MuSiQue. No content is theirs: all names are coined (`tripletune
build world`), so that a sample is small, free, and known to no model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tripletune.core.command_line import CommandParser
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.triples import Triple, format_triples
from tripletune.core.files import json_line, write_text
from tripletune.core.program import run_program
from tripletune.data_builders.world.build import WorldOptions, write_world

Row = dict[str, Any]
# Of these questions each of the three multi-hop sets has a third, of which `build corpus` draws eight and four.
_WORLD = WorldOptions(seed=7, train=36, validation=0, test=24, common_knowledge=0.1)
_PLANNER = "You are a planner: decide whether to answer, or what to look up next."
_ANSWERER = "You are an answerer: answer the question from the graph information."


def write_sample(folder: Path) -> None:
    """Write all files; the world itself stays in FOLDER/world, for the stub that stands in for a paid teacher."""
    world = folder / "world"
    write_world(_WORLD, world, overwrite=True)
    train = _read_rows(world / "train.jsonl")
    test = _read_rows(world / "test.jsonl")
    replies = _read_rows(world / "train.teacher.jsonl")
    passages = _read_rows(world / "test.triples.jsonl")
    _write_training(folder, train, replies, _read_rows(world / "train.triples.jsonl"))
    _write_wikipedia(folder, passages)
    _write_self_rag(folder, test, passages)
    _write_alce(folder, test, passages)
    _write_multi_hop(folder, train, test)


def as_musique(row: Row) -> Row:
    """A question in HotpotQA's layout as a row of MuSiQue; the decomposition stays empty."""
    supporting = {title for title, _ in row["supporting_facts"]}
    paragraphs = []
    for place, (title, sentences) in enumerate(row["context"]):
        text = " ".join(sentences)
        paragraphs.append({"idx": place, "title": title, "paragraph_text": text, "is_supporting": title in supporting})
    return {
        "id": f"2hop__{row['_id']}",
        "question": row["question"],
        "answer": row["answer"],
        "answer_aliases": [],
        "answerable": True,
        "question_decomposition": [],
        "paragraphs": paragraphs,
    }


def _read_rows(path: Path) -> list[Row]:
    """The objects of a file of JSON lines."""
    return [row for _, row in read_jsonl(path)]


def _write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines, and the folder of the file if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json_line(row) for row in rows))


def _write_array(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as one JSON array, as HotpotQA and ALCE are published."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(rows, ensure_ascii=False))


def _write_training(folder: Path, questions: Sequence[Row], replies: Sequence[Row], passages: Sequence[Row]) -> None:
    """Write RAS's `train_data.jsonl` (figures 9 to 13) and WikiOFGraph's pairs."""
    released = []
    for question, reply in zip(questions, replies, strict=True):
        released += _released_rows(question, reply)
    _write_lines(folder / "train_data.jsonl", released)
    pairs = []
    for passage in passages:
        facts = [f"(<S> {s}| <P> {p}| <O> {o})" for s, p, o in passage["triples"]]
        pairs.append({"triplet": ", ".join(facts), "text": passage["text"]})
    _write_lines(folder / "wikiofgraph.jsonl", pairs)


def _released_rows(question: Row, reply: Row) -> list[Row]:
    """The planning rows and the answering row of a question, as the authors print them."""
    asked = question["question"]
    if not reply["helpful"]:
        return [
            _released_row(_PLANNER, "", asked, "[NO_RETRIEVAL]"),
            _released_row(_ANSWERER, "", asked, question["answer"]),
        ]
    rows = []
    history = ""
    queries = [step["question"] for step in reply["subqueries"]]
    for step, following in zip(reply["subqueries"], [*queries[1:], None], strict=True):
        texts = []
        for fields in reply["triples"].get(step["title"], []):
            texts.append(format_triples([Triple(*fields)]))
        history += f"[SUBQ] {step['question']}\nRetrieved Graph Information: {texts}\n"
        label = "[SUFFICIENT]" if following is None else f"[SUBQ] {following}"
        rows.append(_released_row(_PLANNER, history, asked, label))
    return [*rows, _released_row(_ANSWERER, history, asked, question["answer"])]


def _released_row(instruction: str, history: str, question: str, label: str) -> Row:
    """A row of RAS's training file, whose graphs are left empty here: the history has their triples as text."""
    return {"input": f"{instruction}\n\n{history}Question: {question}", "label": label, "graphs": []}


def _write_wikipedia(folder: Path, passages: Sequence[Row]) -> None:
    """Write Atlas's two files of each year; `infobox.jsonl` counts its ids from 0, too."""
    for year in (2018, 2020):
        texts = []
        boxes = []
        for place, passage in enumerate(passages):
            row = {"id": str(place), "title": passage["title"], "section": "", "text": passage["text"]}
            texts.append(row | {"section": "History" if place % 3 == 0 else ""})
            boxes.append(row | {"text": "; ".join(f"{p}: {o}" for _, p, o in passage["triples"])})
        _write_lines(folder / f"enwiki-dec{year}/text-list-100-sec.jsonl", texts)
        _write_lines(folder / f"enwiki-dec{year}/infobox.jsonl", boxes[:20])


def _five_contexts(question: Row, passages: Sequence[Row]) -> list[Row]:
    """Five passages as a web search might return them: the question's own first."""
    titles = [title for title, _ in question["supporting_facts"]]
    ranked = sorted(passages, key=lambda passage: passage["title"] not in titles)
    return [{"id": str(place), "title": row["title"], "text": row["text"]} for place, row in enumerate(ranked[:5])]


def _write_self_rag(folder: Path, questions: Sequence[Row], passages: Sequence[Row]) -> None:
    """Write Self-RAG's evaluation files of PopQA, TriviaQA, PubHealth and ARC."""
    popqa = []
    triviaqa = []
    claims = []
    choices = []
    for place, row in enumerate(questions):
        contexts = _five_contexts(row, passages)
        answers = [row["answer"]]
        asked = {"question": row["question"], "answers": answers, "ctxs": contexts}
        popqa.append({"id": place, "possible_answers": json.dumps(answers)} | asked)
        triviaqa.append(asked)
        claim = f'The answer to "{row["question"]}" is {row["answer"]}.'
        label = "true" if place % 2 else "false"
        claims.append({"claim_id": str(place), "claim": claim, "label": label, "answers": [label], "question": claim})
        options = {"text": [row["answer"], "none of them"], "label": ["A", "B"]}
        choices.append({"id": f"c{place}", "question": row["question"], "choices": options, "answerKey": "A"})
    _write_lines(folder / "popqa_longtail_w_gs.jsonl", popqa)
    _write_lines(folder / "triviaqa_test_w_gs.jsonl", triviaqa)
    _write_lines(folder / "health_claims_processed.jsonl", claims)
    _write_lines(folder / "arc_challenge_processed.jsonl", choices)


def _write_alce(folder: Path, questions: Sequence[Row], passages: Sequence[Row]) -> None:
    """Write ALCE's files of ASQA and ELI5."""
    asqa = []
    eli5 = []
    for row in questions:
        docs = _five_contexts(row, passages)
        long_answer = f"{row['question']} It is {row['answer']}."
        reading = {"question": row["question"], "short_answers": [row["answer"]], "context": "No context provided"}
        annotation = {"long_answer": long_answer, "knowledge": []}
        asked = {"question": row["question"], "answer": long_answer, "docs": docs}
        asqa.append({"sample_id": row["_id"], "qa_pairs": [reading], "annotations": [annotation]} | asked)
        eli5.append(asked | {"question_ctx": "", "claims": [long_answer]})
    _write_array(folder / "asqa_eval_gtr_top100.json", asqa)
    _write_array(folder / "eli5_eval_bm25_top100.json", eli5)


def _write_multi_hop(folder: Path, train: Sequence[Row], test: Sequence[Row]) -> None:
    """Write files of HotpotQA, 2WikiMultiHopQA and MuSiQue, each with a third of the questions."""
    _write_array(folder / "hotpot_train_v1.1.json", train[::3])
    _write_array(folder / "hotpot_dev_distractor_v1.json", test[::3])
    for name, rows in {"train": train, "dev": test}.items():
        _write_array(folder / f"2wikimultihopqa/{name}.json", [row | {"evidences": []} for row in rows[1::3]])
        _write_lines(folder / f"musique_ans_v1.0_{name}.jsonl", map(as_musique, rows[2::3]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="python recipes/papers/sample_files.py",
        description=(__doc__ or "").partition("\n")[0],
        example="python recipes/papers/sample_files.py runs/sample",
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder for the files")
    parsed = parser.parse_args(arguments)
    return run_program(lambda: write_sample(Path(parsed.folder)))


if __name__ == "__main__":
    sys.exit(main())
