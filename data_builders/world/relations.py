"""The relations of the fictional world of `data_builders.world`, and every way to state them and to ask for them.

One `Relation` is one predicate of one kind of entity. The wordings are short phrases that nest, so that a question
over any number of hops is put together from them: `{x}` stands for the entity asked about, `{s}` and `{o}` for
subject and object of a statement, `{a}` and `{b}` for the two sides of a comparison.

Where many articles mention one name (towns, countries), statements and questions use different words: an article that
mentions the name and shares the question's other words would otherwise be found before the article asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

PERSON_NOUNS = ("painter", "architect", "teacher", "engineer", "singer", "lawyer", "actor", "journalist", "chemist")
WH_WORDS = {
    "person": "Who",
    "town": "Which town",
    "river": "Which river",
    "lake": "Which lake",
    "country": "Which country",
    "band": "Which band",
    "university": "Which university",
}


@dataclass(frozen=True, slots=True)
class Relation:
    """One predicate of one kind of entity.

    Attributes:
        kind: Kind of the subject.
        predicate: The predicate as it stands in triples.
        target: Kind of the object, or "" for a number, a year or a word without an article of its own.
        ask: Whole questions; the first one is the wording of sub-queries.
        refer: Noun phrases for the object. Those that end in `{x}` also take another phrase in its place.
        verb: Verb phrases that follow the subject.
        after: Phrase that follows "is a <kind>", or "".
        full: Whole statements without full stop; every relation has one, or a verb phrase.
        noun: Noun of the opening sentence that states the object, for example "{o} club", or "".
        act: What the object does to the subject, for "Who <act> and <act>?", or "".
        less: Comparisons won by the smaller value.
        more: Comparisons won by the larger value.
        same: Yes/no questions whether two subjects have the same object.
        optional: Whether an article may leave the fact out.
    """

    kind: str
    predicate: str
    target: str
    ask: tuple[str, ...]
    refer: tuple[str, ...] = ()
    verb: tuple[str, ...] = ()
    after: str = ""
    full: tuple[str, ...] = ()
    noun: str = ""
    act: str = ""
    less: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    optional: bool = False


def _founded(kind: str, verb: str = "founded", predicate: str = "Founded in") -> Relation:
    return Relation(
        kind,
        predicate,
        "",
        ask=(f"When was {{x}} {verb}?", f"In which year was {{x}} {verb}?", f"In what year was {{x}} {verb}?"),
        verb=(f"was {verb} in {{o}}",),
        after=f"{verb} in {{o}}",
        full=(f"The year in which {{s}} was {verb} is {{o}}",),
        less=(
            f"Which was {verb} first, {{a}} or {{b}}?",
            f"Which was {verb} earlier, {{a}} or {{b}}?",
            "Which is older, {a} or {b}?",
        ),
        more=(f"Which was {verb} later, {{a}} or {{b}}?",),
        optional=True,
    )


def _home(kind: str, predicate: str, verb: str, place: str = "home town", is_place: str = "is home to") -> Relation:
    return Relation(
        kind,
        predicate,
        "town",
        ask=(f"In which town is {{x}} {verb}?", f"Which town {is_place} {{x}}?", f"What town is {{x}} {verb} in?"),
        refer=(f"the {place} of {{x}}", f"the town where {{x}} is {verb}"),
        verb=(f"is {verb} in {{o}}",),
        after=f"{verb} in {{o}}",
        full=(f"The {place} of {{s}} is {{o}}", f"{{o}} {is_place} {{s}}"),
        act=f"{is_place} {{x}}",
        same=(f"Are {{a}} and {{b}} {verb} in the same town?",),
    )


def _role(
    kind: str, predicate: str, noun: str, act: str, statement: str, after: str, optional: bool = False
) -> Relation:
    """A person's role, such as "director": `statement` is a verb phrase of the work, `act` one of the person."""
    refer = (f"the {noun} of {{x}}",)
    return Relation(
        kind,
        predicate,
        "person",
        ask=tuple(dict.fromkeys((f"Who {act}?", f"Who is the {noun} of {{x}}?", f"Which person {act}?"))),
        # "the person who is the mayor of" says no more than "the mayor of".
        refer=refer if noun in act else (*refer, f"the person who {act}"),
        verb=(statement,),
        after=after,
        full=(f"{{o}} {act.replace('{x}', '{s}')}", f"The {noun} of {{s}} is {{o}}"),
        act=act,
        same=(f"Do {{a}} and {{b}} have the same {noun}?", f"Is the {noun} of {{a}} also the {noun} of {{b}}?"),
        optional=optional,
    )


