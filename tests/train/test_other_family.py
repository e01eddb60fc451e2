"""Distillation from a teacher with another vocabulary: spans, classes and losses by hand, and what is not scored."""

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.cli import read_lines
from tripletune.models.local.chat import ChatEncoder
from tripletune.train import train
from tripletune.train.trl_trainers.alignment import (
    NO_CLASS,
    AlignedReply,
    AlignedSpan,
    ByteVocabulary,
    Unscored,
    align_reply,
    aligned_spans,
    byte_vocabulary,
    shared_classes,
    token_bytes,
)
from tripletune.train.trl_trainers.other_family import (
    OtherFamilyTrainer,
    class_divergence,
    class_log_probs,
    sampled_divergence,
)

TEXTS = [
    "Who is Ada?",
    "  two  spaces\n\nand lines\t",
    "René, 紫式部 🙂",
    "[SUBQ] Where was the first programmer born?",
]


@pytest.fixture
def other(other_family):
    return AutoTokenizer.from_pretrained(other_family)


@pytest.fixture
def pair(tokenizer, other):
    """Student and teacher as the alignment reads them."""
    return tuple(byte_vocabulary(ChatEncoder(one, "m")) for one in (tokenizer, other))


# Spans


def test_spans_end_where_both_have_a_border():
    student = [b"Zan", b"zi", b"bar", b" is", b" an"]
    teacher = [b"Za", b"nzibar", b" i", b"s", b" a", b"nd"]
    #            3 5 8 11 14           2 8 10 11 13 15
    assert aligned_spans(student, teacher) == [
        AlignedSpan(range(3), range(2)),
        AlignedSpan(range(3, 4), range(2, 4)),
    ]
    same = aligned_spans(student, student)
    assert same == [AlignedSpan(range(place, place + 1), range(place, place + 1)) for place in range(5)]
    assert not any(span.is_merged for span in same)


# "cX" begins with the student's "c", but has no border after it.
@pytest.mark.parametrize(("teacher", "scored"), [([b"ab", b"XX"], 1), ([b"ab", b"cX"], 1), ([b"X"], 0), ([], 0)])
def test_where_the_bytes_differ_nothing_is_aligned(teacher, scored):
    assert len(aligned_spans([b"ab", b"c", b"d"], teacher)) == scored


def test_spans_are_those_of_trl():
    """`ULDLoss` of TRL 1.16 groups tokens in the same way, of texts that both tokenizers have whole."""
    gold = pytest.importorskip("trl.experimental.gold.gold_trainer")
    draw = random.Random(3)
    for _ in range(50):
        ends = []
        for _ in range(2):
            borders = sorted(draw.sample(range(1, 30), draw.randint(0, 12)))
            ends.append([*borders, 30])
        text = bytes(range(30))
        sides = [[text[start:end] for start, end in zip([0, *side], side)] for side in ends]
        groups = gold.ULDLoss._align_by_byte_offsets(*([(0, end) for end in side] for side in ends))
        assert [(list(span.student), list(span.teacher)) for span in aligned_spans(*sides)] == list(zip(*groups))


@pytest.mark.parametrize("which", ["tokenizer", "other"])
def test_the_bytes_of_tokens_are_the_text(which, request):
    tokenizer = request.getfixturevalue(which)
    pieces = token_bytes(tokenizer)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(pieces[token] for token in ids) == text.encode()
    assert all(pieces[token] is None for token in tokenizer.all_special_ids)


def test_a_tokenizer_that_changes_the_text_is_refused(other):
    steps = [normalizers.Lowercase(), other.backend_tokenizer.normalizer]
    other.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    with pytest.raises(ValueError, match="the tokens of m can't be aligned"):
        byte_vocabulary(ChatEncoder(other, "m"))


# Replies


def replied(tokenizer, text, end=""):
    return tokenizer(text + end, add_special_tokens=False)["input_ids"]


def test_an_ended_reply_is_scored_whole(pair, tokenizer, other):
    for text in TEXTS:
        ids = replied(tokenizer, text, "<|im_end|>")
        aligned = align_reply(ids, *pair)
        assert other.convert_ids_to_tokens(aligned.teacher_ids[-1]) == "<end>"
        assert other.decode(aligned.teacher_ids[:-1]) == text
        assert aligned.unscored == Unscored()
        assert sum(len(span.student) for span in aligned.spans) == len(ids)
        last = aligned.spans[-1]
        assert (list(last.student), list(last.teacher)) == ([len(ids) - 1], [len(aligned.teacher_ids) - 1])
    # The two tokenizers divide this text differently.
    assert any(span.is_merged for span in aligned.spans)


