#!/usr/bin/env bash
# `reasoningText` of the AI SDK 6.0.326 joins the parts of a reasoning summary without a space between them, so the last
# word of one part and the first word of the next are one word. OpenAI's Responses API sends the parts as separate items
# of a list. A server whose parts should be readable there has to end each with a line break.
# Expected: a space or a line break between two parts.
#
# Seen on 29 November 2026 with node 20.20.2, ai 6.0.326 and @ai-sdk/openai 3.0.141 on Linux x86_64:
#     "First I search.Then I answer."
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --prefix "$folder" "ai@6.0.326" "@ai-sdk/openai@3.0.141" "zod@4" > /dev/null

cat > "$folder/reasoning.mjs" <<'JAVASCRIPT'
import { createOpenAI } from "@ai-sdk/openai";
import { generateText } from "ai";

const part = (text) => ({ type: "summary_text", text });
const reply = {
  id: "resp_1", object: "response", created_at: 0, model: "m", status: "completed", error: null, incomplete_details: null,
  output: [
    { type: "reasoning", id: "rs_1", summary: [part("First I search."), part("Then I answer.")] },
    { type: "message", id: "msg_1", role: "assistant", status: "completed",
      content: [{ type: "output_text", text: "42", annotations: [] }] },
  ],
  usage: { input_tokens: 1, input_tokens_details: { cached_tokens: 0 }, output_tokens: 1,
    output_tokens_details: { reasoning_tokens: 0 }, total_tokens: 2 },
};
const fetch = async () => new Response(JSON.stringify(reply), { headers: { "Content-Type": "application/json" } });
const openai = createOpenAI({ baseURL: "http://127.0.0.1:9/v1", apiKey: "none", fetch });
console.log(JSON.stringify((await generateText({ model: openai("m"), prompt: "?" })).reasoningText));
JAVASCRIPT

said=$(node "$folder/reasoning.mjs")
echo "$said"
if [ "$said" != '"First I search.Then I answer."' ]; then
    echo "changed: the parts are no longer joined without a space"
    exit 1
fi
