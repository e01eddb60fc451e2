import asyncio
import errno
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.fakes import Backend, Client, Rule
from tripletune.core.calls import CallError, RepliesPending, Sampling, SetupError
from tripletune.core.data.passages import Passage
from tripletune.core.data.pieces import split_passage
from tripletune.core.data.triples import Triple
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient, RetriesExhausted
from tripletune.llm.replies import NO_TEXT
from tripletune.rag.extract import CorpusExtraction, ExtractionCounts
from tripletune.rag.extractor import TextExtractor, source_pieces
from tripletune.rag.triple_store import TripleStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path):
    opened = TripleStore(tmp_path / "triples.sqlite")
    yield opened
    opened.close()


def passages(count):
    return [Passage(f"T{n}", f"Passage {n}{' and more' * (n % 5)}.") for n in range(count)]


def run(extractor, store, given, **options):
    extraction = CorpusExtraction(extractor, store, **options)
    return extraction, asyncio.run(extraction.run(given))


def found(store, extraction, passage):
    return store.get(extraction.id, passage.key)


@pytest.mark.parametrize(
    ("by_length", "concurrency", "window"), [(False, 1, 4), (False, 5, 7), (True, 2, 8), (True, 1, 1000)]
)
def test_the_triples_do_not_depend_on_what_is_under_way(store, by_length, concurrency, window):
    extractor = Rule(None, by_length, concurrency)
    extraction, counts = run(extractor, store, passages(40), window=window)
    assert (counts.passages, counts.extracted, counts.pieces, counts.triples) == (40, 40, 40, 40)
    for passage in passages(40):
        assert found(store, extraction, passage) == (Triple(f"{passage.title}: {passage.text}", "says", "it"),)
    assert extractor.most <= concurrency
    assert sorted(extractor.texts) == sorted(f"{p.title}: {p.text}" for p in passages(40))


def test_replies_that_were_cut_off_are_counted_and_give_only_whole_facts(store):
    class Cut(Rule):
        async def extract(self, texts):
            return [replace(reply, finish_reason="MAX_TOKENS") for reply in await super().extract(texts)]

    given = passages(3)
    texts = [f"{passage.title}: {passage.text}" for passage in given]
    whole, part = "(S> a| P> says| O> it)", "(S> a| P> says| O> i"
    extraction, counts = run(Cut({texts[0]: f"{whole}, {part}", texts[1]: '[["a", "says", "it"], ["a"'}), store, given)
    assert [found(store, extraction, passage) for passage in given[:2]] == [(Triple("a", "says", "it"),)] * 2
    assert (counts.cut_off_replies, counts.exit_code) == (3, 1)
    assert "cut off replies 3" in counts.line()


def test_triples_that_the_passage_does_not_support_are_dropped_and_counted(store):
    passage = Passage("Kelm", "Kelm lies on the Sarn. It has 4,500 inhabitants.")
    reply = (
        "(S> Kelm| P> lies on| O> Sarn), (S> Kelm| P> country| O> Norway), (S> Kelm| P> inhabitants| O> 4,600), "
        "(S> Ada| P> born in| O> Osk)"
    )
    extractor = TextExtractor(Client(answer=lambda _: reply), "Example: Ada was born in Osk.")
    dropping, counts = run(extractor, store, [passage], keep_unsupported=False)
    assert found(store, dropping, passage) == (Triple("Kelm", "lies on", "Sarn"),)
    assert (counts.triples, counts.malformed_triples, counts.exit_code) == (1, 0, 0)
    assert (counts.invented_names, counts.invented_numbers, counts.copied_examples) == (1, 1, 1)
    assert "invented names 1, invented numbers 1, copied examples 1" in counts.line()
    # What one run dropped, another may keep: both are in the store.
    keeping, counts = run(extractor, store, [passage])
    assert (len(found(store, keeping, passage)), counts.invented_names) == (4, 0)
    assert len(found(store, dropping, passage)) == 1


def test_a_model_on_this_machine_reads_the_longest_first(store):
    extractor = Rule(by_length=True)
    run(extractor, store, passages(40))
    lengths = [len(text.split()) for text in extractor.texts]
    assert lengths == sorted(lengths, reverse=True)


def test_another_model_prompt_or_limit_reads_again(store):
    other = Rule()
    other.settings = "another prompt"
    ways = ((Rule(), {}), (other, {}), (Rule(), {"piece_limit": 50}))
    assert len({run(extractor, store, passages(1), **options)[0].id for extractor, options in ways}) == 3


