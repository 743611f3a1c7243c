// Asks a server for calls of a tool by the AI SDK, and prints a line of JSON for each.
// node ai_sdk_tools.mjs http://127.0.0.1:8000/v1 PROMPT

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, prompt] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "local",
  baseURL,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const schema = z.object({
  name: z.string().regex(/^[A-Z][a-z]{1,7}$/),
  age: z.number().int().min(0).max(150),
  mood: z.enum(["calm", "cross"]),
});
const tools = {
  person: tool({ description: "Tell of somebody", inputSchema: schema }),
};
const settings = { model: provider("demo"), prompt, maxRetries: 0 };

const getInputs = (calls) => calls.filter((call) => !call.invalid).map((call) => call.input);

const forced = await generateText({ ...settings, tools, toolChoice: "required" });
console.log(
  JSON.stringify({ inputs: getInputs(forced.toolCalls), reason: forced.finishReason }),
);

const toolChoice = { type: "tool", toolName: "person" };
const stream = streamText({ ...settings, tools, toolChoice });
let num_deltas = 0;
for await (const part of stream.fullStream) {
  if (part.type === "tool-input-delta") num_deltas++;
}
const inputs = getInputs(await stream.toolCalls);
console.log(JSON.stringify({ inputs, reason: await stream.finishReason, num_deltas }));

const generated = await generateObject({ ...settings, schema });
console.log(JSON.stringify(generated.object));
