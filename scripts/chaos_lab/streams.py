"""Requests of all kinds, whose answers are known from an undisturbed run, and the comparison with these."""

import asyncio
import json
import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from media import messages_with_images, sound
from server import ServerError

COMPLETIONS, CHAT, SOUNDS = "/v1/completions", "/v1/chat/completions", "/v1/audio/transcriptions"
ADAPTER = "adapter"
"""The name under which the adapter of `--adapter` is served."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "open": {"type": "boolean"}},
    "required": ["name", "open"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["mon", "tue"]}, "hour": {"type": "integer", "maximum": 23, "minimum": 0}},
            "required": ["day", "hour"],
        },
    },
}
LOGPROB_TOLERANCE = 2e-2
"""A prompt that is computed at once sums in another order than token by token."""


@dataclass(frozen=True)
class Request:
    """A request, and the name of its kind.

    Attributes:
        file: the sound that it sends in a form, with `body` as the form's fields.
    """

    kind: str
    path: str
    body: dict[str, Any]
    file: bytes | None = None

    def content(self) -> dict[str, Any]:
        """The body as keywords of httpx."""
        if self.file is None:
            return {"json": self.body}
        fields = {
            name: json.dumps(value) if isinstance(value, bool) else str(value) for name, value in self.body.items()
        }
        return {"data": fields, "files": {"file": ("a.wav", self.file)}}


@dataclass
class Outcome:
    """What a client got: the text, tool calls and finish reason of each choice, and log-probabilities.

    Attributes:
        longest_pause: seconds without a part of the answer.
        error: why the answer is not whole; None if it is.
    """

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    longest_pause: float = 0.0
    error: str | None = None

    def matches(self, expected: "Outcome") -> bool:
        """True if both have the same choices, and nearly the same log-probabilities."""
        return (
            self.choices == expected.choices
            and len(self.logprobs) == len(expected.logprobs)
            and all(
                math.isclose(one, other, rel_tol=LOGPROB_TOLERANCE, abs_tol=LOGPROB_TOLERANCE)
                for one, other in zip(self.logprobs, expected.logprobs, strict=True)
            )
        )


def make_requests(seed: int, variants: int, long_tokens: int) -> list[Request]:
    """Requests of every kind.

    Args:
        variants: of each kind, which differ in prompt, seed and length.
        long_tokens: length of the long prompts.
    """
    rng = random.Random(seed)
    made = []
    for _ in range(variants):
        prompt = [rng.randrange(10, 250) for _ in range(rng.randrange(4, 40))]
        long = [rng.randrange(10, 250) for _ in range(long_tokens)]
        number, tokens = rng.randrange(2**31), rng.randrange(40, 160)
        plain = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        drawn = {"temperature": 0.9, "seed": number}
        messages = [{"role": "user", "content": f"Tell me about {number}."}]
        chat = {"messages": messages, "max_tokens": 120, "stream": True, **drawn}
        made += [
            Request("greedy", COMPLETIONS, {**plain, "temperature": 0}),
            Request("seeded", COMPLETIONS, {**plain, **drawn}),
            Request("n = 2", COMPLETIONS, {**plain, **drawn, "n": 2}),
            Request("log-probabilities", COMPLETIONS, {**plain, **drawn, "logprobs": 3}),
            Request("stop string", COMPLETIONS, {**plain, **drawn, "ignore_eos": False, "stop": ["e", "\n"]}),
            Request("long prompt", COMPLETIONS, {**plain, "prompt": long, "temperature": 0, "max_tokens": 8}),
            Request(
                "grammar", CHAT,
                {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            ),
            Request("tools", CHAT, {**chat, "tools": [TOOL], "tool_choice": "required"}),
            Request(
                "beams", COMPLETIONS,
                {"prompt": prompt, "max_tokens": 8, "use_beam_search": True, "n": 2, "temperature": 0},
            ),
        ]  # fmt: skip
    return made


def make_adapter_requests(seed: int, variants: int) -> list[Request]:
    """Requests of the adapter; the others are the model's."""
    rng, made = random.Random(seed), []
    for _ in range(variants):
        prompt = [rng.randrange(10, 250) for _ in range(rng.randrange(4, 40))]
        body = {"model": ADAPTER, "prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": True}
        made.append(Request("adapter", COMPLETIONS, {**body, "temperature": 0.9, "seed": rng.randrange(2**31)}))
    return made


