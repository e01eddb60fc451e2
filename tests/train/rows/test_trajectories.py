"""What of a trajectory is learned, for chat templates in the style of four families."""

import dataclasses
import json
from collections import Counter
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.records import IGNORED
from tripletune.core.data.triples import Triple
from tripletune.models.loading import load_causal_lm
from tripletune.models.local.chat import ChatEncoder, eos_token_ids
from tripletune.rag.systems.cirag.integration import Decision, Round, decision_text, messages_of
from tripletune.rag.systems.cirag.shortening import leave_out_candidates, shown_candidates
from tripletune.train.rows.trajectories import TrajectoryEncoder
from tripletune.train.tasks.cirag_distill import TrajectorySection

# Template, the token that ends a turn, and whether the model's generation configuration has to name it.
TEMPLATES = {
    "smollm2": (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}{% for message in "
        "messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor "
        "%}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "llama3": (
        "{{ '<|endoftext|>' }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt "
        "%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "<|eot_id|>",
    ),
    "gemma": (
        "{{ '<s>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for "
        "message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = "
        "message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
        "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "<end_of_turn>",
    ),
    "mistral": (
        "{{ '<s>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for "
        "message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% "
        "else %}{{ ' ' + message['content'] | trim + ' </s>' }}{% endif %}{% endfor %}",
        "</s>",
    ),
}
# Takes the thoughts of earlier replies out and writes an empty one into the last.
THINKER = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' and "
    "loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: it does so unless `enable_thinking` is false; then a prompt ends with an empty thought, too.
QWEN3 = THINKER.replace(
    "<|im_start|>assistant\n' }}{% endif", "<|im_start|>assistant\n' }}{% if enable_thinking is defined and "
    "enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif"
)  # fmt: skip
# Puts the system's text into the last turn, if that is the user's.
MOVER = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' }}{% if loop.last %}{{ "
    "messages[0].content }}{% endif %}{{ message.content + ' [/INST]' }}{% elif message.role == 'assistant' %}{{ ' ' + "
    "message.content + '</s>' }}{% endif %}{% endfor %}"
)
QUESTION = "Où est né l'inventeur du pont [Kelm]?"


def facts(number, count=4):
    return tuple(Triple(f"Ada {number}", f"relation {n}", f"“Kelm” {n}, {number}") for n in range(count))


def trajectory(rounds=3, count=4, prompt="Collect facts."):
    """A trajectory of CIRAG as the loop writes it."""
    told = [
        Round(facts(n, count), Decision(f"Round {n} helps.\nOr not", facts(n, count)[:1], f"Where is Kelm {n}?"))
        for n in range(rounds)
    ]
    last = Decision("Enough.", facts(rounds - 1, count)[:2], "")
    messages = messages_of(prompt, QUESTION, facts(rounds - 1, count), told[: rounds - 1])
    turns = (*messages, {"role": "assistant", "content": decision_text(last)})
    return Trajectory("t", "q", "cirag.integrate", "m", turns, tuple(turn["role"] == "assistant" for turn in turns))


def replies(one):
    return [turn["content"] for turn, learned in zip(one.messages, one.learned) if learned]


@pytest.fixture(params=list(TEMPLATES))
def student(request, tokenizer):
    """A tokenizer with a family's template, the tokens that end its replies, and the one its template uses."""
    template, end = TEMPLATES[request.param]
    tokenizer.add_tokens(
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>"],
        special_tokens=True,
    )
    tokenizer.chat_template = template
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[tokenizer.convert_tokens_to_ids(end)]))
    return tokenizer, eos_token_ids(tokenizer, model.generation_config), end


def learned_texts(tokenizer, row):
    stretches = groupby(zip(row["input_ids"], row["labels"]), key=lambda pair: pair[1] != IGNORED)
    found = [[label for _, label in stretch] for learned, stretch in stretches if learned]
    assert all(label in (token, IGNORED) for token, label in zip(row["input_ids"], row["labels"]))
    assert row["length"] == len(row["input_ids"]) == len(row["labels"])
    return [tokenizer.decode(stretch) for stretch in found]


def rows_of(tokenizer, eos_ids, one, **options):
    return list(TrajectoryEncoder(tokenizer, eos_ids, TrajectorySection(**options)).rows([one], Counter()))


@pytest.mark.parametrize("rounds", ["together", "separate"])
def test_the_teachers_turns_are_learned_and_nothing_else(student, rounds):
    tokenizer, eos_ids, end = student
    one = trajectory()
    rows = rows_of(tokenizer, eos_ids, one, rounds=rounds)
    assert len(rows) == (1 if rounds == "together" else 3)
    learned = [text for row in rows for text in learned_texts(tokenizer, row)]
    assert all(text.endswith(end) for text in learned)
    assert [text.removesuffix(end).strip() for text in learned] == replies(one)
    # A leading blank belongs to the reply only where the prompt of the loop ends before it.
    blank = " " if end == "</s>" else ""
    assert [text[: len(blank) + 1] for text in learned] == [f"{blank}["] * 3


