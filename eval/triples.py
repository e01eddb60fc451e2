"""Score a text-to-triples model (RAS, section D.1): ROUGE, triple matching at three levels, and grounding.

| level | two triples match if |
|---|---|
| `exact` | all three fields are the same text |
| `normalised` | all three fields are equal, ignoring case, articles, punctuation and the form of the predicate |
| `soft` | the cosine of each of the three fields reaches its threshold (`THRESHOLDS`) |

Matches are one-to-one. Micro scores add up matches over all texts; macro scores are the mean over texts. A text without
facts scores 1 if nothing is predicted, else 0. A failed text scores 0. Intervals draw texts.

ROUGE compares the raw reply with the gold triples in RAS's format, as the paper does; the word for "no facts" counts as
an empty reply. ROUGE counts markers as words and ignores all characters except a to z and 0 to 9, so use it only to
compare with the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, NamedTuple

from tripletune.core.data.pairs import ExtractionPair
from tripletune.core.data.stated import unsupported_reason
from tripletune.core.data.triples import Triple
from tripletune.eval.rouge import rouge_scorer
from tripletune.eval.statistics import bootstrap_ratio
from tripletune.eval.triple_matching import (
    THRESHOLDS,
    Embedder,
    Vectors,
    aligned_fields,
    field_similarities,
    field_vectors,
    is_grounded,
    normalize_entity,
    normalize_triple,
    soft_matches,
)
from tripletune.llm.reply_triples import ExtractionReply, read_reply

ROUGE = ("rouge1", "rouge2", "rougeL")
LEVELS = ("exact", "normalised", "soft")
# Texts whose fields are embedded together: few enough for memory, and enough to fill an embedder's batches.
_CHUNK = 256
_LONGEST_ROUGE = 20_000


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's raw replies to a text or to its pieces in order; without replies all scores are 0.

    Attributes:
        kept: What is kept of their triples; None: all.
    """

    pair: ExtractionPair
    replies: Sequence[str]
    failed: bool = False
    kept: tuple[Triple, ...] | None = None


class Matches(NamedTuple):
    """Numbers of distinct triples of one text at one level; written to JSON as a list."""

    matches: int
    predicted: int
    gold: int


class Share(NamedTuple):
    """A score as a fraction. The score of a data set is the sum of numerators over the sum of denominators."""

    numerator: float
    denominator: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScores:
    """The counts and scores of one text, a line of `scores.jsonl`.

    Attributes:
        gold: Number of distinct gold triples; `predicted` counts the reply's.
        soft: None without an embedder.
        subject: Number of gold triples whose subject is right in the aligned triple; likewise `predicate` and `object`.
        entities: Distinct subjects and objects of the reply; `grounded` of them occur in the text.
        unsupported: Triples of the reply with a name or number that the text does not have (`core.data.stated`), which
            `rag extract` drops; None in scores of older versions.
        malformed_triples: Triples of the reply that could not be read.
        malformed: The reply could not be read as a whole.
    """

    id: str
    failed: bool = False
    gold: int
    predicted: int
    exact: Matches
    normalised: Matches
    soft: Matches | None = None
    subject: int
    predicate: int
    object: int
    entities: int
    grounded: int
    unsupported: int | None = None
    malformed_triples: int
    malformed: bool
    rouge1: float
    rouge2: float
    rougeL: float

    def to_json(self) -> dict[str, Any]:
        """The line of `scores.jsonl`; it has no "soft" without an embedder."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.soft is None:
            del values["soft"]
        return values

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> TextScores:
        """Read a line of `scores.jsonl`; scores that only older versions wrote are left out."""
        values = {field.name: row[field.name] for field in fields(cls) if field.name in row}
        for level in LEVELS:
            if level in values:
                values[level] = Matches(*values[level])
        return cls(**values)


def score_extractions(predictions: Iterable[Prediction], embed: Embedder | None = None) -> dict[str, Any]:
    """Score replies; see `score_texts` and `summarise_extractions`."""
    return summarise_extractions(score_texts(predictions, embed))


def score_texts(predictions: Iterable[Prediction], embed: Embedder | None = None) -> Iterator[TextScores]:
    """Score replies one by one, in order; without `embed` there is no soft level.

    Texts are embedded in chunks: one by one would leave an encoder idle, and all at once would not fit into memory.
    """
    stream = iter(predictions)
    while chunk := list(islice(stream, _CHUNK)):
        replies = list(map(_read_kept_triples, chunk))
        vectors = None
        if embed is not None:
            triples: list[Triple] = []
            for prediction, reply in zip(chunk, replies, strict=True):
                triples += (*prediction.pair.triples, *reply.triples)
            vectors = field_vectors(triples, embed)
        for prediction, reply in zip(chunk, replies, strict=True):
            yield _score_text(prediction, reply, vectors)


def _read_kept_triples(prediction: Prediction) -> ExtractionReply:
    """The replies of a text, with the triples that are kept."""
    reply = read_reply(*prediction.replies)
    return reply if prediction.kept is None else replace(reply, triples=prediction.kept)


def shares_by_score(scores: TextScores) -> dict[str, Share]:
    """Each score of a text by name, such as "exact/micro/f1" or "accuracy/subject".

    All scores are shares, so that one function computes intervals and differences of micro and macro scores alike. A
    failed text has macro scores of 0, even if it has no facts, where an empty reply would score 1.
    """
    shares: dict[str, Share] = {}
    levels = {"exact": scores.exact, "normalised": scores.normalised, "soft": scores.soft}
    for level, counts in levels.items():
        if counts is None:
            continue
        shares[f"{level}/micro/precision"] = Share(counts.matches, counts.predicted)
        shares[f"{level}/micro/recall"] = Share(counts.matches, counts.gold)
        shares[f"{level}/micro/f1"] = Share(2 * counts.matches, counts.predicted + counts.gold)
        macro = PrecisionRecallF1(0.0, 0.0, 0.0) if scores.failed else precision_recall_f1(*counts)
        for name, score in macro._asdict().items():
            shares[f"{level}/macro/{name}"] = Share(score, 1.0)
    gold = scores.normalised.gold
    shares["accuracy/subject"] = Share(scores.subject, gold)
    shares["accuracy/predicate"] = Share(scores.predicate, gold)
    shares["accuracy/object"] = Share(scores.object, gold)
    shares["malformed_output"] = Share(float(scores.malformed), 1.0)
    shares["malformed_triples"] = Share(scores.malformed_triples, scores.malformed_triples + scores.predicted)
    shares["groundedness"] = Share(scores.grounded, scores.entities)
    if scores.unsupported is not None:
        shares["unsupported"] = Share(scores.unsupported, scores.predicted)
    shares["rouge1"] = Share(scores.rouge1, 1.0)
    shares["rouge2"] = Share(scores.rouge2, 1.0)
    shares["rougeL"] = Share(scores.rougeL, 1.0)
    return shares


def summarise_extractions(rows: Iterable[TextScores]) -> dict[str, Any]:
    """The number of texts, and each score of `shares_by_score` with its interval, nested by the parts of its name.

    Numerators and denominators of a text stay together, because the bootstrap draws texts.
    """
    texts = list(map(shares_by_score, rows))
    summary: dict[str, Any] = {"texts": len(texts)}
    if not texts:
        return summary
    for name in texts[0]:
        numerators = [shares[name].numerator for shares in texts]
        denominators = [shares[name].denominator for shares in texts]
        *families, last = name.split("/")
        family = summary
        for family_name in families:
            family = family.setdefault(family_name, {})
        family[last] = bootstrap_ratio(numerators, denominators)
    if "soft" in summary:
        summary["soft"]["thresholds"] = THRESHOLDS
    return summary


def rouge_scores(reply: str, gold: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L F-measures (Lin, 2004; see `eval.rouge`, no stemming); 1 if both texts are empty.

    An overlong reply, as a model that repeats itself writes, is cut at 20,000 characters, ten times any target.
    """
    if not reply.strip() and not gold.strip():
        return dict.fromkeys(ROUGE, 1.0)
    scores = rouge_scorer(ROUGE, stems=False).score(gold, reply[:_LONGEST_ROUGE])
    return {name: float(scores[name].fmeasure) for name in ROUGE}


