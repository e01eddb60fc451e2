"""The files that the pages' commands name and do not make, with a few rows of a world of `build world` each."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.cli import read_lines, write_lines
from tests.data_builders.files import docx, drawn_pdf
from tests.data_builders.test_published import PLANNER
from tests.data_builders.test_ras_files import ROW, TRIPLES
from tests.outside.commands import READERS
from tests.outside.environment import ROOT
from tripletune.recipes.papers.sample_files import as_musique

Row = dict[str, Any]
# Questions about the documents, with their answers.
ANSWERS = {"Who leads the project Clearwater?": "Mirela Fosk", "Who leads the project Low Bridge?": "Owen Draycott"}


def write_inputs(home: Path) -> None:
    """Write all other files into a folder in which the README's `build world` and `build subq` were run."""
    world = home / "runs" / "world"
    questions = read_lines(world / "test.jsonl")[:6]
    passages = read_lines(world / "test.corpus.jsonl")
    triples = read_lines(world / "test.triples.jsonl")
    _write_benchmarks(home, questions, passages, triples)
    _write_training_rows(home, read_lines(world / "train.jsonl")[:12], read_lines(world / "train.teacher.jsonl")[:12])
    _write_pairs(home, triples[:12])
    _write_json(home / "hotpot_filtered.json", [ROW])
    _write_json(home / "text_triples.json", TRIPLES)
    _write_lightrag(home / "rag_storage", triples)
    _write_wikipedia(home / "psgs_w100.tsv", passages)
    for part in ("corpus", "triples"):
        shutil.copy(world / f"test.{part}.jsonl", home / f"dev.{part}.jsonl")
    write_lines(home / "dev.jsonl", questions)
    (home / "my_task.yaml").write_text("reader: hotpotqa\nmetrics: [exact_match, f1]\nmax_answer_tokens: 16\n")
    shutil.copy(world / "test.corpus.jsonl", home / "corpus.jsonl")
    shutil.copy(world / "test.triples.jsonl", home / "triples.jsonl")


def _write_json(path: Path, value: Any) -> None:
    """Write a value as a JSON file, and its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_documents(home: Path) -> None:
    """Write the documents, and questions about them."""
    shutil.copytree(ROOT / "examples/documents", home / "folder")
    (home / "folder/memo.docx").write_bytes(docx([("Title", "Memo"), ("Normal", "The Minnow weighs 4 kg.")]))
    (home / "report.pdf").write_bytes(drawn_pdf([[(72, 700, 11, "Norling lies on the river Tarn.")]]))
    (home / "questions.txt").write_text("".join(f"{question}\n" for question in ANSWERS))
    # The mock server does not label questions, so the first one has its steps.
    asked, other = ANSWERS
    passage = "folder/river-people.md › Who is who in the River division › Who has designed and leads what"
    step = {"question": asked, "passage": passage, "triples": [["Mirela Fosk", "leads", "Clearwater"]]}
    rows = [
        {"id": "q1", "question": asked, "answers": [ANSWERS[asked]], "supporting": [passage], "steps": [step]},
        {"id": "q2", "question": other, "answers": [ANSWERS[other]]},
    ]
    write_lines(home / "questions.jsonl", rows)


def _write_benchmarks(home: Path, questions: list[Row], passages: list[Row], triples: list[Row]) -> None:
    """Files in the layouts of other projects."""
    musique = list(map(as_musique, questions))
    two_wiki = [row | {"evidences": [], "answer_id": f"Q{place}"} for place, row in enumerate(questions)]
    _write_json(home / "musique_corpus.json", passages)
    _write_json(home / "musique.json", musique)
    for split in ("train", "dev", "test"):
        for part in ("ans", "full"):
            write_lines(home / f"musique_{part}_v1.0_{split}.jsonl", musique)
    write_lines(home / "test_subsampled.jsonl", list(map(_as_ircot, musique)))
    documents = []
    for place, row in enumerate(triples):
        text = f"{row['title']}\n{row['text']}"
        documents.append({"idx": place, "passage": text, "extracted_entities": [], "extracted_triples": row["triples"]})
    _write_json(home / "openie_results_ner_gpt-4o-mini.json", {"docs": documents})
    wiki = []
    for place, row in enumerate(passages):
        wiki.append({"id": str(place), "contents": f'"{row["title"]}"\n{row["text"]}'})
    write_lines(home / "wiki18_100w.jsonl", wiki)
    nq = [{"id": row["_id"], "question": row["question"], "golden_answers": [row["answer"]]} for row in questions]
    write_lines(home / "nq/test.jsonl", nq)
    _write_json(home / "two_wiki/dev.json", two_wiki)
    _write_json(home / "two_wiki/train.json", two_wiki)
    write_lines(home / "two_wiki/id_aliases.json", [{"Q_id": "Q0", "aliases": ["an alias"], "demonyms": []}])
    write_lines(home / "other.jsonl", [{"id": row["_id"], "answer": row["answer"]} for row in questions])
    _write_json(home / "train.json", questions)
    _write_json(home / "dev.json", questions)
    _write_json(home / "test.json", questions)
    for reader, task in READERS.items():
        rows = {"two_wiki": two_wiki, "musique": musique}.get(reader, questions)
        _write_json(home / f"evaluation_{reader}.json", rows)
        write_lines(home / "triples" / f"{task}.jsonl", triples)


def _write_lightrag(folder: Path, triples: list[Row]) -> None:
    """Write a folder of LightRAG: chunks, and the replies with their relations."""
    chunks, replies = {}, {}
    for place, row in enumerate(triples):
        chunks[f"chunk-{place}"] = {"content": row["text"], "file_path": f"{row['title']}.txt", "full_doc_id": "d"}
        lines = [f"relation<|#|>{s}<|#|>{o}<|#|>{p}<|#|>{s} {p} {o}." for s, p, o in row["triples"]]
        reply = "\n".join([*lines, "<|COMPLETE|>"])
        replies[f"default:extract:{place}"] = {
            "return": reply,
            "cache_type": "extract",
            "chunk_id": f"chunk-{place}",
        }
    _write_json(folder / "kv_store_text_chunks.json", chunks)
    _write_json(folder / "kv_store_llm_response_cache.json", replies)


def _write_wikipedia(path: Path, passages: list[Row]) -> None:
    """Write passages as DPR's table of Wikipedia has them."""
    lines = ["id\ttext\ttitle\n"]
    for place, row in enumerate(passages, start=1):
        lines.append(f"{place}\t{row['text']}\t{row['title']}\n")
    path.write_text("".join(lines), encoding="utf-8")


