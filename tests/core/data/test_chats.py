import pytest

from tripletune.core.data.fields import NotedRow, unread_columns
from tripletune.core.data.pairs import ExtractionPair, Trajectory

ASKED = {"role": "user", "content": "Where?"}
REPLY = {"role": "assistant", "content": "Kelm"}
AGAIN = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada"}]
TALK = [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "Kelm"}]


def chat(row):
    """Roles, texts and loss mask of a row."""
    trajectory = Trajectory.from_json(row, "f:1")
    turns = [(turn["role"], turn["content"]) for turn in trajectory.messages]
    return turns, trajectory.learned


@pytest.mark.parametrize(
    "row",
    [
        {"system": "Be short.", "conversations": TALK},
        {"system": "Be short.", "messages": [ASKED, REPLY]},
        {"system_prompt": "Be short.", "messages": [ASKED, REPLY]},
        {"system_message": "Be short.", "messages": [ASKED, REPLY]},
        {"system": " Be short.", "messages": [{"role": "system", "content": "Be short."}, ASKED, REPLY]},
        {"system": "Be short.", "instruction": "Where?", "output": "Kelm"},
        {"system": "Be short.", "query": "Where?", "response": "Kelm"},
        {"system": "Be short.", "question": "Where?", "answer": "Kelm"},
        {"system": "Be short.", "question": "Where?", "chosen": "Kelm", "rejected": "Velsund"},
        {"system": "Be short.", "prompt": [ASKED], "completion": [REPLY]},
        {
            "system": "Be short.",
            "conversations": TALK[:1],
            "chosen": TALK[1],
            "rejected": {"from": "gpt", "value": "?"},
        },
    ],
)
def test_a_system_prompt_in_a_column_is_the_first_turn(row):
    assert chat(row) == ([("system", "Be short."), ("user", "Where?"), ("assistant", "Kelm")], (False, False, True))


def test_the_input_of_an_instruction_has_two_names():
    for name in ("input", "context"):
        turns, _ = chat({"instruction": "Where?", name: "He lives in Kelm.", "response": "Kelm"})
        assert turns == [("user", "Where?\n\nHe lives in Kelm."), ("assistant", "Kelm")]


def test_two_system_prompts_are_refused():
    row = {"system": "Be short.", "messages": [{"role": "system", "content": "Be long."}, ASKED, REPLY]}
    with pytest.raises(ValueError, match="f:1: the column system and the first turn are two system prompts"):
        chat(row)


@pytest.mark.parametrize("history", [[["Who?", "Ada"]], AGAIN])
@pytest.mark.parametrize("rest", [{"instruction": "Where?", "output": "Kelm"}, {"messages": [ASKED, REPLY]}])
def test_earlier_rounds_come_before_the_chat(history, rest):
    turns, learned = chat({"system": "Be short.", "history": history, **rest})
    assert [content for _, content in turns] == ["Be short.", "Who?", "Ada", "Where?", "Kelm"]
    assert learned == (False, False, True, False, True)
    with pytest.raises(ValueError, match="history must hold pairs"):
        chat({"history": ["Who?"], **rest})


@pytest.mark.parametrize("flag", ["loss", "loss_mask", "train", "training", "trainable", "weight"])
@pytest.mark.parametrize("value", [False, 0, "0", 0.0, "false"])
def test_a_reply_that_its_flag_excludes_is_not_learned(flag, value):
    turns = [ASKED, {**REPLY, flag: value}, ASKED, {**REPLY, flag: True}, ASKED, {**REPLY, flag: None}]
    assert chat({"messages": turns})[1] == (False, False, False, True, False, True)


def test_a_weight_between_is_refused():
    with pytest.raises(ValueError, match=r"f:1: weight must be true or false, found 0\.5"):
        chat({"messages": [ASKED, {**REPLY, "weight": 0.5}]})


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, REPLY], "rejected_response": "Oslo"},
        {"messages": [ASKED, REPLY], "rejected_messages": [ASKED, {**REPLY, "content": "Oslo"}]},
        {"chosen": [ASKED, REPLY], "rejected": [ASKED, {**REPLY, "content": "Oslo"}]},
        {"prompt": "Where?", "chosen": [ASKED, REPLY], "rejected": [ASKED, {**REPLY, "content": "Oslo"}]},
        {"prompt": [ASKED], "chosen": [REPLY], "rejected": [{**REPLY, "content": "Oslo"}]},
        {"conversations": TALK[:1], "chosen": TALK[1], "rejected": {"from": "gpt", "value": "Oslo"}},
    ],
)
def test_the_rejected_reply_of_a_pair(row):
    pair = Trajectory.from_json(row, "f:1")
    assert chat(row) == ([("user", "Where?"), ("assistant", "Kelm")], (False, True))
    assert pair.rejected == "Oslo"


