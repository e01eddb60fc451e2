import pytest
import yaml

from tripletune.data_builders.hotpotqa_subq.prices import PRICES, find_price


def write(path, table):
    path.write_text(yaml.safe_dump(table), encoding="utf-8")
    return path


def test_every_price_has_a_source_and_the_table_a_date():
    table = yaml.safe_load(PRICES.read_text(encoding="utf-8"))
    assert table["taken"]
    for name, row in table["models"].items():
        assert set(row) == {"input", "output", "as_of", "source"}, name
        assert row["source"].startswith("https://")
        assert 0 < row["input"] < row["output"]


def test_a_price_is_found_by_name_with_or_without_backend_and_date(tmp_path):
    row = {"input": 2.0, "output": 8.0, "as_of": "2026-01-02", "source": "https://x"}
    path = write(tmp_path / "p.yaml", {"taken": "2026-01-03", "batch": 0.5, "models": {"m": row}})
    for name in ("m", "openai:m", "m-2026-01-01", "openai:m-20260101", "m-latest"):
        price = find_price(name, path)
        assert price is not None, name
        assert price.cost(1_000_000, 500_000) == 6.0
        assert price.source == "p.yaml, https://x, as of 2026-01-02"
    half = find_price("m", path, batch=True)
    assert half is not None
    assert half.cost(1_000_000, 500_000) == 3.0
    assert find_price("m-mini", path) is None


@pytest.mark.parametrize(
    "text", ["models: [", "models: 3", "a: 1", "models: {m: {input: 1}}", "models: {m: {input: x, output: 1}}"]
)
def test_a_table_of_another_layout(tmp_path, text):
    path = tmp_path / "p.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"p\.yaml: "):
        find_price("m", path)


def test_a_missing_table(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such price table"):
        find_price("m", tmp_path / "p.yaml")
