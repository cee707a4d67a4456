// OpenAI's agents library for JavaScript against the demo model at QUIRE_URL; tests/test_openai_node.py runs it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Agent, run, setTracingDisabled, tool } from "@openai/agents-core";
import { OpenAIChatCompletionsModel, OpenAIResponsesModel } from "@openai/agents-openai";
import OpenAI from "openai";
import { z } from "zod";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: process.env.QUIRE_URL + "/v1", apiKey: "none", maxRetries: 0, timeout: 30_000 });

for (const Model of [OpenAIResponsesModel, OpenAIChatCompletionsModel]) {
  for (const stream of [false, true]) {
    test(`an agent asks for the weather by ${Model.name}, ${stream ? "streamed" : "whole"}`, async () => {
      const asked = [];
      const weather = tool({
        name: "get_weather",
        description: "Get the current weather in a city",
        parameters: z.object({ city: z.string() }),
        execute: ({ city }) => (asked.push(city), '{"temperature": 21, "condition": "sunny"}'),
      });
      const agent = new Agent({
        name: "weather",
        model: new Model(client, "quire-demo"),
        modelSettings: { temperature: 0, text: { verbosity: "low" }, providerData: { safety_identifier: "someone" } },
        tools: [weather],
      });
      const answer = await run(agent, "What is the weather in Paris?", { stream });
      if (stream) await answer.completed;
      assert.deepEqual(asked, ["Paris"]);
      assert.equal(answer.finalOutput, "It is 21 degrees and sunny in Paris.");
      const { usage } = answer.rawResponses.at(-1);
      assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
    });
  }
}
