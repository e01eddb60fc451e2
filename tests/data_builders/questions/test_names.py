import pytest

from tripletune.data_builders.questions.names import read_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1971", ("", 1971)),
        ("4,100 people", ("people", 4100)),
        ("3 May 2016", ("date", 736087)),
        ("May 2016", ("month", 736085)),
        ("1,5 km", ("km", 1.5)),
        ("1,500 km", ("km", 1500)),
        ("blue", None),
        ("-40 °C", ("°c", -40)),
        ("about −5.5 m", ("about m", -5.5)),
        ("509 BC", ("bc", -509)),
    ],
)
def test_quantities(text, value):
    assert read_quantity(text) == value
