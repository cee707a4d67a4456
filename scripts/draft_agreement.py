"""How often drafts that a draft model draws are the tokens that the target draws, beside what any method could reach.

    python scripts/draft_agreement.py [--model MODEL] [--draft MODEL] [--draft-quantization int4]

The drafts of each context are drawn with the request's own random numbers, and so is the target's token. Rejection
sampling would accept a draft with the probability 1 - TV, where TV is the total variation between both models'
distributions: half the sum of their differences. The script prints both shares for each temperature. Contexts are
answers of the target, cut at a random place; without options, the draft model is the target with weights of 4 bits.
"""

import argparse
import importlib.resources
import random
from typing import Any

import numpy as np

from quire import LLM, SamplingParams

DEMO_MODEL = importlib.resources.files("quire") / "demo_model"
QUESTIONS = (
    "What is the capital of France?", "Hello!", "Reverse the word lemon.", "What is 12 + 34?", "Spell banana.",
    "Write a JSON object with the keys name and age.", "Who are you?", "What color is the sky?",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="The target; by default the demo model.")
    parser.add_argument("--draft", help="By default the target.")
    parser.add_argument("--draft-quantization", default="int4", help="A format made at load, or none.")
    parser.add_argument("--num-contexts", type=int, default=1000)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7])
    args = parser.parse_args()
    target_model, draft_model = {"model": args.model}, {"model": args.draft or args.model}
    options: dict[str, Any] = {"max_logprobs": -1, "disable_log_stats": False, "max_model_len": 1024}
    options["async_scheduling"] = False  # else a plan made ahead has each request's second token without a draft
    if args.draft_quantization != "none":
        draft_model["quantization"] = args.draft_quantization
    with LLM(**options, **target_model, spec_method="off") as llm:
        contexts = _contexts(llm, args.num_contexts)
    speculation = {**draft_model, "num_speculative_tokens": 1, "enable_adaptive_verification": False}
    for temperature in args.temperatures:
        with LLM(**options, **target_model, speculative_config=speculation) as llm:
            drawn = llm.generate(contexts, _drawn(temperature, len(contexts)), use_tqdm=False)
            share = _count(llm, "accepted_tokens") / _count(llm, "draft_tokens")
        known = [
            {"prompt_token_ids": [*context["prompt_token_ids"], output.outputs[0].token_ids[0]]}
            for context, output in zip(contexts, drawn, strict=True)
        ]
        target, draft = (_distributions(options | each, known, temperature) for each in (target_model, draft_model))
        bound = float(np.minimum(target, draft).sum(1).mean())
        print(f"temperature {temperature}: equal {share:.4f}, 1 - TV {bound:.4f}, ratio {share / bound:.4f}")


def _contexts(llm: LLM, number: int) -> list[Any]:
    rng = random.Random(0)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=1.0, n=8, seed=1, max_tokens=64)
    known = [
        [*answer.prompt_token_ids, *output.token_ids[: rng.randrange(len(output.token_ids))]]
        for answer in llm.chat(conversations, params, use_tqdm=False)
        for output in answer.outputs
        for _ in range(-(-number // (8 * len(QUESTIONS))))
    ]
    return [{"prompt_token_ids": token_ids} for token_ids in known[:number]]


def _drawn(temperature: float, number: int) -> list[SamplingParams]:
    """Three tokens: the prompt's own, one with a draft, and the one after it."""
    return [SamplingParams(temperature=temperature, seed=seed, max_tokens=3, ignore_eos=True) for seed in range(number)]


def _count(llm: LLM, name: str) -> float:
    return sum(each.value for each in llm.get_metrics() if each.name == f"vllm:spec_decode_num_{name}")


def _distributions(options: dict[str, Any], known: list[Any], temperature: float) -> np.ndarray:
    """The probabilities of the next token, [num_contexts, vocab_size]."""
    params = SamplingParams(max_tokens=1, logprobs=-1, ignore_eos=True)
    with LLM(**options, spec_method="off") as llm:
        answers = llm.generate(known, params, use_tqdm=False)
    rows = [answer.outputs[0].logprobs[0] for answer in answers]
    logits = np.array([[row[token].logprob for token in range(len(row))] for row in rows]) / temperature
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


if __name__ == "__main__":
    main()
