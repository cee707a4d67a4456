"""Several requests at once inside an asyncio program, without a server; each line shows one answer as it grows."""

import asyncio

from quire import AsyncLLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "What is the capital of Japan?"]


async def ask(llm: AsyncLLM, question: str, prompt: str) -> None:
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64), request_id=question):
        print(question, "->", output.outputs[0].text)


async def main() -> None:
    # The demo model; model="/path/to/checkpoint" is another one.
    async with AsyncLLM.from_engine_args() as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            for question in QUESTIONS
        ]
        await asyncio.gather(*(ask(llm, *pair) for pair in zip(QUESTIONS, prompts, strict=True)))


if __name__ == "__main__":
    asyncio.run(main())
