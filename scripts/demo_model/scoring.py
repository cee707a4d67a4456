"""Scores of a demo model: held-out items, asked in Transformers or in Quire."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams

from . import mixture
from . import tokenizer as tok
from . import words as w
from .tasks import Sample

MAX_REPLY = 160
Scores = dict[str, tuple[int, int]]


def is_right(sample: Sample, reply: str) -> bool:
    """Whether a greedy reply is the expected one. JSON and tool calls are compared by value; thoughts may differ."""
    if sample.category == "thinking":
        thought, mark, answer = reply.partition("</think>")
        wanted = sample.reply.split("</think>")[1].strip()
        return bool(mark) and thought.startswith("<think>") and answer.strip() == wanted
    if sample.category == "json":
        return _same_json(reply, sample.reply)
    calls = sample.messages[-1].get("tool_calls")
    if calls:
        return _same_calls(reply, [call["function"] for call in calls])
    return (
        reply.strip() in {sample.reply.strip(), *sample.tags} if sample.plain else reply.strip() == sample.reply.strip()
    )


def _same_calls(reply: str, functions: list[dict[str, Any]]) -> bool:
    """Whether a reply is one call in its marks for each function, in this order."""
    inner = reply.strip().removeprefix("<tool_call>").removesuffix("</tool_call>").split("</tool_call>\n<tool_call>")
    if len(inner) != len(functions) or not reply.lstrip().startswith("<tool_call>"):
        return False
    for text, function in zip(inner, functions, strict=True):
        wanted = dict(function)
        if isinstance(wanted["arguments"], str):
            wanted["arguments"] = json.loads(wanted["arguments"])
        if not _same_json(text, json.dumps(wanted)):
            return False
    return True


def _same_json(left: str, right: str) -> bool:
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return False


@torch.no_grad()
def greedy(model: Any, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """Greedy replies up to the closing mark; a reply that does not stop by itself gets a note at its end."""
    model.eval()
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    out = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=False,
        max_new_tokens=MAX_REPLY,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    replies = []
    for ids in out[:, batch["input_ids"].shape[1] :].tolist():
        stopped = tokenizer.eos_token_id in ids
        text = tokenizer.decode(ids, skip_special_tokens=True)
        replies.append(text if stopped else text + " (did not stop)")
    return replies


def served(llm: LLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """The same from Quire."""
    return replies_of(llm, tokenizer, prompts, [SamplingParams(temperature=0, max_tokens=MAX_REPLY)] * len(prompts))


def replies_of(
    llm: LLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], options: list[SamplingParams]
) -> list[str]:
    """Quire's replies to prompts with options of their own."""
    ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    outputs = llm.generate([{"prompt_token_ids": each} for each in ids], options, use_tqdm=False)
    replies = [output.outputs[0] for output in outputs]
    return [reply.text + ("" if reply.finish_reason == "stop" else " (did not stop)") for reply in replies]


def evaluate(
    answer: Callable[[list[str]], list[str]],
    tokenizer: PreTrainedTokenizerFast,
    count: int,
    seed: int = 1,
    show: int = 0,
) -> dict[str, tuple[int, int]]:
    """Right answers and items per category, over held-out items; `answer` gives the replies to some prompts."""
    scores = {}
    for category in [*mixture.CATEGORIES, "conversations"]:
        samples = mixture.evaluation_set(category, count, seed)
        samples.sort(key=lambda sample: len(str(sample.messages) + str(sample.tools)))
        right, wrong = 0, []
        for first in range(0, len(samples), 50):
            part = samples[first : first + 50]
            replies = answer([tok.conversation_text(tokenizer, s, prompt_only=True) for s in part])
            for sample, reply in zip(part, replies, strict=True):
                right += is_right(sample, reply)
                if not is_right(sample, reply):
                    wrong.append((sample, reply))
        scores[category] = (right, len(samples))
        for sample, reply in wrong[:show]:
            wanted = sample.messages[-1]
            print(f"[{category}] {sample.messages[-2]['content']!r} -> {reply!r}, wanted {wanted}")
    return scores


