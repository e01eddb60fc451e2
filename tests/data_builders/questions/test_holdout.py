from tripletune.data_builders.questions.holdout import hold_out


def test_held_out_documents_hang_together():
    links = {("a", "b"): 5, ("c", "d"): 5, ("b", "c"): 1, ("e", "e"): 1}
    assert hold_out(dict.fromkeys("abcde", 10), links, 0.4, 0) in ({"a", "b"}, {"c", "d"})
    assert len(hold_out({"a": 5, "b": 5}, {}, 0.9, 0)) == 1
