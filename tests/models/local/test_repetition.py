from tripletune.models.local.decoding import Request
from tripletune.models.local.grammar import Repetition


class Words:
    """A tokenizer whose tokens are words."""

    def __init__(self, words):
        self.words = words

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.words)}

    def decode(self, tokens, skip_special_tokens=True):
        return ", ".join(self.words[token] for token in tokens)


def test_a_reply_that_goes_round_in_circles_ends():
    words = [f"(S> a| P> b| O> {n})" for n in range(40)]
    circles = Repetition(Words(words))

    def ends_after(tokens):
        request = Request([0], 1000)
        for number, token in enumerate(tokens, 1):
            request.tokens.append(token)
            if circles.found(request):
                return number
        return None

    assert ends_after(range(40)) is None, "new triples all the time"
    assert ends_after([*range(30), *[5] * 20]) == 34
    assert ends_after([*range(30), *[5, 6] * 20]) == 34
    # A new triple in between: the count starts again.
    assert ends_after([*range(30), 5, 5, 5, 35, 5, 5, 5]) is None
    assert ends_after([*range(30), 5, 5, 5, 35, 5, 5, 5, 35]) == 38


def test_what_is_no_whole_triple_does_not_end_a_reply():
    circles = Repetition(Words(["(S> a| P> b| O> c)", "(S> a| P> b", "and (in brackets)"]))
    for tokens in ([0] * 30 + [1], [0] * 3, [2] * 40):
        assert not circles.found(Request([0], 100, tokens=tokens))
    assert circles.found(Request([0], 100, tokens=[0] * 30))