def make_image_requests(seed: int, variants: int) -> list[Request]:
    """Requests with one image, and with two."""
    rng, made = random.Random(seed), []
    for _ in range(variants):
        for count in (1, 2):
            drawn = {"temperature": 0.9, "seed": rng.randrange(2**31), "ignore_eos": True}
            body = {"messages": messages_with_images(rng, count), "max_tokens": 60, "stream": True, **drawn}
            made.append(Request(f"{count} images" if count > 1 else "image", CHAT, body))
    return made


def make_sound_requests(seed: int, variants: int) -> list[Request]:
    """Transcriptions, as streams and whole."""
    rng, made = random.Random(seed), []
    for _ in range(variants):
        for seconds, stream in ((0.8, True), (2.5, True), (2.5, False)):
            body = {"language": "en", "temperature": 0.9, "seed": rng.randrange(2**31), "stream": stream}
            kind = f"sound of {seconds:g} s{', a stream' if stream else ''}"
            made.append(Request(kind, SOUNDS, {**body, "max_completion_tokens": 40}, sound(rng, seconds)))
    return made


async def ask(client: httpx.AsyncClient, request: Request) -> Outcome:
    """Sends a request and reads the whole answer. Failures are in the outcome."""
    outcome, started = Outcome(), time.monotonic()
    try:
        if request.body.get("stream"):
            await _read_stream(client, request, outcome)
        else:
            answer = await client.post(request.path, **request.content())
            outcome.longest_pause = time.monotonic() - started
            if answer.status_code != 200:
                outcome.error = f"{answer.status_code} {answer.text[:300]}"
            else:
                body = answer.json()
                for choice in body.get("choices") or [{"text": body["text"], "finish_reason": "stop"}]:
                    _add(outcome, choice)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if outcome.error is None and any(not each["finish_reason"] for each in outcome.choices.values()):
        outcome.error = "the stream ended before the answer"
    return outcome


async def _read_stream(client: httpx.AsyncClient, request: Request, outcome: Outcome) -> None:
    last = time.monotonic()
    async with client.stream("POST", request.path, **request.content()) as answer:
        if answer.status_code != 200:
            outcome.error = f"{answer.status_code} {(await answer.aread()).decode('utf-8', 'replace')[:300]}"
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.monotonic()
            outcome.longest_pause, last = max(outcome.longest_pause, now - last), now
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                outcome.error = str(event["error"])[:300]
                return
            for choice in event["choices"]:
                _add(outcome, choice)


def _add(outcome: Outcome, choice: dict[str, Any]) -> None:
    """Adds an event's part, or a whole answer, to its choice."""
    found = outcome.choices.setdefault(choice.get("index", 0), {"text": "", "calls": {}, "finish_reason": None})
    part = choice.get("delta") or choice.get("message") or choice
    found["text"] += part.get("text") or part.get("content") or ""
    for call in part.get("tool_calls") or []:
        place = found["calls"].setdefault(str(call.get("index", 0)), {"name": "", "arguments": ""})
        place["name"] += call["function"].get("name") or ""
        place["arguments"] += call["function"].get("arguments") or ""
    found["finish_reason"] = choice.get("finish_reason") or found["finish_reason"]
    if choice.get("logprobs"):
        outcome.logprobs += [value for value in choice["logprobs"].get("token_logprobs") or [] if value is not None]


async def references(client: httpx.AsyncClient, requests: list[Request], concurrency: int) -> list[Outcome]:
    """The answers of an undisturbed server.

    Raises:
        ServerError: one failed.
    """
    places = asyncio.Semaphore(concurrency)

    async def one(request: Request) -> Outcome:
        async with places:
            outcome = await ask(client, request)
        if outcome.error is not None:
            raise ServerError(f"the undisturbed server failed ({request.kind}): {outcome.error}")
        return outcome

    return list(await asyncio.gather(*map(one, requests)))
