"""A model inside a Python program, without a server: conversations, and a prompt that the model goes on with."""

from quire import LLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "What is 47 + 38?"]

if __name__ == "__main__":
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM() as llm:  # the demo model; LLM("/path/to/checkpoint") and LLM("Qwen/Qwen3-0.6B") are others
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for question, output in zip(QUESTIONS, llm.chat(conversations, params), strict=True):
            print(question, "->", output.outputs[0].text)

        [output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
        print(output.prompt + output.outputs[0].text)
