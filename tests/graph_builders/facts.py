"""The texts, and what a model reads in them; the scripts in `made_by` run it in other environments."""

TEXTS = {
    "Velsund": "Piet Zand is the mayor of Velsund. Velsund lies on the Ida River.",
    "Ida Morn": "Ida Morn wrote the novel Glass Harbour. She was born in Velsund on 3 May 1931.",
    "McDonald's Mill": "McDonald's Mill was bought by Renée O'Neill in 1999. The mill is a friend of nobody.",
    "Glass Harbour": "Glass Harbour, a novel by Ida Morn, won the Anker Prize.",
}
TRIPLES = {
    "Velsund": [("Piet Zand", "mayor of", "Velsund"), ("Velsund", "lies on", "Ida River")],
    "Ida Morn": [
        ("Ida Morn", "wrote", "Glass Harbour"),
        ("Ida Morn", "born in", "Velsund"),
        ("Ida Morn", "date of birth", "3 May 1931"),
    ],
    "McDonald's Mill": [("McDonald's Mill", "bought by", "Renée O'Neill"), ("McDonald's Mill", "bought in", "1999")],
    "Glass Harbour": [("Glass Harbour", "written by", "Ida Morn"), ("Glass Harbour", "won", "Anker Prize")],
}


def triples_in(prompt):
    """The triples of the text that a prompt holds."""
    for title, text in TEXTS.items():
        if text[:30] in prompt:
            return TRIPLES[title]
    return []


def names_in(triples):
    """The names in triples, each once."""
    return list(dict.fromkeys(name for triple in triples for name in (triple[0], triple[2])))
