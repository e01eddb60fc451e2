"""The Python face: what `from tripletune import …` gives does what the command line does."""

import json

import pytest

from tests.cli import run
from tripletune import evaluate, load_model, load_system
from tripletune.models.graph_llm import GraphLLM, is_graph_llm_folder
from tripletune.models.graph_llm.processor import GraphLLMProcessor


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    assert run("build world", "--output", folder, "--train", 0, "--validation", 0, "--test", 4).code == 0
    return folder


def test_a_system_answers_in_four_lines_and_as_ask_does(world, make_graph_llm, tmp_path):
    model, processor = make_graph_llm()
    for part in (model, processor):
        part.save_pretrained(tmp_path / "model")
    files = {"corpus": f"{world}/test.corpus.jsonl", "triples": f"{world}/test.triples.jsonl"}
    question = json.loads((world / "test.jsonl").read_text().splitlines()[0])["question"]
    with load_system("ras", model=str(tmp_path / "model"), **files, top_k=2, max_answer_tokens=6) as ras:
        traces = [ras.answer(question) for _ in range(2)]
    files_as_flags = [word for name, path in files.items() for word in (f"--{name}", path)]
    asked = run("ask", question, "--model", tmp_path / "model", "--top-k", 2, "--max-answer-tokens", 6, *files_as_flags)
    assert asked.code == 0
    assert all(trace.steps for trace in traces)
    assert [trace.answer for trace in traces] == [asked.out.rpartition("Answer: ")[2].strip()] * 2

    found = evaluate("ras", "hotpotqa", f"{world}/test.jsonl", model=str(tmp_path / "model"), untrained=True, **files)
    assert found["questions"] == 4
    assert {"exact_match", "f1"} <= found["metrics"].keys()


def test_a_trained_model_and_what_makes_its_inputs(tiny_llama, make_graph_llm, tmp_path):
    model, processor = make_graph_llm()
    for part in (model, processor):
        part.save_pretrained(tmp_path / "model")
    assert is_graph_llm_folder(tmp_path / "model")
    found, reads = load_model(tmp_path / "model")
    assert (type(found), type(reads)) == (GraphLLM, GraphLLMProcessor)
    found, tokenizer = load_model(tiny_llama)
    ids = found.generate(**tokenizer("Oslo", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert ids.shape[0] == 1