_GEOGRAPHY = (
    Relation(
        "country",
        "Capital",
        "town",
        ask=("What is the capital of {x}?", "Which town is the capital of {x}?"),
        refer=("the capital of {x}",),
        after="whose capital is {o}",
        full=("The capital of {s} is {o}", "{o} is the capital of {s}"),
    ),
    Relation(
        "country",
        "Language",
        "",
        ask=("What is the official language of {x}?", "Which language is spoken in {x}?"),
        after="whose citizens speak {o}",
        full=("The citizens of {s} speak {o}",),
    ),
    Relation(
        "country",
        "Currency",
        "",
        ask=("What is the currency of {x}?", "Which currency is used in {x}?"),
        verb=("uses the {o} as its money",),
        after="whose citizens pay with the {o}",
        full=("The money of {s} is the {o}",),
        optional=True,
    ),
    Relation(
        "country",
        "Independence",
        "",
        ask=("When did {x} become independent?", "In which year did {x} become independent?"),
        verb=("has been a free state since {o}", "gained its freedom in {o}"),
        after="free since {o}",
        less=("Which country became independent first, {a} or {b}?",),
        more=("Which country became independent later, {a} or {b}?",),
    ),
    Relation(
        "town",
        "Country",
        "country",
        ask=("In which country is {x}?", "To which country does {x} belong?", "{x} lies in which country?"),
        refer=("the country of {x}", "the country that contains {x}", "the country where {x} lies"),
        verb=("belongs to {o}", "is part of {o}"),
        after="in {o}",
        act="contains {x}",
        same=("Are {a} and {b} in the same country?", "Do {a} and {b} belong to the same country?"),
    ),
    Relation(
        "town",
        "River",
        "river",
        ask=("On which river does {x} lie?", "Which river flows through {x}?", "What river flows through {x}?"),
        refer=("the river that flows through {x}", "the river of {x}"),
        verb=("stands on {o}", "is built on {o}"),
        after="on {o}",
        act="flows through {x}",
        same=("Do {a} and {b} lie on the same river?", "Does the same river flow through {a} and {b}?"),
    ),
    Relation(
        "town",
        "Population",
        "",
        ask=("What is the population of {x}?", "How many people live in {x}?", "How many inhabitants does {x} have?"),
        verb=("has {o} inhabitants", "has a population of {o}"),
        after="with {o} inhabitants",
        full=("The population of {s} is {o}",),
        more=("Which town has more inhabitants, {a} or {b}?", "Which town is larger, {a} or {b}?"),
        less=("Which town has fewer inhabitants, {a} or {b}?",),
        optional=True,
    ),
    _role("town", "Mayor", "mayor", "is the mayor of {x}", "has {o} as its mayor", "whose mayor is {o}", optional=True),
    Relation(
        "river",
        "Flows into",
        "lake",
        ask=("Into which lake does {x} flow?", "Which lake does {x} flow into?", "Which lake is fed by {x}?"),
        refer=("the lake fed by {x}", "the lake into which {x} flows"),
        verb=("runs into {o}", "ends in {o}"),
        after="running into {o}",
        full=("{o} is fed by {s}",),
        act="is fed by {x}",
        same=("Do {a} and {b} flow into the same lake?",),
    ),
    Relation(
        "river",
        "Source",
        "",
        ask=("On which mountain does {x} rise?", "Which mountain is the source of {x}?"),
        verb=("rises on {o}", "has its source on {o}"),
        after="rising on {o}",
        full=("The source of {s} is {o}",),
    ),
    Relation(
        "river",
        "Length",
        "",
        ask=("How long is {x}?", "What is the length of {x}?"),
        verb=("is {o} long", "has a length of {o}"),
        after="with a length of {o}",
        more=("Which river is longer, {a} or {b}?",),
        less=("Which river is shorter, {a} or {b}?",),
    ),
    Relation(
        "lake",
        "Country",
        "country",
        ask=("In which country is {x}?", "To which country does {x} belong?", "{x} lies in which country?"),
        refer=("the country of {x}", "the country that contains {x}", "the country where {x} lies"),
        verb=("belongs to {o}", "is part of {o}"),
        after="in {o}",
        act="contains {x}",
        same=("Are {a} and {b} in the same country?",),
    ),
    Relation(
        "lake",
        "Depth",
        "",
        ask=("How deep is {x}?", "What is the depth of {x}?"),
        verb=("is {o} deep", "has a depth of {o}"),
        after="with a depth of {o}",
        more=("Which lake is deeper, {a} or {b}?",),
    ),
    Relation(
        "lake",
        "Area",
        "",
        ask=("What is the area of {x}?", "How large is {x}?"),
        verb=("covers {o}", "has an area of {o}"),
        after="covering {o}",
        more=("Which lake is larger, {a} or {b}?",),
        less=("Which lake is smaller, {a} or {b}?",),
    ),
    _home("bridge", "Location", "located", "site", "is the site of"),
    Relation(
        "bridge",
        "Crosses",
        "river",
        ask=("Which river does {x} cross?", "What river is crossed by {x}?", "Over which river does {x} lead?"),
        refer=("the river crossed by {x}", "the river that {x} crosses"),
        verb=("leads over {o}", "spans {o}"),
        after="over {o}",
        act="is crossed by {x}",
        same=("Do {a} and {b} cross the same river?",),
    ),
    _role("bridge", "Architect", "architect", "designed {x}", "was designed by {o}", "designed by {o}"),
    _founded("bridge", "opened", "Opened in"),
)

