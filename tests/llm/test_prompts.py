import pytest

from tripletune.core.files import PROMPTS
from tripletune.llm.question_client import load_prompts
from tripletune.rag.chat_generator import COMMON_READER
from tripletune.rag.systems.cirag import PROMPT_NAMES


def test_every_prompt_file_is_used_and_there():
    assert {path.stem for path in (PROMPTS / "systems").glob("cirag_*.md")} | set(COMMON_READER) == set(PROMPT_NAMES)
    prompts = load_prompts(PROMPT_NAMES)
    assert prompts.files["cirag_joint"] == "tripletune/prompts/systems/cirag_joint.md"
    assert len(set(prompts.digests().values())) == len(PROMPT_NAMES)
    assert prompts.chat("cirag_joint", "hello")[1] == {"role": "user", "content": "hello"}


def test_bad_prompt_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="no such folder of prompts"):
        load_prompts(PROMPT_NAMES, tmp_path / "none")
    for name, message in (("", "no prompt;"), ("cirag_answer", "no prompt with this"), ("cirag_joint", "is empty")):
        for old in tmp_path.iterdir():
            old.unlink()
        if name:
            (tmp_path / f"{name}.md").write_text(" ")
        with pytest.raises(ValueError, match=message):
            load_prompts(PROMPT_NAMES, tmp_path)
