// OpenAI's own client for JavaScript against the demo model at QUIRE_URL; tests/test_openai_node.py runs it.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.QUIRE_URL + "/v1", apiKey: "none", maxRetries: 0, timeout: 30_000 });
const greedy = { model: "quire-demo", temperature: 0 };

const france = "What is the capital of France?";
const paris = "The capital of France is Paris.";
const extraction = "Extract the data as JSON. Ben is 42 years old. He lives in Oslo. Keys: name (string), age (integer), city (string).";
const Person = z.object({ name: z.string(), age: z.int(), city: z.string() });
const ben = { name: "Ben", age: 42, city: "Oslo" };

const question = "What is the weather in Paris?";
const result = '{"temperature": 21, "condition": "sunny"}';
const reply = "It is 21 degrees and sunny in Paris.";
const weather = {
  name: "get_weather",
  description: "Get the current weather in a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

const user = (content) => ({ role: "user", content });

test("completions, whole and streamed", async () => {
  const asked = { ...greedy, prompt: "Hello", max_tokens: 8 };
  const whole = await client.completions.create({ ...asked, n: 2 });
  assert.equal(whole.object, "text_completion");
  assert.deepEqual(whole.choices.map((choice) => choice.index), [0, 1]);
  assert.ok(whole.choices[0].text);
  assert.equal(whole.usage.completion_tokens, 16);
  let streamed = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) streamed += chunk.choices[0].text;
  assert.equal(streamed, whole.choices[0].text);
});

test("chat goes on from what was said", async () => {
  const first = await client.chat.completions.create({ ...greedy, messages: [user("My name is Anna.")] });
  assert.equal(first.choices[0].finish_reason, "stop");
  assert.equal(first.usage.total_tokens, first.usage.prompt_tokens + first.usage.completion_tokens);
  const messages = [user("My name is Anna."), first.choices[0].message, user("What is my name?")];
  const second = await client.chat.completions.create({ ...greedy, messages });
  assert.equal(second.choices[0].message.content, "Your name is Anna.");
});

test("streaming tells the same text, and usage at its end", async () => {
  const stream = client.chat.completions.stream({
    ...greedy,
    messages: [user(france)],
    stream_options: { include_usage: true },
  });
  const pieces = [];
  stream.on("content", (delta) => pieces.push(delta));
  const final = await stream.finalChatCompletion();
  assert.equal(pieces.join(""), paris);
  assert.equal(final.choices[0].message.content, paris);
  assert.ok(final.usage.completion_tokens > 1);
});

test("text comes while the rest is made, and a stream that is left does not hold up the next", async () => {
  const asked = { ...greedy, messages: [user(france)], max_tokens: 1500, ignore_eos: true };
  const stream = await client.chat.completions.create({ ...asked, stream: true });
  for await (const { choices } of stream) {
    assert.equal(choices[0].finish_reason, null);
    if (choices[0].delta.content) break;
  }
  assert.ok(stream.controller.signal.aborted);
  const next = await client.chat.completions.create({ ...greedy, messages: [user(france)] });
  assert.equal(next.choices[0].message.content, paris);
});

test("an agent loop by chat: call, result, answer", async () => {
  const tools = [{ type: "function", function: weather }];
  const messages = [user(question)];
  const first = await client.chat.completions.stream({ ...greedy, messages, tools }).finalChatCompletion();
  assert.equal(first.choices[0].finish_reason, "tool_calls");
  const [call] = first.choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
  messages.push(first.choices[0].message, { role: "tool", tool_call_id: call.id, content: result });
  const answer = await client.chat.completions.create({ ...greedy, messages, tools });
  assert.equal(answer.choices[0].message.content, reply);
});

test("an agent loop that the client runs itself", async () => {
  for (const stream of [false, true]) {
    const called = [];
    const answer = (given) => (called.push(given), result);
    const tool = { type: "function", function: { ...weather, parse: JSON.parse, function: answer } };
    const runner = client.chat.completions.runTools({ ...greedy, messages: [user(question)], tools: [tool], stream });
    assert.equal(await runner.finalContent(), reply);
    assert.deepEqual(called, [{ city: "Paris" }]);
  }
});

test("parsed outputs, whole and streamed", async () => {
  const asked = { ...greedy, messages: [user(extraction)], response_format: zodResponseFormat(Person, "person") };
  const whole = await client.chat.completions.parse(asked);
  assert.deepEqual(whole.choices[0].message.parsed, ben);
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, ben);
});

test("parsed arguments of a function that has to be called", async () => {
  const parameters = z.object({ city: z.string() });
  const tool = zodFunction({ name: weather.name, description: weather.description, parameters });
  const tool_choice = { type: "function", function: { name: weather.name } };
  const asked = { ...greedy, messages: [user("Hello!")], tools: [tool], tool_choice, max_tokens: 64 };
  const parsed = await client.chat.completions.parse(asked);
  const [call] = parsed.choices[0].message.tool_calls;
  assert.equal(typeof call.function.parsed_arguments.city, "string");
});

test("an agent loop by responses, the answer streamed and kept", async () => {
  const tools = [{ type: "function", strict: false, ...weather }];
  const first = await client.responses.create({ ...greedy, input: question, tools });
  const [call] = first.output;
  assert.deepEqual([call.type, call.name, JSON.parse(call.arguments)], ["function_call", "get_weather", { city: "Paris" }]);
  const input = [{ type: "function_call_output", call_id: call.call_id, output: result }];
  const stream = client.responses.stream({ ...greedy, input, previous_response_id: first.id, tools });
  const events = [];
  for await (const event of stream) events.push(event);
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  assert.equal(events[0].type, "response.created");
  assert.equal(events.at(-1).type, "response.completed");
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), reply);
  const final = await stream.finalResponse();
  assert.equal(final.output_text, reply);
  assert.equal((await client.responses.retrieve(final.id)).output_text, reply);
});

test("parsed outputs by responses", async () => {
  const asked = { ...greedy, input: extraction, text: { format: zodTextFormat(Person, "person") } };
  assert.deepEqual((await client.responses.parse(asked)).output_parsed, ben);
});

test("errors are of the client's own classes and name the field", async () => {
  const messages = [user("Hello!")];
  const refused = (options) => client.chat.completions.create({ ...greedy, messages, ...options });
  await assert.rejects(refused({ temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(refused({ model: "nobody" }), OpenAI.NotFoundError);
});