_PEOPLE = (
    Relation(
        "person",
        "Birthplace",
        "town",
        ask=("In which town was {x} born?", "What is the birthplace of {x}?", "Which town is the birthplace of {x}?"),
        refer=("the birthplace of {x}", "the town where {x} was born"),
        verb=("was born in {o}", "comes from {o}"),
        after="from {o}",
        full=("{o} is the birthplace of {s}",),
        act="is the birthplace of {x}",
        same=("Were {a} and {b} born in the same town?", "Do {a} and {b} come from the same town?"),
    ),
    Relation(
        "person",
        "Birth year",
        "",
        ask=("When was {x} born?", "In which year was {x} born?", "What is the birth year of {x}?"),
        verb=("was born in {o}",),
        after="born in {o}",
        full=("The birth year of {s} is {o}",),
        less=("Who was born first, {a} or {b}?", "Who was born earlier, {a} or {b}?", "Who is older, {a} or {b}?"),
        more=("Who was born later, {a} or {b}?", "Who is younger, {a} or {b}?"),
    ),
    Relation(
        "person",
        "Occupation",
        "",
        ask=("What is the occupation of {x}?", "What is the profession of {x}?"),
        noun="{o}",
        verb=("works as @ {o}",),
        full=("By profession, {s} is @ {o}",),
        optional=True,
    ),
    Relation(
        "person",
        "Studied at",
        "university",
        ask=(
            "At which university did {x} study?",
            "Which university did {x} attend?",
            "What university did {x} go to?",
        ),
        refer=("the university attended by {x}", "the university where {x} studied"),
        verb=("studied at {o}", "is a graduate of {o}", "attended {o}"),
        after="who studied at {o}",
        act="was attended by {x}",
        same=("Did {a} and {b} study at the same university?",),
    ),
    Relation(
        "person",
        "Spouse",
        "person",
        ask=("Who is the spouse of {x}?", "To whom is {x} married?", "Who is married to {x}?"),
        refer=("the spouse of {x}", "the person married to {x}"),
        verb=("is married to {o}",),
        after="married to {o}",
        full=("The spouse of {s} is {o}",),
        optional=True,
    ),
)

