"""Persist a property graph of LlamaIndex: `python llama_index_core.py FOLDER`."""

import sys

from facts import TEXTS, triples_in
from llama_index.core import Document, PropertyGraphIndex, Settings
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.indices.property_graph import SimpleLLMPathExtractor
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.llms.callbacks import llm_completion_callback


class Scripted(CustomLLM):
    @property
    def metadata(self):
        """The default settings of a model."""
        return LLMMetadata()

    @llm_completion_callback()
    def complete(self, prompt, formatted=False, **options):
        """The triples of the prompt, one per line in brackets."""
        return CompletionResponse(text="\n".join(f"({', '.join(triple)})" for triple in triples_in(prompt)))

    @llm_completion_callback()
    def stream_complete(self, prompt, formatted=False, **options):
        """Never called, but LlamaIndex requires it."""
        raise NotImplementedError


Settings.llm, Settings.embed_model = Scripted(), MockEmbedding(8)
documents = [Document(text=text, metadata={"title": title}) for title, text in TEXTS.items()]
extractors = [SimpleLLMPathExtractor(llm=Settings.llm)]
index = PropertyGraphIndex.from_documents(documents, kg_extractors=extractors, embed_kg_nodes=False)
index.storage_context.persist(sys.argv[1])