def test_the_end_of_a_reply_that_was_cut_is_not_scored(pair, tokenizer):
    ids = replied(tokenizer, "Who is Ada Lovelace")
    whole = align_reply([*ids, tokenizer.convert_tokens_to_ids("<|im_end|>")], *pair)
    cut = align_reply(ids, *pair)
    assert cut.spans == whole.spans[:-2]
    assert cut.unscored == Unscored(cut=len(whole.spans[-2].student))
    assert cut.teacher_ids == whole.teacher_ids[:-1]


def test_half_a_character_and_control_tokens_are_not_scored(pair, tokenizer):
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids = replied(tokenizer, "Ada 🙂")
    half = align_reply([*ids[:-1], end], *pair)
    # Three of the four bytes of the smiley, and the end after them.
    assert half.unscored == Unscored(no_border=4)
    control = align_reply([*ids, start, ids[0], end], *pair)
    assert control.unscored == Unscored(no_border=3)
    assert align_reply([start], *pair) == AlignedReply([], [], Unscored(no_border=1))
    # A reply without text that ends at once can be scored.
    assert align_reply([end], *pair).spans == [AlignedSpan(range(1), range(1))]


# Losses


def toy(pieces, ends, unwritten=()):
    return ByteVocabulary(None, "toy", pieces, frozenset(unwritten), ends)  # type: ignore[arg-type]


def test_classes_and_their_divergence_by_hand():
    student = toy([b"a", b"b", b"ab", None, None], [3])
    teacher = toy([b"a", None, b"b", b"abc", None, b"c"], [1, 4])
    classes = shared_classes(student, teacher, student_width=6, teacher_width=6)
    # 0 the end, 1 "a" with what begins with it, 2 "b"; control tokens, padding and "c" have no class.
    assert classes.student.tolist() == [1, 2, 1, 0, NO_CLASS, NO_CLASS]
    assert classes.teacher.tolist() == [1, 0, 2, 1, 0, NO_CLASS]
    assert classes.size == 3
    # The last two tokens of the student are left out of its probabilities.
    logits = torch.tensor([[0.2, 0.3, 0.4, 0.1, 7.0, 9.0]]).log()
    assert class_log_probs(logits, classes.student, 3).exp().tolist() == [pytest.approx([0.1, 0.6, 0.3])]
    theirs = torch.tensor([[0.1, 0.05, 0.5, 0.2, 0.15, 3.0]]).log()
    assert class_log_probs(theirs, classes.teacher, 3).exp().tolist() == [pytest.approx([0.2, 0.3, 0.5])]
    expected = 0.1 * math.log(0.1 / 0.2) + 0.6 * math.log(0.6 / 0.3) + 0.3 * math.log(0.3 / 0.5)
    assert float(class_divergence(logits, theirs, classes)) == pytest.approx(expected, abs=1e-6)
    assert float(class_divergence(logits, logits, classes._replace(teacher=classes.student))) == 0


def test_a_token_that_a_tokenizer_does_not_write_before_a_word_is_no_class():
    """Both models write two line breaks, the student in two tokens: neither's first token is a fault."""
    student = toy([b"\n", b"\n\n", None], [2], unwritten=[b"\n\n"])
    teacher = toy([b"\n", b"\n\n", None], [2])
    classes = shared_classes(student, teacher, student_width=3, teacher_width=3)
    assert classes.student.tolist() == classes.teacher.tolist() == [1, 1, 0]
    theirs = torch.tensor([[0.001, 0.989, 0.01]]).log()
    ours = torch.tensor([[0.989, 0.001, 0.01]]).log()
    assert float(class_divergence(ours, theirs, classes)) == pytest.approx(0, abs=1e-6)


def test_what_a_tokenizer_does_not_write_before_a_word():
    letters = [*pre_tokenizers.ByteLevel.alphabet()]
    merges = [("Ċ", "Ċ"), ("1", "9"), ("a", "b")]
    words = [*letters, "<|end|>", *("".join(merge) for merge in merges)]
    core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", chat_template=template)
    assert byte_vocabulary(ChatEncoder(made, "m")).unwritten == {b"\n\n", b"19"}