def test_long_passages_are_cut_and_merged(store):
    text = "Ada was born in London. She knew Babbage. Ada was born in London. She knew Babbage."
    extractor = Rule(replies={"Ada: She knew Babbage.": "(S> a| P> b| O> c)"})
    extraction, counts = run(extractor, store, [Passage("Ada", text)], piece_limit=30)
    assert extractor.texts == ["Ada: Ada was born in London.", "Ada: She knew Babbage."] * 2
    assert (counts.split, counts.pieces, counts.triples) == (1, 4, 2)
    assert found(store, extraction, Passage("Ada", text)) == (
        Triple("Ada: Ada was born in London.", "says", "it"),
        Triple("a", "b", "c"),
    )


def test_a_passage_of_its_title_alone_and_an_empty_one_are_not_sent(store):
    name, empty = Passage("Oslo", "Oslo."), Passage("", "\u3000 ")
    extraction, counts = run(extractor := Rule(), store, [name, empty])
    assert (counts.extracted, counts.only_names, counts.empty, extractor.texts) == (1, 1, 1, [])
    assert found(store, extraction, name) == (Triple("Oslo", "is", "Oslo"),)


def test_bad_output_is_counted_and_costs_no_neighbour(store):
    given = passages(5)
    names = [f"{passage.title}: {passage.text}" for passage in given]
    replies = {
        names[0]: "(S> a| P> b| O> c), (S> d| P> e| O> never closed",
        names[1]: "I can't say.",
        names[2]: "NONE",
        names[3]: "(S> broken",
        names[4]: '[["a", "b", "\\ud83d"]]',
    }
    extraction, counts = run(Rule(replies=replies), store, given)
    assert (counts.malformed_triples, counts.malformed_replies, counts.recovered_replies) == (1, 3, 1)
    assert (counts.extracted, counts.unread, counts.without_facts, counts.triples) == (3, 2, 1, 2)
    assert found(store, extraction, given[0]) == (Triple("a", "b", "c"),)
    assert found(store, extraction, given[2]) == ()
    assert found(store, extraction, given[4]) == (Triple("a", "b", "\ufffd"),)


UNREAD = [
    "I'm sorry, I can't.",
    "<html>[1]</html>",
    '{"answer": 42}',
    "<think>\nIt says",
    "(S> broken",
    '{"triples": ["a"',
]


def test_a_reply_that_cannot_be_read_is_no_text_without_facts(store):
    given = passages(30)
    texts = [f"{passage.title}: {passage.text}" for passage in given]
    replies = dict(zip(texts, [*UNREAD, "NONE", "[]", '{"triples": []}', "No facts found."]))
    extraction, counts = run(extractor := Rule(replies=replies), store, given)
    assert (counts.unread, counts.without_facts, counts.exit_code) == (6, 4, 1)
    assert "unread 6" in counts.line()
    assert counts.unread_reply in UNREAD
    assert not any(reply in counts.line() for reply in UNREAD)
    assert [found(store, extraction, one) for one in given[:10]] == [None] * 6 + [()] * 4
    # A loop asks once in a run, the next run again.
    assert asyncio.run(extraction.read(given[:1])) == [None]
    assert extractor.texts.count(texts[0]) == 1
    _, again = run(Rule(replies=dict(zip(texts, UNREAD[:2]))), store, given)
    assert (again.stored, again.extracted, again.unread, again.exit_code) == (24, 4, 2, 1)
    assert ExtractionCounts(extracted=27, unread=3).exit_code == 0
    # A model on this machine would write the same again.
    extraction, counts = run(Rule(replies=replies, by_length=True), store, given, piece_limit=99)
    assert (counts.unread, counts.without_facts, counts.exit_code) == (6, 4, 1)
    assert found(store, extraction, given[0]) == ()


def test_a_teacher_is_asked_again_for_what_could_not_be_read(store, tmp_path):
    for text, calls, unread in (("I can't.", 2, 1), ("(S> a| P> b| O> c)", 1, 0), ("no call", 0, 0)):
        asked = []

        def reply(messages, asked=asked, text=text):
            asked.append(messages)
            return text if "T1" in messages[-1]["content"] else "NONE"

        client = LedgerClient(Backend("m", reply), Ledger(tmp_path / "ledger.sqlite"))
        _, counts = run(TextExtractor(client, "Read."), store, passages(2))
        asyncio.run(client.close())
        assert (len(asked), counts.unread) == (calls, unread)


