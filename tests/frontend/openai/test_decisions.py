"""Decisions: the probabilities are those of the labels behind vLLM's prompts, computed from log-probabilities."""

import math
from typing import Any

import httpx
import pytest

from quire.frontend.openai.decisions.questions import LabelRead
from quire.frontend.openai.decisions.system_one import read_question
from tests.servers import ServerProcess

STATE = "The capital of France is Paris."
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "name": "sure", "instructions": "Is it true?"},
    {
        "type": "choice",
        "instructions": "Which one?",
        "choices": [{"value": "Paris", "description": "a city"}, {"value": True}, {"value": "true"}],
    },
    {"type": "score", "instructions": "How good?", "levels": [{"label": "bad"}, {"label": "good", "description": "y"}]},
]
ASKED = [
    "Question: Is it true?\nA: false\nB: true\nAnswer with the letter of one option only.",
    'Question: Which one?\nA: "Paris" - a city\nB: true\nC: "true"\nAnswer with the letter of one option only.',
    "Question: How good?\nA: bad\nB: good - y\nAnswer with the letter of one option only.",
]
"""What vLLM asks."""


def post(server: ServerProcess, path: str, body: Any) -> Any:
    answer = httpx.post(server.base_url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def probabilities(
    server: ServerProcess, asked: str, labels: str, system: str | None = None
) -> tuple[list[float], float, int]:
    """Of the labels among themselves, of all labels among all tokens, and the length of the prompt."""
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": asked}]
    variables = {"enable_thinking": False}
    ids = post(server, "/tokenize", {"messages": messages, "chat_template_kwargs": variables})["tokens"]
    tokens = [post(server, "/tokenize", {"prompt": f"x\n{label}"})["tokens"][-1] for label in labels]
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": len(tokens), "logprob_token_ids": tokens}
    [choice] = post(server, "/v1/completions", {**body, "return_tokens_as_token_ids": True})["choices"]
    [row] = choice["logprobs"]["top_logprobs"]
    shares = [math.exp(row[f"token_id:{token}"]) for token in tokens]
    return [share / sum(shares) for share in shares], sum(shares), len(ids)


def test_decisions_are_the_probabilities_of_labels(demo_server: ServerProcess) -> None:
    body = {"model": "quire-demo", "input": [{"role": "user", "content": STATE}], "questions": QUESTIONS}
    answer = post(demo_server, "/v1/decisions", body)
    reads = [
        probabilities(demo_server, f"{STATE}\n\n{asked}", labels)
        for asked, labels in zip(ASKED, ("AB", "ABC", "AB"), strict=True)
    ]
    sure, which, good = answer["answers"]
    assert sure == {"type": "predicate", "name": "sure", "probability": pytest.approx(reads[0][0][1], rel=1e-4)}
    shares, mass, _ = reads[1]
    assert (which["type"], which["name"]) == ("choice", None)
    assert [each["value"] for each in which["probabilities"]] == ["Paris", True, "true"]
    assert [each["probability"] for each in which["probabilities"]] == pytest.approx(shares, rel=1e-4)
    assert which["choice"] == ["Paris", True, "true"][shares.index(max(shares))]
    assert which["confidence"] == pytest.approx(max(shares) * mass, rel=1e-4)
    shares, mass, _ = reads[2]
    assert good["score"] == pytest.approx(shares[1], rel=1e-4)
    assert [(each["value"], each["label"]) for each in good["probabilities"]] == [(0, "bad"), (1, "good")]
    assert good["confidence"] == pytest.approx(max(shares) * mass, rel=1e-4)
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (sum(length for *_, length in reads), 3)
    assert usage["total_tokens"] == usage["input_tokens"] + 3
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert set(usage["input_tokens_details"]) == {"cached_tokens", "cache_write_tokens"}


def test_parts_of_the_input_are_joined_as_by_vllm(demo_server: ServerProcess) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    given = [{"role": "user", "content": parts}, {"role": "user", "type": "message", "content": "c"}]
    answers = [
        post(demo_server, "/v1/decisions", {"model": "quire-demo", "input": each, "questions": QUESTIONS[:1]})
        for each in (given, "a\nb\n\nc")
    ]
    assert answers[0]["answers"] == answers[1]["answers"]
    assert answers[0]["usage"]["input_tokens"] == answers[1]["usage"]["input_tokens"]


def test_named_questions_about_json(demo_server: ServerProcess) -> None:
    questions = {
        "where": {"type": "choice", "instructions": "Where?", "criteria": {"here": "near", "there": None}},
        "how": {"type": "score", "criteria": ["low", "mid", "high"]},
    }
    body = {"state": {"ä": [1]}, "questions": questions, "instructions": "Be fair.", "request_id": "mine"}
    answer = post(demo_server, "/v1/systemone", body)
    assert (answer["id"], answer["object"], answer["joint"]) == ("decision-mine", "structured_decision", None)
    state = '{"ä": [1]}\n\n'
    asked = state + "Question: Where?\nA: here - near\nB: there\nAnswer with the letter of one option only."
    shares, mass, length = probabilities(demo_server, asked, "AB", "Be fair.")
    where = answer["answers"]["where"]
    assert (where["type"], list(where["probabilities"])) == ("choice", ["here", "there"])
    assert list(where["probabilities"].values()) == pytest.approx(shares, rel=1e-4)
    assert where["confidence"] == pytest.approx(max(shares) * mass, rel=1e-4)
    assert answer["diagnostics"]["where"]["label_mass"] == pytest.approx(mass, rel=1e-4)
    asked = state + "0: low\n1: mid\n2: high\nAnswer with the number of one level only."
    shares, mass, other = probabilities(demo_server, asked, "012", "Be fair.")
    how = answer["answers"]["how"]
    assert how["score"] == pytest.approx(shares[1] + 2 * shares[2], rel=1e-4)
    assert how["legend"] == {"0": "low", "1": "mid", "2": "high"}
    assert answer["usage"] == {"input_tokens": length + other, "output_tokens": 2}


def test_yes_or_no() -> None:
    """vLLM's words, and the answer to them. The demo model has no token for `yes`."""
    read = LabelRead(
        probabilities=[0.25, 0.75], label_mass=0.5, argmax_is_label=True, input_tokens=9, output_tokens=1,
        cached_tokens=0,
    )  # fmt: skip
    named = read_question("a", {"type": "noul", "instructions": "Ok?", "criteria": {"true": "it is"}})
    assert named.question.prompt("S") == "S\n\nQuestion: Ok?\nyes: it is\nno\nAnswer with yes or no only."
    assert named.answer(read) == {
        "type": "noul",
        "noul": 0.25,
        "probabilities": {"yes": 0.25, "no": 0.75},
        "confidence": 0.375,
    }


PREDICATE = {"type": "predicate", "instructions": "a"}
CHOICE = {"type": "choice", "criteria": {"a": None}}
REFUSED: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "no question": ("decisions", {"questions": []}, "questions"),
    "too many questions": ("decisions", {"questions": [PREDICATE] * 65}, "questions"),
    "too many choices": (
        "decisions",
        {"questions": [{"type": "choice", "instructions": "", "choices": [{"value": str(i)} for i in range(27)]}]},
        "questions",
    ),
    "one choice": (
        "decisions", {"questions": [{"type": "choice", "instructions": "", "choices": [{"value": "a"}]}]}, None
    ),
    "equal choices": (
        "decisions", {"questions": [{"type": "choice", "instructions": "", "choices": [{"value": "a"}] * 2}]},
        "questions",
    ),
    "another kind": ("decisions", {"questions": [{"type": "noul", "instructions": "a"}]}, None),
    "jointly": ("decisions", {"questions": [PREDICATE], "joint": True}, "joint"),
    "an image": (
        "decisions", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, None
    ),
    "another model": ("decisions", {"questions": [PREDICATE], "model": "other"}, "model"),
    "no token for yes": ("systemone", {"questions": {"a": {"type": "noul"}}}, "questions"),
    "thinking": (
        "systemone", {"questions": {"a": CHOICE}, "chat_template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs",
    ),
    "images": ("systemone", {"questions": {"a": CHOICE}, "images": ["data:"]}, "images"),
    "unknown fields": ("systemone", {"questions": {"a": {**CHOICE, "colour": 1}}}, "questions"),
    "no criteria": ("systemone", {"questions": {"a": {"type": "choice"}}}, "questions"),
    "one level": ("systemone", {"questions": {"a": {"type": "score", "criteria": ["a"]}}}, "questions"),
    "equal levels": ("systemone", {"questions": {"a": {"type": "score", "criteria": ["a", "a"]}}}, "questions"),
    "a name that is empty": ("systemone", {"questions": {"": CHOICE}}, "questions"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decided_is_refused(demo_server: ServerProcess, name: str) -> None:
    path, fields, param = REFUSED[name]
    plain: dict[str, Any] = {"model": "quire-demo", "input": "a", "questions": [PREDICATE]}
    body = {**(plain if path == "decisions" else {"state": "a"}), **fields}
    answer = httpx.post(f"{demo_server.base_url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert param is None or answer.json()["error"]["param"] == param
