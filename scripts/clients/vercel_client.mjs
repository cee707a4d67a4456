// Vercel's AI SDK: text, a stream, tools and an object, with its OpenAI-compatible provider and with OpenAI's own.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const options = { baseURL: `${process.env.QUIRE_URL}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({ name: "quire", supportsStructuredOutputs: true, includeUsage: true, ...options });
const openai = createOpenAI(options);
const weather = tool({
  description: "Get the current weather in a city",
  inputSchema: z.object({ city: z.string().describe("The name of the city") }),
  execute: async () => '{"temperature": 21, "condition": "sunny"}',
});
const person = Output.object({ schema: z.object({ name: z.string(), age: z.number().int() }) });
const extract = "Extract the data as JSON. Ben is 42 years old. Keys: name (string), age (integer).";

for (const model of [compatible("quire-demo"), openai.chat("quire-demo"), openai.responses("quire-demo")]) {
  const common = { model, maxRetries: 0, maxOutputTokens: 200 };
  const prompt = "What is the capital of France?";
  assert.equal((await generateText({ ...common, prompt })).text, "The capital of France is Paris.");
  const stream = streamText({ ...common, prompt });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, "The capital of France is Paris.");
  assert.ok((await stream.usage).outputTokens > 0);

  const question = { prompt: "What is the weather in Paris?", tools: { get_weather: weather }, stopWhen: stepCountIs(3) };
  const loop = await generateText({ ...common, ...question });
  assert.deepEqual(loop.steps[0].toolCalls[0].input, { city: "Paris" });
  assert.equal(loop.text, "It is 21 degrees and sunny in Paris.");
  const streamed = streamText({ ...common, ...question });
  await streamed.consumeStream();
  assert.equal((await streamed.text).trim(), "It is 21 degrees and sunny in Paris.");

  const parsed = await generateText({ ...common, prompt: extract, output: person });
  assert.deepEqual(parsed.output, { name: "Ben", age: 42 });
}
