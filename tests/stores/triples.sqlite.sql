PRAGMA application_id = 1414813780;
PRAGMA user_version = 1;
PRAGMA journal_mode = WAL;
BEGIN TRANSACTION;
CREATE TABLE extractions (
    extractor INTEGER NOT NULL REFERENCES extractors (id),
    passage TEXT NOT NULL,
    triples TEXT NOT NULL,
    malformed INTEGER NOT NULL,
    PRIMARY KEY (extractor, passage)
) WITHOUT ROWID;
INSERT INTO "extractions" VALUES(1,'36f2895a5cca3cfa','[["Ada", "says", "it"], ["Ada", "born in", "London"]]',0);
INSERT INTO "extractions" VALUES(1,'573db165c443fd3f','[["京都 is a city.", "says", "it"], ["Ada", "born in", "London"]]',0);
INSERT INTO "extractions" VALUES(1,'60a05dad74d344f3','[["Oslo", "is", "Oslo"]]',0);
CREATE TABLE extractors (
    id INTEGER PRIMARY KEY,
    model TEXT NOT NULL,
    prompt TEXT NOT NULL,
    settings TEXT NOT NULL,
    UNIQUE (model, prompt)
);
INSERT INTO "extractors" VALUES(1,'openai:m','efda21e7b3e569cd','pieces of 1600; {"instruction": "You turn text into facts of the form subject, predicate, object.\n\nYou get one text; a title may stand in front of it, with a colon behind it. List every fact that the text states.\n\n1. Write each fact as (S> subject| P> predicate| O> object), exactly one of each, and separate facts by commas.\n2. One fact a triple: split sentences that say several things.\n3. Write names in full, spelt as in the text, with its capital letters. Put the name in the place of \"he\", \"she\", \"it\" or \"the company\"; the title often says who or what is meant.\n4. The predicate is a short phrase that makes the relation clear, such as \"born in\", \"director\" or \"number of inhabitants\".\n5. Numbers, dates and places are objects of their own, with their unit.\n6. Add nothing that the text does not say.\n7. If the text is nothing but a name, reply (S> NAME| P> is| O> NAME) with that name.\n8. If the text states no fact, reply NONE.\n\nReply with the facts alone: no introduction, no numbering, no explanation.\n\nExample text:\nAnna Halde: Anna Halde (1871-1940) was a painter of landscapes. She was born in Kelm and worked in the capital.\n\nExample reply:\n(S> Anna Halde| P> year of birth| O> 1871), (S> Anna Halde| P> year of death| O> 1940), (S> Anna Halde| P> occupation| O> painter of landscapes), (S> Anna Halde| P> born in| O> Kelm), (S> Anna Halde| P> worked in| O> the capital)", "temperature": 0.0, "top_p": 1.0, "max_tokens": 1536, "stop": [], "seed": null}');
COMMIT;