def test_prompts_are_those_of_the_loop(student):
    tokenizer, eos_ids, _ = student
    one = trajectory()
    loop = ChatEncoder(tokenizer, "m")
    whole = rows_of(tokenizer, eos_ids, one)[0]
    for number, row in enumerate(rows_of(tokenizer, eos_ids, one, rounds="separate")):
        prompt = loop.encode(one.messages[: 2 + 2 * number])
        first = next(place for place, label in enumerate(row["labels"]) if label != IGNORED)
        assert row["input_ids"][:first] == prompt
        assert whole["input_ids"][: len(prompt)] == prompt


def test_control_tokens_in_texts_are_learned_as_text(student):
    tokenizer, eos_ids, end = student
    one = trajectory()
    spelled = f"Kelm {end}<|im_start|> {end}x"
    messages = [{**turn, "content": turn["content"].replace("Kelm", spelled)} for turn in one.messages]
    hostile = dataclasses.replace(one, messages=tuple(messages))
    assert replies(hostile) != replies(one)
    counts = [[row["input_ids"].count(token) for token in eos_ids] for row in rows_of(tokenizer, eos_ids, one)]
    rows = rows_of(tokenizer, eos_ids, hostile)
    assert [[row["input_ids"].count(token) for token in eos_ids] for row in rows] == counts
    learned = [text for row in rows for text in learned_texts(tokenizer, row)]
    assert [text.removesuffix(end).strip() for text in learned] == replies(hostile)
    prompt = ChatEncoder(tokenizer, "m").encode(hostile.messages[:2])
    assert rows[0]["input_ids"][: len(prompt)] == prompt


@pytest.mark.parametrize("rounds", ["together", "separate"])
def test_a_model_that_may_think_learns_what_follows_the_prompts_of_the_loop(tokenizer, rounds):
    tokenizer.chat_template = QWEN3
    one, loop = trajectory(), ChatEncoder(tokenizer, "m")
    rows = rows_of(tokenizer, [2], one, rounds=rounds)
    assert len(rows) == 3
    for number, (row, reply) in enumerate(zip(rows, replies(one))):
        prompt = loop.encode(one.messages[: 2 + 2 * number])
        assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
        assert row["input_ids"][: len(prompt)] == prompt
        assert learned_texts(tokenizer, row) == [f"{reply}<|im_end|>"]


@pytest.mark.parametrize("rounds", ["together", "separate"])
def test_everything_is_every_turn(student, rounds):
    tokenizer, eos_ids, end = student
    one = trajectory()
    learned = [
        text.removesuffix(end).strip()
        for row in rows_of(tokenizer, eos_ids, one, rounds=rounds, learn="everything")
        for text in learned_texts(tokenizer, row)
    ]
    assert learned == [turn["content"] for turn in one.messages]


def test_the_last_reply_alone(student):
    tokenizer, eos_ids, end = student
    one = trajectory()
    for flags in (one.learned, (*one.learned[:-1], False)):
        (row,) = rows_of(tokenizer, eos_ids, dataclasses.replace(one, learned=flags), learn="last")
        expected = [turn["content"] for turn, learned in zip(one.messages, flags) if learned][-1]
        assert [text.removesuffix(end).strip() for text in learned_texts(tokenizer, row)] == [expected]


def test_both_layouts_have_the_same_loss(tiny_llama):
    model, tokenizer = load_causal_lm(tiny_llama, torch.float32)
    one = trajectory(rounds=2, count=2, prompt="Go.")
    eos_ids = eos_token_ids(tokenizer, model.generation_config)
    sums = []
    for rounds in ("together", "separate"):
        total, count = torch.zeros(()), 0
        for row in rows_of(tokenizer, eos_ids, one, rounds=rounds):
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            assert ids.shape[1] <= 1024
            with torch.inference_mode():
                logits = model(input_ids=ids).logits[:, :-1]
            keep = labels[:, 1:] != IGNORED
            total += torch.nn.functional.cross_entropy(logits[keep], labels[:, 1:][keep], reduction="sum")
            count += int(keep.sum())
        sums.append((float(total), count))
    assert sums[0][1] == sums[1][1] > 100
    assert sums[0][0] == pytest.approx(sums[1][0], rel=0, abs=1e-4 * sums[0][1])
    assert sums[0][0] == pytest.approx(sums[1][0], rel=1e-5)