_ORGANISATIONS = (
    _role("company", "Founder", "founder", "founded {x}", "was founded by {o}", "founded by {o}"),
    _founded("company"),
    _home("company", "Headquarters", "based"),
    Relation(
        "company",
        "Product",
        "",
        ask=("What does {x} make?", "What is the product of {x}?", "Which product does {x} make?"),
        noun="maker of {o}",
        verb=("makes {o}", "produces {o}"),
        after="that makes {o}",
        full=("The product of {s} is {o}",),
    ),
    _home("university", "Location", "located"),
    _founded("university"),
    _role("university", "Rector", "rector", "is the rector of {x}", "has {o} as its rector", "whose rector is {o}"),
    _home("club", "Hometown", "based"),
    _role("club", "Coach", "coach", "coaches {x}", "is coached by {o}", "coached by {o}"),
    Relation(
        "club",
        "Sport",
        "",
        ask=("Which sport does {x} play?", "What sport is played by {x}?", "What is the sport of {x}?"),
        noun="{o} club",
        verb=("plays {o}",),
        after="that plays {o}",
        full=("The sport of {s} is {o}",),
        same=("Do {a} and {b} play the same sport?",),
    ),
    _founded("club"),
)

_WORKS = (
    _role("film", "Director", "director", "directed {x}", "was directed by {o}", "directed by {o}"),
    _role("film", "Star", "star", "stars in {x}", "stars {o}", "starring {o}"),
    _founded("film", "released", "Release year"),
    Relation(
        "film",
        "Based on",
        "novel",
        ask=("On which novel is {x} based?", "Which novel is {x} based on?", "What novel was adapted as {x}?"),
        refer=("the novel behind {x}", "the novel on which {x} is based"),
        verb=("is based on {o}",),
        after="based on {o}",
        full=("The novel behind {s} is {o}",),
        optional=True,
    ),
    _role("novel", "Author", "author", "wrote {x}", "was written by {o}", "by {o}"),
    _founded("novel", "published", "Publication year"),
    Relation(
        "novel",
        "Setting",
        "town",
        ask=("In which town is {x} set?", "Which town is the setting of {x}?", "What is the setting of {x}?"),
        refer=("the setting of {x}", "the town where {x} is set"),
        verb=("is set in {o}", "takes place in {o}"),
        after="set in {o}",
        full=("The setting of {s} is {o}",),
        act="is the setting of {x}",
        same=("Are {a} and {b} set in the same town?",),
    ),
    _home("band", "Hometown", "based"),
    _role("band", "Lead singer", "lead singer", "sings in {x}", "is fronted by {o}", "with the lead singer {o}"),
    Relation(
        "band",
        "Genre",
        "",
        ask=("What is the genre of {x}?", "What kind of music does {x} play?", "Which genre does {x} play?"),
        noun="{o} band",
        verb=("plays {o}",),
        after="that plays {o}",
        full=("The genre of {s} is {o}",),
        same=("Do {a} and {b} play the same kind of music?",),
    ),
    _founded("band", "formed", "Founded in"),
    Relation(
        "album",
        "Performer",
        "band",
        ask=("Which band recorded {x}?", "Who recorded {x}?", "What is the name of the band that recorded {x}?"),
        refer=("the band behind {x}", "the band that recorded {x}"),
        verb=("was recorded by {o}",),
        after="by {o}",
        full=("{o} recorded {s}",),
        act="recorded {x}",
        same=("Were {a} and {b} recorded by the same band?",),
    ),
    _founded("album", "released", "Release year"),
    _role("album", "Producer", "producer", "produced {x}", "was produced by {o}", "produced by {o}"),
)

RELATIONS: tuple[Relation, ...] = _GEOGRAPHY + _PEOPLE + _ORGANISATIONS + _WORKS
RELATION_OF: dict[tuple[str, str], Relation] = {(r.kind, r.predicate): r for r in RELATIONS}
RELATIONS_OF_KIND: dict[str, tuple[Relation, ...]] = {
    kind: tuple(r for r in RELATIONS if r.kind == kind) for kind in dict.fromkeys(r.kind for r in RELATIONS)
}
