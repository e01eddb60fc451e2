from __future__ import annotations

import pytest

from tripletune.rag.systems import PROMPT_FOLDER, load_prompts
from tripletune.rag.systems.cirag.options import PROMPT_NAMES, CiragOptions


def test_the_defaults_are_the_papers():
    options = CiragOptions()
    assert (options.max_rounds, options.top_k, options.candidates, options.rerank) == (4, 10, 30, True)
    assert options.granularities == ("triples", "sentences", "passages")
    assert options.extraction == "two_step"


def test_all_wrong_options_are_named_at_once():
    with pytest.raises(ValueError, match=r"max_rounds: 0 .*candidates: 0 .*granularities is 'passages,triples'"):
        CiragOptions(max_rounds=0, candidates=0, granularities=("passages", "triples"))
    with pytest.raises(ValueError, match=r"extraction: 'magic'.*name one or more of"):
        CiragOptions(granularities=(), extraction="magic")
    with pytest.raises(ValueError, match="history: 'none'"):
        CiragOptions(history="none")


def test_every_prompt_file_is_used_and_there():
    assert {path.stem for path in PROMPT_FOLDER.glob("cirag_*.md")} == set(PROMPT_NAMES)
    prompts = load_prompts(PROMPT_NAMES)
    assert prompts.files["cirag_joint"] == "rag/prompts/cirag_joint.md"
    assert len(set(prompts.digests().values())) == len(PROMPT_NAMES)
    assert prompts.chat("cirag_joint", "hello")[1] == {"role": "user", "content": "hello"}


def test_bad_prompt_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder of prompts"):
        load_prompts(PROMPT_NAMES, tmp_path / "none")
    with pytest.raises(ValueError, match="holds no prompt"):
        load_prompts(PROMPT_NAMES, tmp_path)
    (tmp_path / "cirag_answer.md").write_text("x")
    with pytest.raises(ValueError, match="there is no prompt of this name"):
        load_prompts(PROMPT_NAMES, tmp_path)
    (tmp_path / "cirag_answer.md").rename(tmp_path / "cirag_joint.md").write_text(" ")
    with pytest.raises(ValueError, match="the prompt is empty"):
        load_prompts(PROMPT_NAMES, tmp_path)
