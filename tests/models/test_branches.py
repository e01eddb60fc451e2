import torch
from hypothesis import given
from hypothesis import strategies as st

from models.branches import PADDING, TRUNK, branch_mask


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=4), st.integers(0, 3))
def test_a_token_sees_its_own_record_alone(trunk: int, others: list[tuple[int, int]], padding: int) -> None:
    records = [list(range(trunk))]
    branches, shared = [TRUNK] * trunk, [0] * trunk
    for number, (begin, length) in enumerate(others, 1):
        begin = min(begin, trunk)
        records.append([*range(begin), *range(len(branches), len(branches) + length)])
        branches += [number] * length
        shared += [begin] * length
    branches += [PADDING] * padding
    shared += [0] * padding
    mask = branch_mask(torch.tensor([branches]), torch.tensor([shared]), torch.float32)
    assert mask.shape == (1, 1, len(branches), len(branches))
    for query, branch in enumerate(branches[: len(branches) - padding]):
        seen = (mask[0, 0, query] == 0).nonzero().flatten().tolist()
        record = records[branch]
        assert seen == record[: record.index(query) + 1]
    for query in range(len(branches) - padding, len(branches)):
        # At least itself, so that no row of scores is empty.
        assert mask[0, 0, query, query] == 0
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}