def test_a_rejected_reply_to_another_prompt_is_refused():
    other = [{"role": "user", "content": "Who?"}, REPLY]
    with pytest.raises(ValueError, match="rejected must be another last reply to the same turns"):
        chat({"messages": [ASKED, REPLY], "rejected_messages": other})


def test_columns_that_are_not_read_are_noticed():
    row = NotedRow({
        "messages": [{**ASKED, "name": "Ann"}, {**REPLY, "tool_calls": [], "reasoning_content": "Hm."}],
        "tools": [{"type": "function"}], "images": [], "label": "place", "id": 7,
    })  # fmt: skip
    Trajectory.from_json(row, "f:1")
    unread = {"messages[].name", "messages[].reasoning_content", "tools", "label"}
    assert unread_columns(row) == unread
    pair = NotedRow({"text": "Ida.", "triples": [{"subject": "a", "predicate": "b", "object": "c"}], "facts": "x"})
    ExtractionPair.from_json(pair, "f:1")
    assert unread_columns(pair) == {"facts"}
    assert unread_columns(NotedRow({"a": 1})) == set(), "taken as a whole"


@pytest.mark.parametrize("name", ["loss_scale", "ignore_loss", "masked", "calculate_loss", "train_detail"])
def test_a_flag_that_is_not_read_is_refused(name):
    with pytest.raises(ValueError, match=f"f:1: {name} of a turn is not read: say by one of loss, loss_mask"):
        chat({"messages": [ASKED, REPLY | {name: True}]})
    assert chat({"messages": [ASKED, REPLY | {name: None}]})[1] == (False, True)


def test_a_mask_beside_the_turns_is_refused():
    with pytest.raises(ValueError, match="the column loss_mask is not read: mark the turns themselves"):
        chat({"messages": [ASKED, REPLY], "loss_mask": [0, 1]})


@pytest.mark.parametrize("row", [{"label": False}, {"kto_tag": False}])
def test_a_bad_example_is_not_learned(row):
    with pytest.raises(ValueError, match="is false, so the reply is a bad example"):
        chat({"prompt": "Where?", "completion": "Kelm"} | row)
    assert chat({"prompt": "Where?", "completion": "Kelm", "label": "place"})[1] == (False, True)


def test_a_question_that_is_to_be_learned_is_refused():
    with pytest.raises(ValueError, match="f:1: train is true for a turn of user, but only replies are learned"):
        chat({"messages": [ASKED | {"train": True}, REPLY]})
    assert chat({"messages": [ASKED | {"train": False, "weight": 1}, REPLY]})[1] == (False, True)


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("turns", "what"),
    [
        ([ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, REPLY], "a turn with tool_calls"),
        ([ASKED, {**REPLY, "tool_calls": [CALL]}], "a turn with tool_calls"),
        ([ASKED, {**REPLY, "function_call": {"name": "weather"}, "weight": 0}, REPLY], "a turn with function_call"),
        ([ASKED, {"role": "tool", "content": "4 degrees", "tool_call_id": "1"}, REPLY], "a turn of the role 'tool'"),
        ([*TALK[:1], {"from": "function_call", "value": "{}"}, TALK[1]], "a turn of the role 'function_call'"),
        ([*TALK[:1], {"from": "observation", "value": "4"}, TALK[1]], "a turn of the role 'observation'"),
    ],
)
def test_a_chat_with_tools_is_refused(turns, what):
    """Without its call or its result, a reply would be learned after a prompt that nobody sends."""
    with pytest.raises(ValueError, match=f"f:1: the chat has {what}, but calls and results of tools are not trained"):
        chat({"messages": turns})


def test_an_unknown_role_is_refused():
    with pytest.raises(ValueError, match="f:1: the role of a message must be one of system, user, assistant, not 'Ann"):
        chat({"messages": [ASKED, {"role": "Ann", "content": "Kelm"}, REPLY]})
