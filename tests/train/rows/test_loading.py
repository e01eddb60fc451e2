from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from tripletune.core.data.records import IGNORED
from tripletune.train.rows.loading import EvenBatches, _WithFiller
from tripletune.train.rows.sampling import EpochSampler


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
def test_every_row_comes_once_and_every_process_calls_the_model_equally_often(count, size, world):
    order = EpochSampler([5] * count, size, seed=3)
    batches = list(EvenBatches(order, size, world))
    assert len(batches) == len(EvenBatches(order, size, world))
    assert len(batches) % world == 0
    rows = [row for batch in batches for row in batch if row != count]
    assert rows == list(order)
    assert all(0 < len(batch) <= size for batch in batches)
    fillers = [batch for batch in batches if count in batch]
    assert fillers == [[count]] * (max(0, world - count % (size * world)) if count % (size * world) else 0)


def test_the_filler_has_no_labels():
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4]], "labels": [[-100, 2, 3], [4]]})
    with_filler = _WithFiller(rows)
    assert with_filler.__getitems__([1]) == [{"input_ids": [4], "labels": [4]}]
    assert with_filler.__getitems__([2]) == [{"input_ids": [1, 2, 3], "labels": [IGNORED] * 3}]
    assert len(with_filler) == 2
