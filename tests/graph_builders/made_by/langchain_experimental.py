"""Write graph documents of LangChain, one JSON object per line: `python langchain_experimental.py FOLDER`."""

import json
import sys
from pathlib import Path

sys.path = [path for path in sys.path if path != str(Path(__file__).parent)]  # this file has the package's name
from facts import TEXTS, triples_in  # noqa: E402
from langchain_core.documents import Document  # noqa: E402
from langchain_core.language_models import BaseChatModel  # noqa: E402
from langchain_core.messages import AIMessage  # noqa: E402
from langchain_core.outputs import ChatGeneration, ChatResult  # noqa: E402
from langchain_experimental.graph_transformers import LLMGraphTransformer  # noqa: E402


class Scripted(BaseChatModel):
    @property
    def _llm_type(self):
        """The name of the model, which LangChain asks for."""
        return "scripted"

    def _generate(self, messages, stop=None, run_manager=None, **options):
        """The triples of the prompt as JSON, in LangChain's layout."""
        rows = []
        for subject, predicate, object_ in triples_in(messages[-1].content):
            relation = predicate.upper().replace(" ", "_")
            row = {"head": subject, "head_type": "Thing", "relation": relation, "tail": object_, "tail_type": "Thing"}
            rows.append(row)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=json.dumps(rows)))])


transformer = LLMGraphTransformer(llm=Scripted(), ignore_tool_usage=True)
sources = [Document(page_content=text, metadata={"title": title}) for title, text in TEXTS.items()]
folder = Path(sys.argv[1])
folder.mkdir()
with (folder / "graph.jsonl").open("w", encoding="utf-8") as file:
    for document in transformer.convert_to_graph_documents(sources):
        file.write(document.model_dump_json() + "\n")