def test_the_estimate_multiplies_the_probabilities_of_merged_tokens():
    student = torch.tensor([0.5, 0.8, 0.9]).log().requires_grad_()
    teacher = torch.tensor([0.6, 0.3, 0.7]).log()
    spans = [AlignedSpan(range(2), range(1)), AlignedSpan(range(2, 3), range(1, 3))]
    loss = sampled_divergence(student, teacher, spans)
    ratios = [math.log(0.5 * 0.8 / 0.6), math.log(0.9 / (0.3 * 0.7))]
    assert float(loss) == pytest.approx(sum(ratios))
    loss.backward()
    assert student.grad.tolist() == pytest.approx([ratios[0], ratios[0], ratios[1]])


def test_the_mean_gradient_of_the_estimate_is_that_of_the_divergence():
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.double, requires_grad=True)
    teacher = torch.tensor([0.2, 0.5, 0.3], dtype=torch.double).log()
    log_p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - teacher)).sum(), logits, retain_graph=True)
    mean = torch.zeros(3, dtype=torch.double)
    for token in range(3):
        estimate = sampled_divergence(
            log_p[token : token + 1], teacher[token : token + 1], [AlignedSpan(range(1), range(1))]
        )
        (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        mean += log_p[token].exp().detach() * gradient
    assert mean.tolist() == pytest.approx(exact.tolist())


# Runs


@pytest.fixture
def padded(tiny_llama, tmp_path):
    """The student again, with an output layer that is wider than its vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.resize_token_embeddings(448)
    model.save_pretrained(tmp_path / "padded")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "padded")
    return tmp_path / "padded"


def write_replies(trainer, text, monkeypatch):
    """Let the student write this text, whatever it is asked; returns its tokens."""
    tokenizer = trainer.processing_class
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda prompts, *_, **__: [ids for _ in prompts])
    return ids


def test_a_padded_copy_of_the_student_teaches_nothing(begin_task, padded, tmp_path, monkeypatch):
    settings = {"train.teacher": str(padded), "train.max_steps": 1, "model.lora_dropout": 0.0}
    task = begin_task("cirag_on_policy", settings)
    task.teacher = AutoModelForCausalLM.from_pretrained(padded)  # in float32
    trainer = task.trainer()
    assert isinstance(trainer, OtherFamilyTrainer)
    write_replies(trainer, "Ada Lovelace was born in London.", monkeypatch)
    trainer.train()
    (line,) = read_lines(tmp_path / "run" / "losses.jsonl")
    assert line["loss"] == pytest.approx(0, abs=1e-5)
    (line,) = read_lines(tmp_path / "run" / "rewards.jsonl")
    assert (line["unscored"], line["merged"]) == (0, 0)


def test_the_loss_of_a_run_is_that_of_its_replies(begin_task, tmp_path, monkeypatch):
    """A reply's loss, computed again from both models' own outputs: merged spans by their products, others by class."""
    settings = {"train.max_steps": 1, "train.max_reply_tokens": 24, "train.temperature": 0.5, "model.lora_dropout": 0.0}
    task = begin_task("cirag_on_policy", settings, other=True)
    task.teacher.float()
    trainer = task.trainer()
    ids = write_replies(trainer, "Ada Lovelace was born in", monkeypatch)
    rows = [{"prompt": [5, 6, 7], "teacher_prompt": [2, 8, 9, 10]}] * 2
    inputs = trainer._generate_and_score_completions(rows)
    loss, entropy, tokens = trainer._compute_loss(trainer.model, inputs, torch.tensor(10.0))
    assert int(tokens) == 2 * len(ids)
    aligned = inputs["teacher"][0].aligned
    assert {span.is_merged for span in aligned.spans} == {True, False}

    def outputs(model, prompt, reply):
        with torch.no_grad():
            return model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1].float() / 0.5

    student = outputs(trainer.model, [5, 6, 7], ids)
    teacher = outputs(task.teacher, [2, 8, 9, 10], aligned.teacher_ids)
    classes = task.other_family.classes
    expected = 0.0
    for span in aligned.spans:
        one, other = student[list(span.student)], teacher[list(span.teacher)]
        if span.is_merged:
            log_p = sum(row.log_softmax(-1)[ids[place]] for row, place in zip(one, span.student))
            log_q = sum(row.log_softmax(-1)[aligned.teacher_ids[place]] for row, place in zip(other, span.teacher))
            expected += float(log_p - log_q)
        else:
            expected += float(class_divergence(one, other, classes))
    assert float(loss) == pytest.approx(2 * expected / 10, rel=1e-4)
    probs = student.softmax(-1)
    assert float(entropy) == pytest.approx(-2 * float((probs * probs.log()).sum()), rel=1e-4)
    loss.backward()
    assert all(weight.grad is None for weight in task.teacher.parameters())


def test_a_teacher_may_be_an_adapter(begin_task, other_family, tmp_path):
    settings = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(other_family), settings).eval()
    model.save_pretrained(tmp_path / "adapted")
    AutoTokenizer.from_pretrained(other_family).save_pretrained(tmp_path / "adapted")
    task = begin_task("cirag_on_policy", {"train.teacher": str(tmp_path / "adapted")})
    task.teacher.float()
    row = torch.tensor([[2, 8, 9, 20, 21]])
    with torch.no_grad():
        expected = model(row).logits[0, 2:-1]
        with model.disable_adapter():
            without = model(row).logits[0, 2:-1]
    found = task.trainer()._teacher_logits([2, 8, 9], torch.tensor([20, 21]))
    # The base model's weights may have been loaded in bfloat16.
    assert (found - expected).abs().max() < 0.1
    assert (found - without).abs().max() > 0.2
    assert not any(weight.requires_grad for weight in task.teacher.parameters())


def test_what_is_not_scored_is_counted(make_task, tmp_path, caplog):
    train(make_task("cirag_on_policy", {"train.max_steps": 2, "train.gradient_accumulation": 1}, other=True))
    lines = read_lines(tmp_path / "run" / "rewards.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["unscored"] == pytest.approx(line["no_border"] + line["cut"] + line["too_long"])
        # A tiny model with random weights writes five tokens, most of them no text.
        assert 0 < line["unscored"] <= 1
        assert line["entropy"] > 0
    assert caplog.text.count("the teacher can't score") == 1


def test_a_prompt_beyond_the_context_of_the_teacher(begin_task):
    trainer = begin_task("cirag_on_policy", {"train.max_steps": 1}, other=True).trainer()
    trainer._context = 20
    with pytest.raises(ValueError, match="no prompt with its reply fits into the teacher's context"):
        trainer.train()


def test_rows_have_the_prompt_of_the_template_of_the_teacher(begin_task, other):
    task = begin_task("cirag_on_policy", {}, other=True)
    row = task.train[0]
    prompt = other.decode(row["teacher_prompt"])
    assert prompt.startswith("<bos><turn>system\nGo.")
    assert prompt.endswith("<turn>model\n")
    assert task.processor.decode(row["input_ids"]).endswith("<|im_start|>assistant\n")
    assert any("tokens, " in note and "the student has" in note for note in task.notes())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train.divergence": 0.5}, "only the reverse KL divergence can be computed"),
        ({"train.teacher": "openai:m@http://h/v1", "train.divergence": 0.0}, r"train\.divergence 0\.0: a server gives"),
        ({"train.teacher": "openai:m@http://h/v1", "train.temperature": 0.7}, r"train\.temperature 0\.7: a server"),
        ({"train.teacher": "openai:m@http://u:p@h/v1"}, "without user, password"),
        ({"train.teacher": "openai:m@http://h/v1"}, r"set train\.teacher_tokenizer to its folder or hub id"),
        ({"train.teacher_tokenizer": "x/y"}, r"train\.teacher_tokenizer: a teacher on this machine has its own"),
    ],
)
def test_settings_that_do_not_fit_the_teacher(settings, words, begin_task):
    with pytest.raises(ValueError, match=words):
        begin_task("cirag_on_policy", settings, other=True)


def test_a_base_model_is_no_teacher(begin_task, other_family, tmp_path):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(other_family).save_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(other_family)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(base)
    with pytest.raises(ValueError, match="has no chat template, so it is a base model"):
        begin_task("cirag_on_policy", {"train.teacher": str(base)})


@pytest.mark.parametrize("role", ["ras.planning", "extract.triples"])
def test_calls_of_every_role_are_learned(role, make_trajectory, write_trajectories, begin_task):
    task = begin_task("cirag_on_policy", {}, other=True)
    number = 20
    trajectory = make_trajectory(number)
    changed = SimpleNamespace(to_json=lambda: {**trajectory.to_json(), "role": role})
    write_trajectories([changed])
    again = type(task)(task.config)
    again.begin()
    assert again.learned_calls.roles == [role]
    assert len(again.train) == 2
    assert json.loads(again.files["student.json"])["roles"] == [role]
