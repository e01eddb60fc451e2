import pytest
import torch
from transformers import AutoModelForCausalLM

from tripletune.models.data.pairs import read_reply
from tripletune.models.data.triples import Triple, format_triples
from tripletune.models.llm import CallError, Message
from tripletune.models.local import GenerateBatch, Request, decode
from tripletune.models.local.chat import ChatEncoder, Repetition, TripleGrammar
from tripletune.models.local.continuous_batch import ContinuousBatch

CHAT: list[Message] = [{"role": "system", "content": "Plan."}, {"role": "user", "content": "Who?"}]


def test_a_template_is_followed(tokenizer):
    ids = ChatEncoder(tokenizer, "m").encode(CHAT)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nPlan.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )
    # The markers are tokens of their own.
    assert [ids.count(number) for number in (1, 2)] == [3, 2]


def test_a_base_model(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"model m has no chat template.*set plain=True"):
        ChatEncoder(tokenizer, "m")
    assert tokenizer.decode(ChatEncoder(tokenizer, "m", plain=True).encode(CHAT)) == "Plan.\n\nWho?"


def test_a_template_without_a_system_role(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not by turns') }}{% endif %}"
        "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if loud %}!{% endif %}"
    )
    encoder = ChatEncoder(tokenizer, "m", {"loud": True})
    assert tokenizer.decode(encoder.encode(CHAT)) == "<user>Plan.\n\nWho?!"
    twice: list[Message] = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(CallError, match="refuses the turns user, user: not by turns"):
        encoder.encode(twice)


def test_a_template_that_writes_the_day_always_writes_the_same(tokenizer):
    tokenizer.chat_template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y %H:%M:%S:%f') %}{% endif %}"
        "Today: {{ date_string }}. {% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    assert tokenizer.decode(ChatEncoder(tokenizer, "m").encode(CHAT)) == "Today: 26 Jul 2024. Plan.Who?"
    other = ChatEncoder(tokenizer, "m", {"date_string": "1 Jan"})
    assert tokenizer.decode(other.encode(CHAT)) == "Today: 1 Jan. Plan.Who?"


def test_what_chats_with_one_system_turn_begin_with(tokenizer):
    encoder = ChatEncoder(tokenizer, "m")
    ids = encoder.encode(CHAT)
    shared = encoder.shared(CHAT, ids)
    assert tokenizer.decode(ids[:shared]) == "<|im_start|>system\nPlan.<|im_end|>\n<|im_start|>user\n"
    other: list[Message] = [CHAT[0], {"role": "user", "content": "What then?"}, {"role": "assistant", "content": "x"}]
    assert encoder.shared(other, encoder.encode(other)) == shared
    assert encoder.encode(other)[:shared] == ids[:shared]
    assert encoder.shared(CHAT[1:], encoder.encode(CHAT[1:])) == 0, "no system turn"
    assert encoder.shared(CHAT, [9, *ids]) == 0, "tokens of something else"
    # Texts that are joined to the first turn are shared as well.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    )
    joined = ChatEncoder(tokenizer, "m")
    ids = joined.encode(CHAT)
    assert tokenizer.decode(ids[: joined.shared(CHAT, ids)]) == "<user>Plan.\n\n"


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@pytest.fixture
def grammar(tokenizer):
    pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")
    return TripleGrammar(tokenizer, len(tokenizer), {2})


def accepts(grammar, tokenizer, text):
    """Whether the grammar lets a text be written and ended."""
    request = Request([0], 1000)
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]:
        logits = torch.zeros(1, len(tokenizer))
        grammar.restrict(logits, [request])
        if logits[0, token] != 0:
            return False
        request.take(token, {2})
    return True


@pytest.mark.parametrize(
    "triples",
    [
        [],
        [Triple("Oslo", "capital of", "Norway")],
        [Triple("Steel (1979 film)", "director", "Steve Carver"), Triple("René", "born in", "La Haye (Touraine)")],
        [Triple("a|b", "says | P>", "back\\slash (S> x"), Triple("紫式部", "born in", "京都")],
    ],
)
def test_what_is_written_is_accepted(grammar, tokenizer, triples):
    assert accepts(grammar, tokenizer, format_triples(triples))


@pytest.mark.parametrize(
    "text", ["Here are the facts", "(S> a| P> b| O> c", "(S> a| O> c)", "(S> | P> b| O> c)", "(S> a| P> b\n| O> c)"]
)
def test_other_texts_are_not(grammar, tokenizer, text):
    assert accepts(grammar, tokenizer, "NONE")
    assert not accepts(grammar, tokenizer, text)


@pytest.mark.parametrize(("kind", "rows"), [(ContinuousBatch, 1), (ContinuousBatch, 4), (GenerateBatch, 4)])
def test_an_untrained_model_writes_triples_or_is_cut_off(grammar, llama, tokenizer, kind, rows):
    requests = [Request([5 + number, 9], 120) for number in range(5)]
    decode(kind(llama, {2}, 3, rows=rows, constraint=grammar.restrict), requests)
    texts = [tokenizer.decode(request.tokens) for request in requests]
    assert all(not text or text.lstrip().startswith(("(S> ", "NONE")) for text in texts)
    assert any(texts)
    for request, text in zip(requests, texts):
        assert read_reply(text).malformed <= (not request.ended)


class Words:
    """A tokenizer whose tokens are words."""

    def __init__(self, words):
        self.words = words

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.words)}

    def decode(self, tokens, skip_special_tokens=True):
        return ", ".join(self.words[token] for token in tokens)


def test_a_reply_that_only_repeats_itself_ends():
    words = [f"(S> a| P> b| O> {n})" for n in range(40)]
    repetition = Repetition(Words(words))

    def ends_after(tokens):
        request = Request([0], 1000)
        for number, token in enumerate(tokens, 1):
            request.tokens.append(token)
            if repetition.found(request):
                return number
        return None

    assert ends_after(range(40)) is None, "new triples all the time"
    assert ends_after([*range(30), *[5] * 20]) == 34
    assert ends_after([*range(30), *[5, 6] * 20]) == 34
    # A new triple in between: the count starts again.
    assert ends_after([*range(30), 5, 5, 5, 35, 5, 5, 5]) is None
    assert ends_after([*range(30), 5, 5, 5, 35, 5, 5, 5, 35]) == 38


def test_what_is_no_whole_triple_does_not_end_a_reply():
    repetition = Repetition(Words(["(S> a| P> b| O> c)", "(S> a| P> b", "and (in brackets)"]))
    for tokens in ([0] * 30 + [1], [0] * 3, [2] * 40):
        assert not repetition.found(Request([0], 100, tokens=tokens))
    assert repetition.found(Request([0], 100, tokens=[0] * 30))
