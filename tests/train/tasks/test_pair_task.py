import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tripletune.core.data.pairs import NO_FACTS, ExtractionPair, extraction_chat, load_instruction
from tripletune.core.data.triples import Triple, format_triples
from tripletune.llm.reply_triples import read_reply
from tripletune.models.local.chat import ChatEncoder
from tripletune.train.tasks.text_to_triples import PairEncoder, PairSection

INSTRUCTION = load_instruction()
LONG = "Ada Lovelace, who was born in London, wrote the first program for a machine that was never built. " * 30


def decoder(tokenizer, source=512, target=256):
    return PairEncoder(tokenizer, INSTRUCTION, PairSection(max_source_tokens=source, max_target_tokens=target))


def split(row):
    """Prompt and learned tokens of a decoder's row."""
    start = next(place for place, label in enumerate(row["labels"]) if label != -100)
    assert row["input_ids"][start:] == row["labels"][start:]
    assert row["length"] == len(row["input_ids"]) == len(row["labels"])
    return row["input_ids"][:start], row["labels"][start:]


def test_a_decoder_learns_the_triples_and_the_end_alone(tokenizer, extraction_pairs):
    counts: Counter[str] = Counter()
    rows = list(decoder(tokenizer).rows(extraction_pairs, counts))
    assert +counts == {"pairs": 12, "no_facts": 1}
    assert {"cut_sources", "cut_targets", "lost_triples", "left_out"} < counts.keys()
    for pair, row in zip(extraction_pairs, rows, strict=True):
        prompt, learned = split(row)
        assert prompt == ChatEncoder(tokenizer, "").encode(extraction_chat(pair.source_text, INSTRUCTION))
        assert learned[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(learned[:-1]) == (format_triples(pair.triples) or NO_FACTS)
        assert read_reply(tokenizer.decode(learned, skip_special_tokens=True)).triples == pair.triples


def test_an_encoder_decoder_learns_target_and_end(tokenizer, extraction_pairs):
    rows = list(PairEncoder(tokenizer, None, PairSection()).rows(extraction_pairs, Counter()))
    for pair, row in zip(extraction_pairs, rows, strict=True):
        assert row["input_ids"] == tokenizer(pair.source_text)["input_ids"]
        assert tokenizer.decode(row["labels"]) == format_triples(pair.triples) + tokenizer.eos_token
        assert row["length"] == len(row["input_ids"]) + len(row["labels"])
    assert rows[5]["labels"] == [tokenizer.eos_token_id]


@pytest.mark.parametrize("seq2seq", [False, True])
def test_control_tokens_in_a_pair_are_text(tokenizer, seq2seq):
    pair = ExtractionPair("1", "The tag <|im_end|> ends <s>.", "<|pad|>", (Triple("<|im_end|>", "ends", "<s>"),))
    encoder = PairEncoder(tokenizer, None if seq2seq else INSTRUCTION, PairSection())
    (row,) = encoder.rows([pair], Counter())
    target = row["labels"] if seq2seq else split(row)[1]
    assert tokenizer.decode(target[:-1]) == pair.target
    assert not {0, 1, 2, 3}.intersection(target[:-1])
    counted = [encoder.prompts([text])[0] for text in (pair.source_text, "An ordinary text")]
    assert [[ids.count(token) for token in range(4)] for ids in counted[:1]] == [
        [counted[1].count(n) for n in range(4)]
    ]


@pytest.mark.parametrize("seq2seq", [False, True])
def test_a_long_source_is_cut_at_a_word_and_keeps_its_title(tokenizer, seq2seq):
    pair = ExtractionPair("1", LONG, "Ada Lovelace", (Triple("Ada", "wrote", "a program"),))
    encoder = PairEncoder(tokenizer, None if seq2seq else INSTRUCTION, PairSection(max_source_tokens=64))
    counts: Counter[str] = Counter()
    (cut,) = encoder.cut_sources([pair.source_text], counts)
    assert counts == {"cut_sources": 1}
    assert pair.source_text.startswith(cut + " ")
    assert cut.startswith("Ada Lovelace: Ada")
    limit = 63 if seq2seq else 64
    assert limit - 12 < len(tokenizer(cut, add_special_tokens=False)["input_ids"]) <= limit
    (row,) = encoder.rows([pair], Counter())
    assert row["input_ids"][: len(encoder.prompts([cut])[0])] == encoder.prompts([cut])[0]


@settings(max_examples=30)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=60), limit=st.integers(16, 40))
def test_a_cut_text_fits_and_is_the_beginning(text, limit, tokenizer_folder):
    encoder = decoder(AutoTokenizer.from_pretrained(tokenizer_folder), source=limit)
    text = " ".join(text.split()) or "x"
    counts: Counter[str] = Counter()
    (cut,) = encoder.cut_sources([text], counts)
    assert text.startswith(cut)
    assert cut
    assert len(encoder.tokenizer(cut, add_special_tokens=False)["input_ids"]) <= limit
    assert (cut != text) == bool(counts["cut_sources"])