def test_a_failing_text_costs_itself_alone_and_is_tried_again(store):
    given = passages(6)
    bad = f"{given[2].title}: {given[2].text}"
    extraction, counts = run(Rule(replies={bad: CallError("too long")}), store, given)
    assert (counts.extracted, counts.failed) == (5, 1)
    assert found(store, extraction, given[2]) is None
    _, again = run(Rule(), store, given)
    assert (again.stored, again.extracted) == (5, 1)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SetupError("refused key"), "refused key"),
        (RetriesExhausted("server gone"), "server gone"),
        (OSError(errno.ENOSPC, "the ledger can't be written"), r"\[Errno 28\] the ledger can't be written"),
        # What a passage may be at fault for stops the run when it is said twenty times in a row.
        (RuntimeError("no memory"), r"20 passages in a row failed, .*: no memory\. .*run the same command again$"),
        (CallError(NO_TEXT), r"20 passages in a row failed, .*run the same command again \(.* writes NONE\)$"),
    ],
)
def test_what_stops_the_run_keeps_what_was_read(store, error, told):
    given = passages(60)
    replies = {f"{passage.title}: {passage.text}": error for passage in given[9:]}
    with pytest.raises((CallError, OSError), match=f"^{told}"):
        run(Rule(concurrency=1, replies=replies), store, given)
    assert store.choose().passages == 9


def read(extractor, store, *questions):
    """What loops under way together get, each for its passages."""
    extraction = CorpusExtraction(extractor, store)

    async def all_of_them():
        return await asyncio.gather(*map(extraction.read, questions), return_exceptions=True)

    return asyncio.run(all_of_them()), extraction.counts


def test_loops_together_read_a_passage_once_and_the_next_run_none(store):
    class Slow(Rule):
        async def extract(self, texts):
            await asyncio.sleep(0.05)
            return await super().extract(texts)

    one, two, three = passages(3)
    extractor, started = Slow(), time.monotonic()
    given, counts = read(extractor, store, [one, two], [two, one, one], [Passage("Oslo", "Oslo"), three])
    ((first, second), again, (oslo, _)) = given
    assert first == (Triple(f"{one.title}: {one.text}", "says", "it"),)
    assert (again, oslo) == ([second, first, first], (Triple("Oslo", "is", "Oslo"),))
    assert (counts.extracted, counts.repeated, counts.passages, len(extractor.texts)) == (4, 2, 7, 3)
    assert 0 < counts.seconds <= time.monotonic() - started
    _, beforehand = run(later := Rule(), store, passages(3))
    assert (later.texts, beforehand.stored) == ([], 3)
    given, counts = read(later := Rule(), store, [one, two])
    assert (later.texts, given, counts.stored) == ([], [[first, second]], 2)


def test_a_passage_that_fails_in_a_loop_is_tried_by_the_next_question(store):
    one, two = passages(2)
    texts = [f"{passage.title}: {passage.text}" for passage in (one, two)]
    ((known, unknown),), counts = read(Rule(replies={texts[1]: CallError("too long")}), store, [one, two])
    assert (bool(known), unknown, counts.failed) == (True, None, 1)
    (error,), _ = read(Rule(replies={texts[1]: RepliesPending("waits")}), store, [two])
    assert isinstance(error, RepliesPending)
    (error,), _ = read(Rule(replies={texts[1]: SetupError("no key")}), store, [two])
    assert isinstance(error, SetupError)
    ((found_now,),), _ = read(Rule(), store, [two])
    assert found_now == (Triple(texts[1], "says", "it"),)


def test_a_cancelled_question_leaves_the_passage_to_the_others(store):
    given = passages(5)

    async def two_questions():
        extraction = CorpusExtraction(Rule(), store)
        first = asyncio.create_task(extraction.read(given))
        second = asyncio.create_task(extraction.read(given))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert all(asyncio.run(two_questions()))


def test_passages_are_taken_only_as_fast_as_they_are_read(store):
    taken = 0

    def corpus():
        nonlocal taken
        for passage in passages(500):
            taken += 1
            yield passage

    class Watching(Rule):
        async def extract(self, texts):
            assert taken - extraction.counts.extracted <= 16 + 8
            return await super().extract(texts)

    extraction = CorpusExtraction(Watching(concurrency=8), store, window=16)
    assert asyncio.run(extraction.run(corpus())).extracted == 500


