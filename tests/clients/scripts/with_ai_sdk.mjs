// The AI SDK: createOpenAI's models for responses and chat completions, and @ai-sdk/openai-compatible.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import { z } from "zod";

const baseURL = process.argv[2], prompt = "Where was the author of Glass Harbour born?";
const versions = ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"].map((name) =>
  `${name} ${JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version}`);
console.log(versions.join("  "));
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ baseURL, name: "tripletune", supportsStructuredOutputs: true });
const models = { responses: openai("ras"), chat: openai.chat("ras"), compatible: compatible("ras") };
const schema = z.object({ town: z.string() });
const lookUp = tool({ description: "Look up", inputSchema: z.object({ name: z.string() }), execute: async () => "a novel" });
let failures = 0;

async function check(what, ask, expected) {
  let given;
  try { given = await ask(); } catch (error) { given = `${error.name}: ${error.message}`; }
  const right = JSON.stringify(given) === JSON.stringify(expected);
  if (!right) failures += 1;
  console.log(`${right ? "ok  " : "FAIL"} ${what}: ${JSON.stringify(given)}`.slice(0, 300));
}

async function refused(what, ask, words) {
  let given;
  try { given = await ask(); } catch (error) { given = `${error.name}: ${error.message}`; }
  const right = typeof given === "string" && given.includes(words);
  if (!right) failures += 1;
  console.log(`${right ? "ok  " : "FAIL"} ${what}, refused: ${JSON.stringify(given)}`.slice(0, 300));
}

for (const [name, model] of Object.entries(models)) {
  const common = { model, maxRetries: 0 };
  await check(name, async () => (await generateText({ ...common, prompt })).text, "Velsund");
  await check(`${name}, stream`, async () => {
    let text = "";
    for await (const part of streamText({ ...common, prompt }).textStream) text += part;
    return text;
  }, "Velsund");
  await check(`${name}, generateObject`, async () => (await generateObject({ ...common, prompt, schema })).object,
    { town: "Velsund" });
  await check(`${name}, tools offered`, async () =>
    (await generateText({ ...common, prompt, tools: { lookUp } })).text, "Velsund");
  await check(`${name}, second turn`, async () => {
    const first = await generateText({ ...common, prompt });
    const messages = [{ role: "user", content: prompt }, ...first.response.messages, { role: "user", content: prompt }];
    return (await generateText({ ...common, messages })).text;
  }, "Velsund");
  await refused(`${name}, toolChoice required`, () =>
    generateText({ ...common, prompt, tools: { lookUp }, toolChoice: "required" }), "only auto and none");
}
const last = (text) => text?.trim().split("\n").at(-1);
await check("responses, sources", async () =>
  (await generateText({ model: models.responses, prompt })).sources.map((source) => source.title),
  ["Glass Harbour", "Ida Morn"]);
await check("chat, sources", async () =>
  (await generateText({ model: models.chat, prompt })).sources.map((source) => source.title),
  ["Glass Harbour", "Ida Morn"]);
await check("responses, reasoning", async () =>
  last((await generateText({ model: models.responses, prompt })).reasoningText), "plan  [SUFFICIENT]");
await check("compatible, reasoning", async () =>
  last((await generateText({ model: models.compatible, prompt })).reasoningText), "plan  [SUFFICIENT]");
process.exitCode = failures ? 1 : 0;
