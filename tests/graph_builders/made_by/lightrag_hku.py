"""Write a working folder of LightRAG: `python lightrag_hku.py FOLDER`."""

import asyncio
import sys

import numpy as np
from facts import TEXTS, names_in, triples_in
from lightrag import LightRAG
from lightrag.utils import EmbeddingFunc, Tokenizer


class Characters:
    """A tokenizer that needs no download."""

    def encode(self, text):
        """The code of each character."""
        return [ord(character) for character in text]

    def decode(self, tokens):
        """The text of these codes."""
        return "".join(map(chr, tokens))


async def reply(prompt, system_prompt=None, history_messages=(), **options):
    """The scripted model; its second look finds nothing more."""
    triples = [] if history_messages else triples_in(prompt)
    rows = [f"entity<|#|>{name}<|#|>other<|#|>{name} is named." for name in names_in(triples)]
    for subject, predicate, object_ in triples:
        rows.append(f"relation<|#|>{subject}<|#|>{object_}<|#|>{predicate}<|#|>{subject} {predicate} {object_}.")
    return "\n".join([*rows, "<|COMPLETE|>"])


async def embed(texts):
    """Random vectors (texts, 16): nothing is searched."""
    return np.random.default_rng(0).normal(size=(len(texts), 16)).astype("float32")


async def main(folder):
    """Insert the texts into a folder, so that its cache and its graph are written."""
    rag = LightRAG(
        working_dir=folder,
        llm_model_func=reply,
        embedding_func=EmbeddingFunc(embedding_dim=16, max_token_size=512, func=embed, model_name="scripted"),
        tokenizer=Tokenizer("characters", Characters()),
    )
    await rag.initialize_storages()
    await rag.ainsert(list(TEXTS.values()), file_paths=[f"{number}.txt" for number in range(len(TEXTS))])
    await rag.finalize_storages()


asyncio.run(main(sys.argv[1]))
