import asyncio
import shutil

import pytest
import torch

from tests.cli import write_lines
from tests.fakes import flip_last_byte
from tripletune.core.calls import SetupError
from tripletune.rag.__main__ import main
from tripletune.rag.extractor import LocalOptions, choose_shots, open_local_extractor
from tripletune.rag.triple_store import TripleStore

TEXTS = [
    "Ada Lovelace was born in London.",
    "London: London is the capital of England and of the United Kingdom.",
    "x",
    "Where was the first programmer born? She was born in London, the capital of England.",
    "René Descartes, 京都, and a text with (S> markers| in it.",
]


@pytest.fixture(scope="module")
def t5(tmp_path_factory, tokenizer_folder):
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("t5")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(3)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=3,
        pad_token_id=3, eos_token_id=2, initializer_factor=3.0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, tiny_llama):
    """An adapter folder as a run leaves it, with its prompt; its weights are not nothing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    (folder / "prompt.md").write_text("Write the facts down.\n", encoding="utf-8")
    return folder


def replies(folder, texts=TEXTS, **options):
    given = {name: options.pop(name) for name in ("instruction", "shots") if name in options}
    extractor = open_local_extractor(str(folder), LocalOptions(max_tokens=24, **options), **given)

    async def run():
        try:
            return await extractor.extract(texts)
        finally:
            await extractor.close()

    return asyncio.run(run())


def one_by_one(folder, instruction, texts=TEXTS, beams=1):
    """The plainest loop: the chat template, one text, `generate`."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    apart = instruction is None
    kind = AutoModelForSeq2SeqLM if apart else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for text in texts:
        if apart:
            ids = tokenizer(text)["input_ids"]
        else:
            turns = [{"role": "system", "content": instruction}, {"role": "user", "content": text}]
            shown = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(shown, add_special_tokens=False)["input_ids"]
        output = model.generate(
            torch.tensor([ids]), max_new_tokens=24, num_beams=beams, do_sample=False, eos_token_id=2, pad_token_id=3
        )
        reply = output[0, 1 if apart else len(ids) :]
        found.append(tokenizer.decode(reply, skip_special_tokens=True))
    return found


@pytest.mark.parametrize(("batch_size", "beams"), [(1, 1), (3, 1), (32, 1), (16, 4)])
def test_a_decoder_replies_as_in_a_plain_loop(tiny_llama, batch_size, beams):
    wanted = one_by_one(tiny_llama, "Write the facts down.", beams=beams)
    found = replies(tiny_llama, instruction="Write the facts down.", batch_size=batch_size, beams=beams)
    assert [one.text for one in found] == wanted
    assert len(set(wanted)) == len(wanted)
    assert all(one.prompt_tokens > 20 and one.completion_tokens and one.seconds > 0 for one in found)


@pytest.mark.parametrize("beams", [1, 3])
def test_an_encoder_decoder_reads_the_text_alone(t5, beams):
    wanted = one_by_one(t5, None, beams=beams)
    for batch_size in (1, 16):
        found = replies(t5, beams=beams, batch_size=batch_size)
        assert [one.text for one in found] == wanted
    assert len(set(wanted)) > 1


def test_an_adapter_folder_brings_base_model_and_prompt(adapter, tiny_llama, tmp_path):
    from transformers import AutoTokenizer

    from tripletune.models.loading import load_causal_lm

    merged = tmp_path / "merged"
    load_causal_lm(adapter, torch.float32)[0].save_pretrained(merged)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(merged)
    wanted = one_by_one(merged, "Write the facts down.")
    assert [one.text for one in replies(adapter)] == wanted
    assert [one.text for one in replies(merged, instruction="Write the facts down.")] == wanted
    assert wanted != one_by_one(tiny_llama, "Write the facts down.")
    assert wanted != [one.text for one in replies(adapter, instruction="Other.")]


def test_examples_and_bfloat16_are_other_extractors(tiny_llama, tiny_t5):
    shots = [("Oslo is in Norway.", "(S> Oslo| P> in| O> Norway)")]
    assert replies(tiny_llama, shots=shots, dtype="bfloat16")[0].text != replies(tiny_llama, dtype="bfloat16")[0].text
    ways = (LocalOptions(), LocalOptions(dtype="bfloat16"), LocalOptions(max_tokens=9), LocalOptions(beams=2))
    opened = [open_local_extractor(str(tiny_llama), way, shots=some) for way in ways for some in ((), shots)]
    assert len({one.settings for one in opened}) == len(opened)
    assert len({one.model for one in opened}) == 1
    assert open_local_extractor(str(tiny_llama), LocalOptions(batch_size=3)).settings == opened[0].settings
    with pytest.raises(SetupError, match="reads only the text: leave out the examples"):
        replies(tiny_t5, shots=shots)


def extract(tmp_path, *more):
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"title": "T", "text": text} for text in TEXTS])
    call = ["extract", "--corpus", corpus, "--output", str(tmp_path / "s.sqlite"), "--max-tokens", "8", *more]
    return main(call)


def test_the_command_and_its_second_run(adapter, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(adapter, folder)
    # Chance wrote the model's weights, and so its replies.
    assert extract(tmp_path, "--model", str(folder)) == 1
    store = TripleStore(tmp_path / "s.sqlite", create=False)
    chosen = store.choose()
    assert chosen.passages == len(TEXTS)
    assert "Write the facts down." in chosen.settings
    # Nothing is left to do, so the weights are not even loaded.
    monkeypatch.setattr("tripletune.llm.backends.hf.load_language_model", None)
    capsys.readouterr()
    assert extract(tmp_path, "--model", str(folder)) == 0
    assert f"stored {len(TEXTS)}" in capsys.readouterr().err
    monkeypatch.undo()
    # Other weights are another model.
    flip_last_byte(folder / "adapter_model.safetensors")
    assert extract(tmp_path, "--model", str(folder)) == 1
    assert len(store.extractors()) == 2
    store.close()


def row(number, triples=2, text=""):
    facts = [["a", "b", str(n)] for n in range(triples)]
    return {"id": f"p{number}", "text": text or f"Text {number}.", "triples": facts}


def test_examples_are_short_and_state_some_facts(tmp_path):
    rows = [row(0, 1), row(1, 9), row(2, 2, "long " * 100), row(3), row(4, 8), row(5, 0)]
    shots = choose_shots(write_lines(tmp_path / "pairs.jsonl", rows), 2)
    assert {text for text, _ in shots} == {"Text 3.", "Text 4."}
    assert ("Text 3.", "(S> a| P> b| O> 0), (S> a| P> b| O> 1)") in shots
    with pytest.raises(ValueError, match="only 2 of 3 examples found"):
        choose_shots(tmp_path / "pairs.jsonl", 3)


def test_the_choice_depends_on_the_texts_alone(tmp_path):
    rows = [row(n) for n in range(50)]
    first = choose_shots(write_lines(tmp_path / "a.jsonl", rows), 3)
    turned = [one | {"id": f"x{one['id']}"} for one in reversed(rows)]
    assert choose_shots(write_lines(tmp_path / "b.jsonl", turned), 3) == first
    # A text that stands there twice is one example.
    assert choose_shots(write_lines(tmp_path / "c.jsonl", rows + turned), 3) == first
