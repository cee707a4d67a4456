"""A coding agent's part for the demo model, which cannot code: a logits processor that writes its answers.

The agent is asked to copy a code word from task.txt to answer.txt and to tell the word. Its answers are two calls of
the client's own tool for shell commands, and a text. The second call and the text hold the word that the first call
printed, so the agent comes to its end only by way of results that the client sent.

The prompt is the one of the demo model's template, which tells the tools first. Serve with
`--logits-processors agent_part:AgentPart`.
"""

import json
import re
from importlib.resources import files

import numpy as np
import torch
from tokenizers import Tokenizer

import quire

SHELLS = {"Bash": "command", "bash": "command", "exec_command": "cmd", "shell_command": "command"}
"""Tools of coding agents that run a command, and the parameter that holds it."""


def answer_to(prompt: str) -> str:
    """The agent's answer to a prompt: a call, the last text, or a title if it has no tools."""
    told = prompt.partition("<|im_end|>")[0]
    tools = set(re.findall(r'"name": "(\w+)"', told)) & set(SHELLS)
    if not tools:
        return "A word is copied"
    results = prompt.split("<|im_start|>tool\n")[1:]
    if not results:
        return call(min(tools), "cat task.txt")
    found = re.search(r"code word: (\w+)", results[0])
    word = found[1] if found else "missing"
    return call(min(tools), f"echo {word} > answer.txt") if len(results) == 1 else f"The code word is {word}."


def call(tool: str, command: str) -> str:
    """A call in the form that the demo model is read in."""
    arguments = {SHELLS[tool]: command, "description": "Copies the code word"}
    return "<tool_call>" + json.dumps({"name": tool, "arguments": arguments}) + "</tool_call>"


class AgentPart(quire.LogitsProcessor):
    """Lets each request say `answer_to` its prompt, and end."""

    def __init__(self, context: object) -> None:
        self._tokenizer = Tokenizer.from_str((files("quire") / "demo_model/tokenizer.json").read_text())
        self._answers: dict[int, list[int]] = {}  # by slot

    def admit(self, request: object) -> bool:
        prompt = self._tokenizer.decode(request.token_ids[: request.num_prompt_tokens], skip_special_tokens=False)
        answer = answer_to(prompt) + "<|im_end|>"
        self._answers[request.slot] = self._tokenizer.encode(answer, add_special_tokens=False).ids
        return True

    def apply(self, logits: torch.Tensor, batch: object) -> torch.Tensor:
        places = batch.positions - batch.num_prompt_tokens
        answers = [self._answers[slot] for slot in batch.slots.tolist()]
        forced = [answer[min(place, len(answer) - 1)] for answer, place in zip(answers, places.tolist(), strict=True)]
        column = batch.on_device(np.array(forced)).unsqueeze(1)
        return torch.full_like(logits, -torch.inf).scatter_(1, column, 0.0)