def _as_ircot(row: Row) -> Row:
    """A row of MuSiQue in IRCoT's layout."""
    answer = {"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": [row["answer"]]}
    return {
        "question_id": row["id"],
        "question_text": row["question"],
        "answers_objects": [answer],
        "contexts": row["paragraphs"],
    }


def _write_training_rows(home: Path, questions: list[Row], replies: list[Row]) -> None:
    """Write the files that trainings read: questions with replies, chats, preferences, records, and data of others."""
    write_lines(home / "hotpot_train.jsonl", questions)
    _write_json(home / "hotpot_train_v1.1.json", questions[:2])
    write_lines(home / "teacher.jsonl", replies)
    write_lines(home / "hotpotqa_train.jsonl", questions)
    write_lines(home / "teacher_train.jsonl", replies)
    chats = []
    records = []
    for question, reply in zip(questions, replies, strict=True):
        asked = {"role": "user", "content": question["question"]}
        chats.append({"messages": [asked, {"role": "assistant", "content": question["answer"]}]})
        steps = []
        for query in reply["subqueries"]:
            steps.append({"question": query["question"], "triples": reply["triples"].get(query["title"], [])})
        records.append({"question": question["question"], "answers": [question["answer"]], "steps": steps})
    write_lines(home / "chats.jsonl", chats)
    pairs = [{"prompt": row["question"], "chosen": row["answer"], "rejected": "unknown"} for row in questions]
    write_lines(home / "preferences.jsonl", pairs)
    _write_json(home / "questions.json", records)
    choices = {"text": ["ice", "fire"], "label": ["1", "2"]}
    hot = [{"id": f"x{n}", "question": f"Hot {n}?", "choices": choices, "answerKey": "2"} for n in range(4)]
    write_lines(home / "arc_easy_train.jsonl", hot)
    planning = {"input": f"{PLANNER}\nQuestion: Why?", "label": "[NO_RETRIEVAL]", "graphs": []}
    write_lines(home / "train_data.jsonl", [planning])
    lines = [f"claim {n}\treason {n}\tsupport\t(a; b; c)\n" for n in range(10)]
    (home / "explagraphs.tsv").write_text("".join(lines))


def _write_pairs(home: Path, triples: list[Row]) -> None:
    """Write text-to-triples pairs as Parquet, and in the layouts of WikiOFGraph and GenWiki."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(triples), home / "pairs.parquet")
    rows = []
    for row in triples:
        facts = ", ".join(f"(<S> {s}| <P> {p}| <O> {o})" for s, p, o in row["triples"])
        rows.append({"triplet": facts, "text": row["text"]})
    write_lines(home / "wikiofgraph.jsonl", rows[:8])
    write_lines(home / "genwiki_test.jsonl", rows[8:])
