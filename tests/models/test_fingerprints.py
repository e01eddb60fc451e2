import torch
from safetensors.torch import save_file

from tripletune.models.fingerprints import (
    content_fingerprint,
    has_content,
    model_fingerprint,
    teacher_fingerprint,
    tokenizer_fingerprint,
)


def test_a_tokenizer_is_told_apart_by_all_that_it_holds(tokenizer):
    fingerprint = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=4)
    assert tokenizer_fingerprint(tokenizer) == fingerprint, "a call leaves it as it is"
    template = tokenizer.chat_template
    tokenizer.chat_template = template + "{% if messages | length > 9 %}So many turns.{% endif %}"
    assert tokenizer_fingerprint(tokenizer) != fingerprint
    tokenizer.chat_template = template
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    tokenizer.add_tokens(["Velsund"])
    assert tokenizer_fingerprint(tokenizer) != fingerprint


def test_a_teacher_on_a_server_has_no_fingerprint(tiny_llama):
    assert teacher_fingerprint("openai:m@http://host:8000/v1") == ""
    assert teacher_fingerprint(str(tiny_llama)) == model_fingerprint(tiny_llama) != ""


def test_weights_are_told_apart_by_rows_from_the_first_to_the_last(tmp_path):
    embeddings = torch.arange(400, dtype=torch.float32).reshape(10, 40) / 16
    (tmp_path / "config.json").write_text("{}")

    def fingerprint():
        save_file({"embed.weight": embeddings, "norm.weight": torch.ones(40)}, tmp_path / "model.safetensors")
        return content_fingerprint(tmp_path)

    before = fingerprint()
    assert before == fingerprint()
    assert has_content(tmp_path, before)
    assert not has_content(tmp_path, "")
    # Adapters keep fingerprints that older versions made of the first row alone: this one by a95bc5e4 to af0403aa.
    first_row = "145803d7b60e10f0"
    assert has_content(tmp_path, first_row)
    # A token that was added and then trained is the last row.
    embeddings[9] += 1
    assert has_content(tmp_path, first_row)
    assert fingerprint() != before
    assert not has_content(tmp_path, before)
    embeddings[0] += 1
    fingerprint()
    assert not has_content(tmp_path, first_row)