def test_a_source_with_few_spaces_fills_the_limit(tokenizer):
    text = "2023 年九月" + "苹果公司发布了新手机。" * 9
    (cut,) = decoder(tokenizer, source=64).cut_sources([text], Counter())
    assert 64 - 3 <= len(tokenizer(cut, add_special_tokens=False)["input_ids"]) <= 64
    assert text.startswith(cut)


def test_a_word_of_fifty_thousand_characters_is_cut_too(tokenizer):
    counts: Counter[str] = Counter()
    (cut,) = decoder(tokenizer, source=64).cut_sources(["x" * 50_000], counts)
    assert 16 <= len(cut) <= 64 * 8
    assert counts["cut_sources"] == 1


def test_a_long_target_loses_whole_triples_from_its_end(tokenizer):
    triples = tuple(Triple("Ada Lovelace", "wrote", f"program {number}") for number in range(9))
    pair = ExtractionPair("1", "Ada wrote nine programs.", "", triples)
    whole = len(split(next(decoder(tokenizer, target=10_000).rows([pair], Counter())))[1])
    for limit in range(30, whole + 1):
        counts: Counter[str] = Counter()
        rows = list(decoder(tokenizer, target=limit).rows([pair], counts))
        if not rows:
            assert counts["left_out"] == 1
            continue
        learned = split(rows[0])[1]
        assert len(learned) <= limit
        found = read_reply(tokenizer.decode(learned, skip_special_tokens=True))
        assert not found.is_malformed
        kept = len(found.triples)
        assert found.triples == triples[:kept]
        assert (counts["cut_targets"], counts["lost_triples"]) == (int(kept < 9), 9 - kept)
        # One more would have been too long.
        if kept < 9:
            more = dataclasses.replace(pair, triples=triples[: kept + 1])
            assert len(split(next(decoder(tokenizer, target=10_000).rows([more], Counter())))[1]) > limit


def test_a_pair_without_room_for_one_triple_is_left_out_and_counted(tokenizer, extraction_pairs):
    pair = ExtractionPair("1", "x", "", (Triple("Ada " * 50, "wrote", "it"), Triple("a", "b", "c")))
    counts: Counter[str] = Counter()
    rows = list(decoder(tokenizer, target=40).rows([pair, extraction_pairs[5]], counts))
    assert len(rows) == 1
    assert counts["left_out"] == 1
    assert tokenizer.decode(split(rows[0])[1]) == NO_FACTS + tokenizer.eos_token


def test_text_is_never_read_as_a_control_token(tokenizer):
    pair = ExtractionPair("1", "x", "", (Triple("the token <|im_end|>", "ends", "a turn"),))
    learned = split(next(decoder(tokenizer).rows([pair], Counter())))[1]
    assert learned.count(tokenizer.eos_token_id) == 1
    assert learned[-1] == tokenizer.eos_token_id


def test_the_end_is_the_one_the_chat_template_writes(tokenizer):
    # A tokenizer whose end token ends texts, with a template that ends turns otherwise, as Gemma's.
    tokenizer.eos_token = "<|endoftext|>"
    row = next(
        PairEncoder(tokenizer, INSTRUCTION, PairSection(), type("G", (), {"eos_token_id": [0, 2]})()).rows(
            [ExtractionPair("1", "x", "", (Triple("a", "b", "c"),))], Counter()
        )
    )
    assert row["labels"][-1] == 2
