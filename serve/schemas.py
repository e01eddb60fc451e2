"""Answers in the form of a request's JSON schema (`response_format`).

A loop answers in words. One more call of its chat model puts this answer, with the evidence, into the schema; a reply
that does not fit gets one repair turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import one_line
from tripletune.llm.question_client import load_prompts
from tripletune.llm.reply_json import find_json
from tripletune.rag import Trace
from tripletune.rag.answering import OpenSystem
from tripletune.rag.chat_generator import show_passages
from tripletune.rag.evidence import Found, passages_by_round
from tripletune.rag.systems import client_of
from tripletune.serve.limits import Refused

_PROMPT = "answer_schema"
# Maximum tokens of the evidence and of the object.
_EVIDENCE_TOKENS = 2000
_OBJECT_TOKENS = 1024


def read_schema(response_format: object) -> dict[str, Any] | None:
    """The JSON schema of a request's `response_format`; None for plain text.

    Raises:
        ValueError: It is a form that a server can't keep.
    """
    fields = response_format if isinstance(response_format, dict) else {}
    kind = fields.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        raise ValueError("json_object does not say which fields: send json_schema")
    inner = fields.get("json_schema") if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise ValueError("only text, and json_schema with a name and a schema, are known")
    if not isinstance(schema.get("properties"), dict) or not schema["properties"]:
        raise ValueError("the schema names no properties: name the fields that the answer should fill")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"this is no JSON schema: {error.json_path}: {error.message}") from None
    return schema


def read_object(reply: str, schema: Mapping[str, Any]) -> str:
    """The object of a reply as JSON; raises an `UnusableReply` if there is none that fits the schema."""
    value = find_json(reply, dict, advice="reply with one JSON object that fits the schema")
    fault = misfit(value, schema)
    if fault:
        raise UnusableReply("schema", f"The object does not fit the schema: {fault}.")
    return json.dumps(value, ensure_ascii=False)


def misfit(value: object, schema: Mapping[str, Any]) -> str:
    """Say where a JSON value does not fit a schema; "" if it fits."""
    error = best_match(Draft202012Validator(schema).iter_errors(value))
    return f"{error.json_path}: {error.message}" if error else ""


async def fill_schema(schema: Mapping[str, Any], system: OpenSystem, trace: Trace) -> str:
    """Put a loop's answer into a JSON schema, by one call of the loop's chat model, which the trace counts.

    Raises:
        Refused: Two replies did not fit the schema.
    """
    tools = system.tools
    client = client_of("serve", tools, trace, load_prompts((_PROMPT,)))
    facts = []
    for step in trace.steps:
        facts.append([" | ".join(triple) for triple in step.triples])
    passages = []
    for found in passages_by_round(trace):
        # Where it is known, only what the answer was written from.
        passages.append([passage for passage in found if not trace.shown or passage.id in trace.shown])
    evidence = Found(passages, facts).within(_EVIDENCE_TOKENS)
    written = json.dumps(schema, ensure_ascii=False)
    # A prompt that is too long is cut before its last line, so the question comes last.
    sections = [f"Schema: {written}", f"Answer: {trace.answer}"]
    if evidence.facts:
        sections.append("Facts:\n" + "\n".join(evidence.facts))
    if evidence.passages:
        sections.append(show_passages(evidence.passages))
    sections.append(f"Question: {one_line(trace.question)}")
    chat = client.prompts.chat(_PROMPT, "\n\n".join(sections))
    enforced = written if client.enforces_schemas else None
    try:
        return await client.ask(
            "schema", chat, lambda reply: read_object(reply, schema), _OBJECT_TOKENS, schema=enforced
        )
    except UnusableReply as error:
        reason = f"the system's model wrote no object that fits the schema: {error.explanation}"
        raise Refused(502, reason, "upstream_error", "response_format") from None