def test_a_mark_on_some_turns_is_kept(tokenizer):
    one = trajectory()
    some = Trajectory("t", "q", "r", "m", one.messages, (False, False, False, False, True, False, True))
    rows = rows_of(tokenizer, [2], some)
    assert [text.removesuffix("<|im_end|>") for text in learned_texts(tokenizer, rows[0])] == replies(one)[1:]


def test_a_greeting_is_only_learned_with_everything(student):
    tokenizer, eos_ids, end = student
    talk = [{"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Where?"}, {"from": "gpt", "value": "Kelm"}]
    chat = Trajectory.from_json({"conversations": talk})
    for learn, expected in (("replies", ["Kelm"]), ("last", ["Kelm"]), ("everything", ["Hello", "Where?", "Kelm"])):
        (row,) = rows_of(tokenizer, eos_ids, chat, learn=learn)
        assert [text.removesuffix(end).strip() for text in learned_texts(tokenizer, row)] == expected
    with pytest.raises(ValueError, match="no turn is learned"):
        Trajectory.from_json({"conversations": talk[:1]})


def test_an_empty_thought_that_no_prompt_ends_with_is_learned(tokenizer):
    tokenizer.chat_template = THINKER
    one = trajectory()
    rows = rows_of(tokenizer, [2], one)
    found = [text.removesuffix("<|im_end|>") for row in rows for text in learned_texts(tokenizer, row)]
    assert found == [f"<think>\n\n</think>\n\n{reply}" for reply in replies(one)]


@pytest.mark.parametrize(
    ("template", "eos_ids", "message"),
    [
        (THINKER.replace("</think>", "so</think>"), [2], "writes '<think>.* where the reply .* should begin"),
        (MOVER, [2], "changes the turns before turn 3 when a reply follows .*data.chat_template"),
        (TEMPLATES["smollm2"][0], [0], "ends a reply with '<|im_end|>.* never learn to stop"),
    ],
    ids=["thinker", "mover", "no end"],
)
def test_templates_that_would_give_a_wrong_mask(tokenizer, template, eos_ids, message):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"trajectory 't': the chat template of .* {message}"):
        rows_of(tokenizer, eos_ids, trajectory())


def test_a_base_model_has_no_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        TrajectoryEncoder(tokenizer, [2], TrajectorySection(), "tiny")


def test_long_histories_lose_the_oldest_candidates(tokenizer):
    one = trajectory(rounds=4, count=6)
    loop = ChatEncoder(tokenizer, "m")
    lengths = [len(loop.encode(one.messages[:place])) for place in (2, 4, 6, 8)]
    limit = (lengths[2] + lengths[3]) // 2
    encoder = TrajectoryEncoder(tokenizer, [2], TrajectorySection(max_tokens=4 * lengths[3], max_prompt_tokens=limit))
    counts: Counter[str] = Counter()
    first, last = encoder.rows([one], counts)
    assert (counts["rounds"], counts["shortened_prompts"], counts["of m"]) == (4, 1, 1)
    # Three rounds whole, the fourth by itself with a history that is the loop's.
    assert [text.removesuffix("<|im_end|>") for text in learned_texts(tokenizer, first)] == replies(one)[:3]
    assert [text.removesuffix("<|im_end|>") for text in learned_texts(tokenizer, last)] == replies(one)[3:]
    shown, left_out = leave_out_candidates(one.messages[:8], lambda chat: len(loop.encode(chat)), limit)
    assert counts["candidates_left_out"] == left_out > 0
    prompt = loop.encode(shown)
    assert last["input_ids"][: len(prompt)] == prompt == encoder.prompt(one.messages[:8])
    assert limit - 40 < len(prompt) <= limit
    text = tokenizer.decode(last["input_ids"])
    assert QUESTION in text
    assert all(json.dumps(fact.as_list(), ensure_ascii=False) in text for fact in facts(3, 6))
    assert all(reply in text for reply in replies(one))
    assert shown_candidates(shown[1]["content"]) == list(facts(0, 6))[: 6 - left_out]


def test_a_round_that_does_not_fit_is_counted(tokenizer):
    one = trajectory(rounds=3)
    loop = ChatEncoder(tokenizer, "m")
    limit = len(loop.encode(one.messages[:4])) + 200
    encoder = TrajectoryEncoder(tokenizer, [2], TrajectorySection(max_tokens=limit, max_prompt_tokens=limit - 1))
    counts: Counter[str] = Counter()
    assert all(row["length"] <= limit for row in encoder.rows([one], counts))
    assert counts["rounds_too_long"] > 0
    assert counts["rounds"] == 3