def format_scores(scores: dict[str, tuple[int, int]]) -> str:
    """Scores on one line."""
    return ", ".join(f"{category} {right / count:.1%}" for category, (right, count) in scores.items())


# --- everyday use ---------------------------------------------------------------------------------------------------

TYPES = {str: "string", int: "integer", bool: "boolean"}


def _constraint(sample: Sample, rng: random.Random) -> tuple[StructuredOutputsParams, Callable[[str], bool]]:
    """A schema, some JSON object, a choice or a regular expression for a question, and whether a reply is right."""
    wanted = json.loads(sample.reply)
    short = sample.tags and next(iter(sample.tags))
    kind = rng.choices(["schema", "object", "choice", "regex"], [6, 2, 1, 1])[0]
    if kind == "schema":
        properties = {key: {"type": TYPES[type(value)]} for key, value in wanted.items()}
        schema = {"type": "object", "properties": properties, "required": list(wanted), "additionalProperties": False}
        return StructuredOutputsParams(json=schema), lambda reply: _answers(reply, wanted, str(short))
    if kind == "object":
        return StructuredOutputsParams(json_object=True), lambda reply: _holds(reply, str(short))
    others = [*rng.sample(w.CITIES, 3), *rng.sample(list(w.OPPOSITES), 2)]
    if kind == "choice":
        options = sorted({str(short), *others})
        return StructuredOutputsParams(choice=options), lambda reply: reply == short
    return StructuredOutputsParams(regex=r"[\w -]{1,20}"), lambda reply: reply == short


def _answers(reply: str, wanted: dict[str, Any], short: str) -> bool:
    """Whether a reply is the wanted object; where it has a fact's sentence, its short answer is right as well."""
    try:
        value = json.loads(reply)
    except ValueError:
        return False
    pairs = [(value.get(key), each) for key, each in wanted.items()]
    return all(got == each or (short in str(each) and got and short in str(got)) for got, each in pairs)


def _holds(reply: str, short: str) -> bool:
    """Whether a reply is a JSON object in which a short answer stands."""
    try:
        value = json.loads(reply)
    except ValueError:
        return False
    return isinstance(value, dict) and short in " ".join(str(each) for each in value.values()).replace(".", "")


def evaluate_everyday(llm: LLM, tokenizer: PreTrainedTokenizerFast, count: int, seed: int = 1, show: int = 0) -> Scores:
    """Right answers of Quire in everyday use: sampled, under a grammar, with two calls, and without a template."""
    scores = {}
    for category, name in mixture.EVERYDAY_SCORES.items():
        rng, samples = random.Random(f"{seed} {category}"), mixture.evaluation_set(category, count, seed)
        options, checks = [], []
        for index, sample in enumerate(samples):
            given, check = None, lambda reply, sample=sample: is_right(sample, reply)
            if category == "enforced":
                given, check = _constraint(sample, rng)
            temperature = 1.0 if category == "loose facts" else 0.0
            options.append(SamplingParams(
                temperature=temperature, seed=index, max_tokens=MAX_REPLY, structured_outputs=given
            ))  # fmt: skip
            checks.append(check)
        prompts = [tok.conversation_text(tokenizer, sample, prompt_only=True) for sample in samples]
        replies = replies_of(llm, tokenizer, prompts, options)
        results = [check(reply) for check, reply in zip(checks, replies, strict=True)]
        scores[name] = (sum(results), count)
        wrong = [(sample, reply) for sample, reply, right in zip(samples, replies, results, strict=True) if not right]
        for sample, reply in wrong[:show]:
            print(f"[{name}] {sample.messages[-2]['content']!r} -> {reply!r}, wanted {sample.messages[-1]}")
    return scores