def test_a_chat_model_sees_what_training_renders_after_the_examples(store):
    client = Client("(S> a| P> b| O> c)")
    shots = (("Oslo is in Norway.", "(S> Oslo| P> in| O> Norway)"), ("Hm.", ""))
    extractor = TextExtractor(client, "Extract.", shots, Sampling(max_tokens=99, seed=3))
    run(extractor, store, [Passage("Ada", "Ada\n was born.")])
    asyncio.run(extractor.close())
    (asked,) = client.asked
    assert [(turn["role"], turn["content"]) for turn in asked.messages] == [
        ("system", "Extract."),
        ("user", "Oslo is in Norway."),
        ("assistant", "(S> Oslo| P> in| O> Norway)"),
        ("user", "Hm."),
        ("assistant", "NONE"),
        ("user", "Ada: Ada was born."),
    ]
    assert (asked.role, asked.sampling, client.closed) == ("extract.triples", Sampling(max_tokens=99, seed=3), True)
    assert store.choose().model == "script"
    assert "Extract." in store.choose().settings
    assert extractor.settings != TextExtractor(client, "Extract.").settings


@pytest.mark.parametrize("words", [10, 200, 330, 400, 600, 5000])
def test_no_piece_is_longer_than_the_limit_whatever_the_title(words):
    title = " ".join(["abc"] * words)
    pieces = source_pieces(title, "She was born here. " * 300)
    assert max(map(len, pieces)) <= 1600
    assert "".join(piece.split(": ", 1)[1].replace(" ", "") for piece in pieces) == "Shewasbornhere." * 300


def bare(text):
    return "".join(text.split())


@hypothesis.given(
    st.text(alphabet=st.one_of(st.sampled_from("ab .?!。\n\"'()"), st.characters(codec="utf-8"))), st.integers(1, 40)
)
def test_no_character_is_lost_and_no_piece_is_too_long(text, limit):
    pieces = split_passage(text, limit)
    assert "".join(map(bare, pieces)) == bare(text)
    assert all(piece and len(piece) <= limit for piece in pieces)


def test_pieces_end_between_sentences():
    text = "Dr. Ida Morn was born in the U.S. in 1871. She painted. Was she known? She was."
    assert split_passage(text, 45) == [
        "Dr. Ida Morn was born in the U.S. in 1871.",
        "She painted. Was she known? She was.",
    ]
    assert split_passage(text, 30, overlap=14)[1:] == [
        "U.S. in 1871. She painted.", "She painted. Was she known?", "Was she known? She was.",
    ]  # fmt: skip
    assert split_passage(text, 30, overlap=13)[2:] == ["She painted. Was she known?", "She was."]


KILLED = """
import asyncio, os, signal, sys
from tripletune.core.data.pairs import render_source
from tripletune.core.data.passages import Passage
from tripletune.core.calls import Completion
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.triple_store import TripleStore

class Slow:
    vocabulary, drop_outside, instruction = None, False, ""
    render = staticmethod(render_source)
    model, settings, by_length, concurrency = "m", "s", False, 2
    done = 0
    async def extract(self, texts):
        self.done += 1
        if self.done > 150:
            os.kill(os.getpid(), signal.SIGKILL)
        return [Completion("(S> a| P> b| O> c)")] * len(texts)

async def loop(passages):
    for passage in passages:
        await run.read([passage])

run = CorpusExtraction(Slow(), TripleStore(sys.argv[1]))
asyncio.run({"corpus": run.run, "loop": loop}[sys.argv[2]](Passage("", f"passage {n}") for n in range(400)))
"""


@pytest.mark.parametrize("where", ["corpus", "loop"])
def test_a_killed_run_goes_on(tmp_path, where):
    path = tmp_path / "killed.sqlite"
    process = subprocess.run([sys.executable, "-c", KILLED, str(path), where], cwd=ROOT, check=False)
    assert process.returncode == -9
    store = TripleStore(path, create=False)
    kept = store.choose().passages
    assert kept >= 149
    extractor = Rule()
    extractor.model, extractor.settings = "m", "s"
    _, counts = run(extractor, store, [Passage("", f"passage {n}") for n in range(400)])
    assert (counts.stored, counts.extracted) == (kept, 400 - kept)
    assert store.choose().passages == 400
    store.close()
