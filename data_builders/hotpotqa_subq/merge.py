"""Merges the outputs of a sharded build (`--shard i/n`) into the data set that one process would have written.

Each shard's folder holds an `order.tsv`: for every labelled question its source, its place there, its split and the
number of its records. The shards are merged by these places, one record in memory at a time, written anew and counted
anew, so shards, statistics and card come out byte for byte as an unsharded run into the same folder writes them.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.data_builders.datasets.card import STATISTICS, BuildFacts
from tripletune.data_builders.datasets.inspect import dataset_files
from tripletune.data_builders.datasets.kinds.records import KIND as RECORDS
from tripletune.data_builders.datasets.writer import FolderOptions, new_dataset
from tripletune.data_builders.hotpotqa_subq.dropped import DroppedQuestion, DroppedWriter, read_dropped
from tripletune.data_builders.hotpotqa_subq.output import ORDER
from tripletune.data_builders.hotpotqa_subq.questions import DropReason
from tripletune.data_builders.hotpotqa_subq.sources import Source
from tripletune.data_builders.text_to_triples.mixing import PARTS, shortages
from tripletune.models.data.records import Record, read_records

# Options in which the shards of one build may differ: they change no record.
VOLATILE = ("output", "overwrite", "shard", "concurrency", "batch_size", "ledger", "direct_answers")
_SAME = ("title", "summary", "teachers", "prompts", "models", "issues", "notes")
_SHARD = re.compile(r"(\d+)/(\d+)")


class Place(NamedTuple):
    """A line of `order.tsv`: where a labelled question stands in the input, and which records are its own."""

    source: int
    position: int
    shard: int
    split: str
    records: int


@dataclass
class ShardFolder:
    """One shard's output.

    Attributes:
        path: Its folder.
        number: Which shard it is, from 0.
        count: How many shards the build has.
        facts: What its card says besides the numbers.
    """

    path: Path
    number: int
    count: int
    facts: BuildFacts

    @classmethod
    def open(cls, path: str | Path) -> ShardFolder:
        """Read what a shard says of itself.

        Raises:
            FileNotFoundError: the folder, its statistics or its order file is missing.
            ValueError: it is not the output of a sharded build.
        """
        path = Path(path)
        for name in (STATISTICS, ORDER):
            if not (path / name).is_file():
                raise FileNotFoundError(
                    f"{path} has no {name}: it is not a finished output of data_builders.hotpotqa_subq with --shard"
                )
        try:
            build = json.loads((path / STATISTICS).read_text(encoding="utf-8"))["build"]
            facts = BuildFacts(**build)
            match = _SHARD.fullmatch(str(facts.options["shard"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path / STATISTICS}: not the statistics of a sharded build ({error!r})") from None
        if match is None:
            raise ValueError(f"{path} was not built with --shard i/n (it says {facts.options['shard']!r})")
        return cls(path, int(match[1]), int(match[2]), facts)

    def places(self) -> Iterator[Place]:
        """The labelled questions in the order of the input.

        Raises:
            ValueError: a line is malformed, out of order or of another shard.
        """
        before = (-1, -1)
        with (self.path / ORDER).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{self.path / ORDER}:{number}"
                try:
                    source, position, split, records = line.rstrip("\n").split("\t")
                    place = Place(int(source), int(position), self.number, split, int(records))
                except ValueError:
                    raise ValueError(f"{where}: expected source, position, split and number of records") from None
                if place[:2] <= before or place.position % self.count != self.number:
                    raise ValueError(f"{where}: this question is out of order, or belongs to another shard")
                before = place[:2]
                yield place


def merge(folders: Sequence[str | Path], output: str, overwrite: bool = False) -> dict[str, Any]:
    """Merge the shards of one build, given in any order.

    Args:
        folders: The output folders of all shards.
        output: The folder of the merged data set.
        overwrite: Whether a data set that is there may be replaced.

    Returns:
        The statistics that are also in `statistics.json`.

    Raises:
        FileNotFoundError: a shard is missing or unfinished.
        FileExistsError: the output folder is taken.
        ValueError: the folders are not all shards of one build, or a shard's files don't fit together.
    """
    if Path(output).resolve() in {Path(folder).resolve() for folder in folders}:
        raise ValueError(f"output {output} is one of the shards; give another folder")
    shards = _all_of_one_build([ShardFolder.open(folder) for folder in folders])
    options = shards[0].facts.options
    target = FolderOptions(
        output, options["format"], int(options["shard_size"]), overwrite, tokenizer=options.get("tokenizer")
    )

    # As without shards: there is something to read in a card without records where a teacher LLM was asked.
    asked = any(shard.facts.calls for shard in shards)
    with new_dataset(target, RECORDS) as dataset:
        for record, split in _merged_records(shards):
            dataset.write(record, split)
        with DroppedWriter(dataset.folder) as writer:
            for dropped in _merged_drops(shards):
                writer.add(dropped)
        facts = dataclasses.replace(merged_facts(shards, output, overwrite), examples=writer.examples())
        return dataset.finish(facts, may_be_empty=asked)


def merged_facts(shards: Sequence[ShardFolder], output: str, overwrite: bool) -> BuildFacts:
    """What the card of the merged data set says besides the numbers: counts added up, the rest as in every shard.

    Examples of questions that were left out are not in it: they are picked while those questions are merged.
    """
    every = [shard.facts for shard in shards]
    first = every[0]
    # The teachers name every source, in the order of the command line.
    sources = list(first.teachers)
    reasons = [reason.value for reason in DropReason]
    drops = _added([facts.drops for facts in every], sources)
    questions = {source: sum(facts.questions.get(source, 0) for facts in every) for source in sources}
    return dataclasses.replace(
        first,
        questions=questions,
        drops={
            source: dict(sorted(counts.items(), key=lambda item: _rank(reasons, item[0])))
            for source, counts in drops.items()
        },
        repairs=_sorted(_added([facts.repairs for facts in every], sources)),
        refused=_sorted(_added([facts.refused for facts in every], sources)),
        recovered=_sorted(_added([facts.recovered for facts in every], sources)),
        examples={},
        calls={
            stage: {name: sum(facts.calls.get(stage, {}).get(name, 0) for facts in every) for name in names}
            for stage, names in sorted(_names(facts.calls for facts in every).items())
        },
        files=dict(sorted({name: digest for facts in every for name, digest in facts.files.items()}.items())),
        options=first.options | {"output": output, "overwrite": overwrite, "shard": None},
        notes=[*shortages(_parts(first.options, questions, drops)), *first.notes],
    )


def _all_of_one_build(shards: list[ShardFolder]) -> list[ShardFolder]:
    """The shards by number.

    Raises:
        ValueError: one is missing or given twice, or they differ in what they were built from or how.
    """
    first = shards[0]
    for shard in shards[1:]:
        for name, here, there in _differences(first.facts, shard.facts, (first.count, shard.count)):
            raise ValueError(f"{first.path} and {shard.path} are not of one build: {name} is {here!r} and {there!r}")
    given = Counter(shard.number for shard in shards)
    missing = [number for number in range(first.count) if number not in given]
    twice = [number for number, times in given.items() if times > 1]
    if missing or twice:
        told = [f"shard {number}/{first.count} is missing" for number in missing]
        told += [f"shard {number}/{first.count} is given twice" for number in twice]
        raise ValueError(f"the build has {first.count} shards: {', '.join(told)}")
    return sorted(shards, key=lambda shard: shard.number)


def _differences(one: BuildFacts, other: BuildFacts, counts: tuple[int, int]) -> Iterator[tuple[str, object, object]]:
    if counts[0] != counts[1]:
        yield "the number of shards", counts[0], counts[1]
    for name in dict.fromkeys([*one.options, *other.options]):
        here, there = one.options.get(name), other.options.get(name)
        if name == "sources":
            # The same files may lie in different places of different machines; their digests are compared below.
            here, there = _readers(here or []), _readers(there or [])
        if name not in VOLATILE and here != there:
            yield f"option {name}", here, there
    for name in _SAME:
        if getattr(one, name) != getattr(other, name):
            yield name, getattr(one, name), getattr(other, name)
    if _inputs(one) != _inputs(other):
        yield "input files", _inputs(one), _inputs(other)


def _readers(sources: list[str]) -> list[str]:
    return [f"{source.name}={source.reader}" for source in map(Source.parse, sources)]


def _parts(
    options: dict[str, Any], questions: dict[str, int], drops: dict[str, dict[str, int]]
) -> dict[str, tuple[str, int, int, int]]:
    """The sources that are parts of the mix: reader, questions asked for, that gave records and that were left out."""
    found = {}
    for source in map(Source.parse, options.get("sources") or []):
        if source.reader in PARTS:
            limits = (options.get("limit"), options.get(f"{source.reader}_count"))
            wanted = min((limit for limit in limits if limit is not None), default=0)
            left_out = sum(drops.get(source.name, {}).values())
            found[source.name] = (source.reader, wanted, questions.get(source.name, 0), left_out)
    return found


def _inputs(facts: BuildFacts) -> list[str]:
    """Digests of the input files. Paths differ between machines, and direct answers may be stored by shard."""
    output = str(facts.options.get("output", "")).rstrip("/")
    answers = {facts.options.get("direct_answers"), f"{output}.direct_answers.jsonl"}
    return sorted(digest for name, digest in facts.files.items() if name not in answers)


def _merged_records(shards: Sequence[ShardFolder]) -> Iterator[tuple[Record, str]]:
    streams = {(shard.number, split): _stream(files) for shard in shards for split, files in _files(shard.path).items()}
    for place in heapq.merge(*(shard.places() for shard in shards)):
        stream = streams.get((place.shard, place.split), iter(()))
        for _ in range(place.records):
            record = next(stream, None)
            if record is None:
                raise ValueError(_unfit(shards[place.shard], place.split, "fewer"))
            yield record, place.split
    for (number, split), stream in streams.items():
        if next(stream, None) is not None:
            raise ValueError(_unfit(shards[number], split, "more"))


def _merged_drops(shards: Sequence[ShardFolder]) -> Iterator[DroppedQuestion]:
    """The questions that the teacher could not label, in the order of the input."""
    order = {source: number for number, source in enumerate(shards[0].facts.teachers)}
    streams = [read_dropped(shard.path) for shard in shards]
    return heapq.merge(*streams, key=lambda dropped: (order.get(dropped.source, len(order)), dropped.row))


def _files(folder: Path) -> dict[str, list[Path]]:
    # A shard in which no question could be labelled has no records.
    try:
        return dataset_files(folder)
    except FileNotFoundError:
        return {}


def _stream(files: list[Path]) -> Iterator[Record]:
    for file in files:
        yield from read_records(file)


def _unfit(shard: ShardFolder, split: str, which: str) -> str:
    return (
        f"{shard.path} holds {which} records of split {split!r} than its {ORDER} says; build the shard again "
        f"(--shard {shard.number}/{shard.count} --overwrite)"
    )


def _added(counts: Sequence[dict[str, dict[str, int]]], sources: list[str]) -> dict[str, dict[str, int]]:
    """Counts by source and kind, added up; sources without any are left out."""
    total: dict[str, Counter[str]] = {source: Counter() for source in sources}
    for one in counts:
        for source, numbers in one.items():
            total.setdefault(source, Counter()).update(numbers)
    return {source: dict(numbers) for source, numbers in total.items() if numbers}


def _sorted(counts: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    return {source: dict(sorted(numbers.items())) for source, numbers in counts.items()}


def _names(every: Iterator[dict[str, dict[str, float]]]) -> dict[str, list[str]]:
    names: dict[str, dict[str, None]] = {}
    for calls in every:
        for stage, numbers in calls.items():
            names.setdefault(stage, {}).update(dict.fromkeys(numbers))
    return {stage: list(found) for stage, found in names.items()}


def _rank(known: list[str], reason: str) -> tuple[int, str]:
    return (known.index(reason) if reason in known else len(known), reason)
