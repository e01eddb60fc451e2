import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tripletune.train.rows.sampling import EpochSampler


def order(lengths, batch=4, seed=1, epoch=0, group=True):
    sampler = EpochSampler(lengths, batch, seed, group)
    sampler.set_epoch(epoch)
    return list(sampler)


LENGTHS = random.Random(0).choices(range(5, 500), k=403)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 7), st.integers(0, 5), st.booleans())
def test_every_record_comes_exactly_once(lengths, batch, epoch, group):
    sampler = EpochSampler(lengths, batch, 3, group)
    sampler.set_epoch(epoch)
    assert sorted(sampler) == list(range(len(lengths)))
    assert len(sampler) == len(lengths)


@pytest.mark.parametrize("group", [True, False])
def test_the_order_is_a_function_of_seed_and_epoch_alone(group):
    first = order(LENGTHS, epoch=2, group=group)
    torch.manual_seed(999)
    random.seed(999)
    sampler = EpochSampler(LENGTHS, 4, 1, group)
    list(sampler)
    sampler.set_epoch(2)
    assert list(sampler) == list(sampler) == first
    assert order(LENGTHS, epoch=3, group=group) != first
    assert order(LENGTHS, epoch=2, seed=2, group=group) != first


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    order(LENGTHS)
    assert torch.equal(torch.rand(1), expected)


def padded(indices, batch=4):
    groups = [indices[at : at + batch] for at in range(0, len(indices), batch)]
    return sum(max(LENGTHS[i] for i in group) * len(group) for group in groups)


def test_grouping_saves_padding_and_keeps_batches_shuffled():
    grouped, plain = order(LENGTHS), order(LENGTHS, group=False)
    assert padded(grouped) < 1.05 * sum(LENGTHS)
    assert padded(plain) > 1.4 * sum(LENGTHS)
    longest = [max(LENGTHS[i] for i in grouped[at : at + 4]) for at in range(0, 400, 4)]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)


def test_the_incomplete_batch_stands_last():
    # Anywhere else it would shift the borders of the groups behind it. Two blocks of fifty batches of two, and one
    # record more: every pair must be neighbours in length within its block.
    lengths = [n // 2 for n in range(101)]
    for epoch in range(5):
        grouped = order(lengths, batch=2, epoch=epoch)
        pairs = [abs(lengths[a] - lengths[b]) for a, b in zip(grouped[0:100:2], grouped[1:100:2])]
        assert max(pairs) <= 1


def test_steps_are_made_of_groups_of_every_length():
    # Histories as long as they are deep: pairs are of one depth, but where two meet in a block, and no step is.
    depths = [n % 3 for n in range(768)]
    found = order([100 + 400 * depth for depth in depths], batch=2)
    assert sum(depths[a] != depths[b] for a, b in zip(found[::2], found[1::2])) < 20
    steps = [{depths[row] for row in found[at : at + 16]} for at in range(0, 768, 16)]
    assert sum(len(step) == 1 for step in steps) == 0


def test_epochs_share_no_seed_with_neighbouring_runs():
    assert order(LENGTHS, seed=1, epoch=1) != order(LENGTHS, seed=2, epoch=0)
