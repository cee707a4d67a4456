// Anthropic's client for JavaScript: its tool runner, with whole messages and with streams.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const client = new Anthropic({ baseURL: process.env.QUIRE_URL, apiKey: "none", maxRetries: 0 });
const cities = [];
const weather = betaTool({
  name: "get_weather",
  description: "Get the current weather in a city",
  inputSchema: {
    type: "object",
    properties: { city: { type: "string", description: "The name of the city" } },
    required: ["city"],
  },
  run: ({ city }) => {
    cities.push(city);
    return '{"temperature": 21, "condition": "sunny"}';
  },
});
const request = {
  model: "quire-demo",
  max_tokens: 200,
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  tools: [weather],
};

const whole = await client.beta.messages.toolRunner(request);
assert.equal(whole.content[0].text, "It is 21 degrees and sunny in Paris.");

let text = "";
for await (const stream of client.beta.messages.toolRunner({ ...request, stream: true })) {
  for await (const event of stream) {
    if (event.type === "content_block_delta" && event.delta.type === "text_delta") text += event.delta.text;
  }
}
assert.equal(text.trim(), "It is 21 degrees and sunny in Paris.");
assert.deepEqual(cities, ["Paris", "Paris"]);
