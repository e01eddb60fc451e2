from tripletune.train.rows.batches import pad_batch


def test_padding():
    assert pad_batch([[1, 2, 3], [4]], 9, 4).tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
