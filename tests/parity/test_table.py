"""The exit status of a comparison follows the page of evidence."""

import pytest

from tests.parity.table import NOT_RUN, Row, named_steps, show

EQUAL = Row("loss", "8.91954", "8.91954")


@pytest.mark.parametrize(
    ("row", "status"),
    [
        (Row("later searches", "[SUBQ] q", "q", "later searches"), 0),
        (Row("later searches", "[SUBQ] q", "q"), 1),
        (Row("loss", "8.9", "9.1", "clues with two unknowns"), 1),
        (Row("extractor", f"{NOT_RUN}: a model of the hub", ""), 0),
    ],
)
def test_a_difference_that_the_page_does_not_name_is_a_failure(row, status, capsys):
    assert show("RAS", [EQUAL, row]) == status
    assert ("does not name the difference" in capsys.readouterr().out) == bool(status)


def test_every_section_names_its_differences():
    for section in ("RAS", "T2RAG", "TH-RAG"):
        assert len(named_steps(section)) > 8, section
