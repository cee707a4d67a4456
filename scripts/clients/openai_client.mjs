// OpenAI's own client for JavaScript: completions, chat, streams, tools, parsed outputs, responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.QUIRE_URL + "/v1", apiKey: "none", maxRetries: 0 });
const model = "quire-demo";
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { name: "get_weather", description: "Get the current weather in a city", parameters };
const question = "What is the weather in Paris?";
const result = '{"temperature": 21, "condition": "sunny"}';
const reply = "It is 21 degrees and sunny in Paris.";
const france = "What is the capital of France?";
const paris = "The capital of France is Paris.";

const text = await client.completions.create({ model, prompt: "Hello", max_tokens: 3 });
assert.equal(text.object, "text_completion");

const messages = [{ role: "user", content: france }];
const chat = await client.chat.completions.create({ model, messages, temperature: 0 });
assert.equal(chat.choices[0].message.content, paris);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, paris);

const called = [];
const runner = client.chat.completions.runTools({
  model,
  temperature: 0,
  messages: [{ role: "user", content: question }],
  tools: [
    {
      type: "function",
      function: {
        ...weather,
        parse: JSON.parse,
        function: (given) => {
          called.push(given);
          return result;
        },
      },
    },
  ],
  stream: true,
});
assert.equal(await runner.finalContent(), reply);
assert.deepEqual(called, [{ city: "Paris" }]);

const schema = { type: "object", properties: { total: { type: "integer" } }, required: ["total"], additionalProperties: false };
const parsed = await client.chat.completions.parse({
  model,
  messages: [{ role: "user", content: "What is 47 + 38?" }],
  max_tokens: 100,
  temperature: 0,
  response_format: { type: "json_schema", json_schema: { name: "sum", schema, strict: true } },
});
assert.equal(typeof parsed.choices[0].message.parsed.total, "number");

const tools = [{ type: "function", strict: false, ...weather }];
const first = await client.responses.create({ model, input: question, tools, temperature: 0 });
const call = first.output.find((item) => item.type === "function_call");
assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
const output = { type: "function_call_output", call_id: call.call_id, output: result };
const stream = client.responses.stream({ model, input: [output], previous_response_id: first.id, tools, temperature: 0 });
const numbers = [];
for await (const event of stream) numbers.push(event.sequence_number);
assert.deepEqual(numbers, [...numbers.keys()]);
const final = await stream.finalResponse();
assert.equal(final.output_text, reply);
assert.equal((await client.responses.retrieve(final.id)).output_text, reply);
