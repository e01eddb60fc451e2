import json

import pytest

from tripletune.rag.triples.prompt import ExtractionPrompt, choose_shots


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(number, triples=2, text=""):
    facts = [["a", "b", str(n)] for n in range(triples)]
    return {"id": f"p{number}", "text": text or f"Text {number}.", "triples": facts}


def test_examples_are_short_and_state_some_facts(tmp_path):
    rows = [row(0, 1), row(1, 9), row(2, 2, "long " * 100), row(3), row(4, 8), row(5, 0)]
    shots = choose_shots(write(tmp_path / "pairs.jsonl", rows), 2)
    assert {text for text, _ in shots} == {"Text 3.", "Text 4."}
    assert ("Text 3.", "(S> a| P> b| O> 0), (S> a| P> b| O> 1)") in shots
    with pytest.raises(ValueError, match="only 2 of 3 examples found"):
        choose_shots(tmp_path / "pairs.jsonl", 3)


def test_the_choice_depends_on_the_texts_alone(tmp_path):
    rows = [row(n) for n in range(50)]
    first = choose_shots(write(tmp_path / "a.jsonl", rows), 3)
    turned = [one | {"id": f"x{one['id']}"} for one in reversed(rows)]
    assert choose_shots(write(tmp_path / "b.jsonl", turned), 3) == first
    assert choose_shots(tmp_path / "gone.jsonl", 0) == ()
    # A text that stands there twice is one example.
    assert len(set(choose_shots(write(tmp_path / "c.jsonl", [*rows[:3]]), 3))) == 3


def test_settings_say_what_was_asked():
    plain = ExtractionPrompt("Do it.")
    assert plain.to_json() == {"instruction": "Do it."}
    assert ExtractionPrompt("Do it.", (("a", "b"),)).to_json()["shots"] == [["a", "b"]]
    assert [turn["role"] for turn in plain.chat("text")] == ["system", "user"]