def _score_text(prediction: Prediction, reply: ExtractionReply, vectors: Vectors | None) -> TextScores:
    """The counts and scores of one text; without `vectors`, which embed texts, there are no soft scores."""
    pair = prediction.pair
    predicted = list(dict.fromkeys(reply.triples))
    gold = list(dict.fromkeys(pair.triples))
    # One triple per normalised form, so that a triple in two spellings is not counted twice.
    predicted_forms = {normalize_triple(triple): triple for triple in reversed(predicted)}
    gold_forms = {normalize_triple(triple): triple for triple in reversed(gold)}
    common_forms = predicted_forms.keys() & gold_forms.keys()
    soft = None
    if vectors is not None:
        similar = field_similarities(list(predicted_forms.values()), list(gold_forms.values()), vectors)
        soft = Matches(soft_matches(similar), len(predicted_forms), len(gold_forms))
    right = aligned_fields(list(predicted_forms), list(gold_forms))
    entities: set[str] = set()
    for triple in predicted:
        entities |= {triple.subject, triple.object}
    text_words = f" {normalize_entity(pair.source_text)} "
    return TextScores(
        id=pair.id,
        failed=prediction.failed,
        gold=len(gold),
        predicted=len(predicted),
        exact=Matches(len(set(predicted) & set(gold)), len(predicted), len(gold)),
        normalised=Matches(len(common_forms), len(predicted_forms), len(gold_forms)),
        soft=soft,
        subject=right.subject,
        predicate=right.predicate,
        object=right.object,
        entities=len(entities),
        grounded=sum(is_grounded(name, text_words) for name in entities),
        unsupported=sum(unsupported_reason(triple, pair.source_text) is not None for triple in predicted),
        malformed_triples=reply.malformed,
        malformed=reply.is_malformed,
        **_rouge_of_replies(prediction),
    )


def _rouge_of_replies(prediction: Prediction) -> dict[str, float]:
    """ROUGE of the raw replies; a failed text scores 0, also one without facts, where an empty reply is right."""
    if prediction.failed:
        return dict.fromkeys(ROUGE, 0.0)
    written = []
    for text in prediction.replies:
        reply = read_reply(text)
        # The word for "no facts" counts as an empty reply, like an empty list of gold triples.
        if reply.triples or reply.is_malformed:
            written.append(text)
    return rouge_scores("\n".join(written), prediction.pair.target)


class PrecisionRecallF1(NamedTuple):
    """The scores of one text at one level of matching, each from 0 to 1."""

    precision: float
    recall: float
    f1: float


def precision_recall_f1(matches: float, predicted: float, gold: float) -> PrecisionRecallF1:
    """Precision, recall and F1 of one text; all 1 if there are neither gold nor predicted triples, which is right."""
    if not predicted and not gold:
        return PrecisionRecallF1(1.0, 1.0, 1.0)
    if not matches:
        return PrecisionRecallF1(0.0, 0.0, 0.0)
    precision = matches / predicted
    recall = matches / gold
    return PrecisionRecallF1(precision, recall, 2 * precision * recall / (precision + recall))
