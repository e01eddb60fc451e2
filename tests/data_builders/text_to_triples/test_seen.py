from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.data_builders.text_to_triples.seen import SeenTable


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.text(max_size=3), st.text(max_size=2))))
def test_first_notes_are_kept_like_a_dictionary_keeps_them(calls):
    kept: dict[tuple[str, str], str] = {}
    with SeenTable() as seen:
        for kind, value, note in calls:
            assert seen.first(kind, value, note) == kept.get((kind, value))
            kept.setdefault((kind, value), note)


def test_asking_remembers_nothing():
    with SeenTable() as seen:
        assert not seen.has("kind", "a")
        assert seen.first("kind", "a") is None
        assert seen.has("kind", "a")
        assert not seen.has("other", "a")
