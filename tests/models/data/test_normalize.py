import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripletune.models.data.normalize import normalize_answer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("an U.S. state", "us state"),
        ("Theodore", "theodore"),
        ("A", "a"),
        ("The The", "the the"),
        ("É́cole «X»", "é́cole «x»"),
        ("", ""),
        ("  ", ""),
    ],
)
def test_rule(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@given(st.text())
def test_only_blank_text_becomes_empty(text: str) -> None:
    assert bool(normalize_answer(text)) == bool(text.split())


@given(st.text())
def test_case_and_spacing_do_not_matter(text: str) -> None:
    assert normalize_answer(f"  {text}\t") == normalize_answer(text)
    assert normalize_answer(text.lower()) == normalize_answer(text)
