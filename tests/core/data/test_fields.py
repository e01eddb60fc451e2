import re

import pytest

from tripletune.core.data.fields import checked, is_true, name_field, name_list, unfolded


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("['Ann', 'b']", ["Ann", "b"]),
        ("['Ann' \"O'Neil\"\n 'b c']", ["Ann", "O'Neil", "b c"]),
        ("[['a' 'b']\n ['c' 'd']]", [["a", "b"], ["c", "d"]]),
        ("{'a': [1, -2.5, None]}", {"a": [1, -2.5, None]}),
        ('["it\'s"]', ["it's"]),
        ("[sic]", "[sic]"),
        ("['Ann', 'b", "['Ann', 'b"),
        ("[" * 100_000, "[" * 100_000),
        ("['a'](1)", "['a'](1)"),
        ("Ann", "Ann"),
        (["Ann"], ["Ann"]),
    ],
)
def test_a_list_that_was_printed_is_read(text, value):
    assert unfolded(text) == value


def test_presence_is_not_truth():
    row = {"zero": 0, "none": None, "blank": " ", "text": "None", "half": 1.5, "flag": False, "list": []}
    assert [name_field(row, "", name, "text") for name in ("zero", "none", "blank", "half", "gone", "list")] == [
        "0", "None", "None", "1.5", "None", "None",
    ]  # fmt: skip
    assert name_list({"a": [0, None, "", "x", False]}, "", "a") == ["0", "x", "no", "false"]
    for name in ("flag", "row"):
        with pytest.raises(ValueError, match=f"f:1: {name} must be text, found"):
            name_field(row | {"row": {}}, "f:1", name)


@pytest.mark.parametrize("value", [True, 1, 1.0, "True", "yes", " 1 ", False, 0, "False", "no", "0", "0.0"])
def test_truth_in_any_spelling(value):
    assert is_true({"a": value}, "", "a") is (str(value).strip().lower() in ("true", "1", "1.0", "yes"))
    assert is_true({"a": None}, "", "a", True)
    with pytest.raises(ValueError, match="f:1: a must be true or false, found"):
        is_true({"a": [value]}, "f:1", "a")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [{"b": "x"}], "n": {"x": 1}}, None),
        ({"a": [], "n": {}, "c": None}, None),
        ({"a": [{"b": "x"}, {"b": 7}], "n": {}}, "a[1].b must be text, found 7"),
        ({"a": [{}], "n": {}}, "a[0] lacks b; it has nothing"),
        ({"a": None, "n": {}}, "a must be a list, found null"),
        ({"n": {}}, "the row lacks a; it has n"),
        ({"a": [], "n": {}, "c": 1}, "c must be true or false, found 1"),
        ({"a": [], "n": {"x": True}}, "n.x must be a finite number, found true"),
        ({"a": [], "n": {"x": 10**400}}, "n.x must be a finite number, found 1"),
        ({"a": [], "n": {"x": float("nan")}}, "n.x must be a finite number, found NaN"),
        ([], "the row must be an object, found []"),
    ],
)
def test_what_does_not_fit_a_layout_is_said_with_its_place(value, problem):
    layout = {"a": [{"b": str}], "n": {"": float}, "c?": bool}
    if problem is None:
        assert checked(value, "f:1", layout) == {name: value[name] for name in ("a", "n")}
        return
    with pytest.raises(ValueError, match=re.escape(f"f:1: {problem}")):
        checked(value, "f:1", layout)
