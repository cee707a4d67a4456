"""Records how vLLM's encoders write conversations, for tests/frontend/text/test_message_formats.py.

python scripts/record_message_formats.py SITE_PACKAGES ENCODING_K3

SITE_PACKAGES is the folder that has vllm 0.33, which need not be runnable. ENCODING_K3 is encoding_k3.py of Kimi K3, or
a port of it; vLLM runs it as the code of the checkpoint. Cohere's encoder is the package cohere-melody (0.15.3).
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

RESULT = Path(__file__).resolve().parent.parent / "tests" / "frontend" / "text" / "message_formats.json"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how the weather is. Über <all>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, CLOCK]


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


CALLS = [
    call(1, "weather", {"city": 'Paris "x"', "days": 3, "deep": {"ä": [1, None, True]}}),
    call(2, "clock", {}),
]
THOUGHT = {"reasoning": "I think\nso."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [user("Hello {you} ü")],
    "a system message": [system("Be brief."), user("Hello")],
    "several turns": [user("a"), assistant("b", **THOUGHT), user("c"), assistant("d", **THOUGHT), user("e")],
    "calls": [system("S"), user("a"), assistant("", tool_calls=CALLS, **THOUGHT), result(1, "sun"), result(2, "noon")],
    "results in another order": [
        user("a"), assistant("x", tool_calls=CALLS, **THOUGHT), result(2, "noon"), result(1, "sun"),
    ],
    "calls, then an answer and a question": [
        user("a"), assistant("", tool_calls=CALLS, **THOUGHT), result(1, "sun"), result(2, "noon"),
        assistant("It is sunny.", **THOUGHT), user("Thanks"),
    ],
    "calls twice": [
        user("a"), assistant("", tool_calls=CALLS[:1], **THOUGHT), result(1, "sun"),
        assistant("now", tool_calls=CALLS[1:], **THOUGHT), result(2, "noon"),
    ],
    "a message in the middle": [user("a"), assistant("b", **THOUGHT), system("Now in French."), user("c")],
    "a last system message": [user("a"), assistant("b", **THOUGHT), system("Go on.")],
    "questions that follow one another": [user("a"), user("b")],
    "a question behind results": [user("a"), assistant("", tool_calls=CALLS[:1], **THOUGHT), result(1, "s"), user("b")],
    "a developer": [{"role": "developer", "content": "Be brief."}],
}  # fmt: skip
SCHEMA_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"ü<": {"type": "string"}, "a": {}}}},
}
VARIABLES: dict[str, list[dict[str, Any]]] = {
    "deepseek_v32": [{}, {"thinking": True}, {"enable_thinking": True}],
    "deepseek_v4": [
        {}, {"thinking": False}, {"enable_thinking": True, "reasoning_effort": "max"},
        {"reasoning_effort": "low"}, {"enable_thinking": False, "reasoning_effort": "none"}, {"drop_thinking": False},
    ],
    "deepseek_v41": [
        {}, {"thinking": False}, {"reasoning_effort": "max"}, {"reasoning_effort": 7}, {"drop_thinking": False},
        {"enable_thinking": False, "reasoning_effort": "none"},
    ],
    "cohere": [
        {}, {"cohere_format": "cmd3"}, {"grounding": "DISABLED", "dev_instruction": "D"},
        {"platform_instruction": "P", "json_mode": True}, {"response_format": SCHEMA_FORMAT},
        {"documents": [{"text": "d1"}, {"id": "x", "data": {"text": "<d2>"}}]},
        {"cohere_format": "cmd3", "reasoning_type": "enabled", "safety_mode": "STRICT"},
        {"cohere_format": "cmd3", "thinking": {"type": "disabled"}, "documents": [{"text": "d1"}]},
        {"cohere_format": "cmd3", "citation_options": {"mode": "OFF"}, "safety_mode": "NONE", "documents": [{"a": 1}]},
        {"cohere_format": "cmd3", "dev_instruction": "D", "response_format": SCHEMA_FORMAT},
        {"cohere_format": "cmd3", "skip_preamble": True, "dev_instruction": "D"},
    ],
    "kimi_k3": [
        {}, {"thinking": False}, {"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "max"},
        {"enable_thinking": False, "reasoning_effort": "none"}, {"request": {"tool_choice": "required"}},
        {"request": {"tool_choice": "none", "response_format": {"type": "json_object"}}},
        {"request": {"response_format": SCHEMA_FORMAT}},
    ],
    "inkling": [{}, {"reasoning_effort": 0.55}, {"reasoning_effort": "none"}, {"reasoning_effort": "max"}],
}  # fmt: skip


class Inkling:
    """vLLM's encoder of Inkling, which makes ids of texts and special tokens, with texts for ids."""

    def __init__(self, folder: Path) -> None:
        self._module = importlib.import_module("vllm.renderers.inkling_encoding")
        source = folder.joinpath("vllm", "renderers", "inkling.py").read_text()
        [self._efforts] = [
            ast.literal_eval(node.value)
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMED_REASONING_EFFORT"
        ]

    def encode_text(self, text: str) -> list[str]:
        return [text]

    def encode_special(self, token: str) -> str:
        return token

    def apply_chat_template(self, messages: Any, tools: Any, *, tokenize: bool, reasoning_effort: Any = 0.9) -> str:
        effort = self._efforts.get(reasoning_effort, reasoning_effort)
        return "".join(self._module.render_inkling_messages(messages, self, tools=tools, reasoning_effort=effort))


class Missing(ValueError):
    """Stands for what a module imports of vLLM: a type, a logger, an error."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args)


def functions_of(path: Path) -> dict[str, Any]:
    """The functions and constants of a module of vLLM's, without its renderer and what it imports."""
    names: dict[str, Any] = {}
    body: list[ast.stmt] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("vllm")):
            names |= {alias.asname or alias.name: Missing for alias in node.names}
        elif not (isinstance(node, ast.ClassDef) and "BaseRenderer" in ast.unparse(node)):
            body.append(node)
    exec(compile(ast.Module(body, []), str(path), "exec"), names)
    return names


class KimiK3:
    """Kimi K3's encoder, which makes segments of texts, as vLLM calls it."""

    def __init__(self, folder: Path, encoding: Path) -> None:
        self._functions = functions_of(folder / "vllm" / "renderers" / "kimi_k3.py")
        sys.path.insert(0, str(encoding.parent))
        self._module = importlib.import_module(encoding.stem)

    def apply_chat_template(self, messages: Any, tools: Any, *, tokenize: bool, **variables: Any) -> str:
        if any(message["role"] == "developer" for message in messages):
            raise ValueError("the encoder leaves such messages out")
        variables |= variables.pop("request", {})
        self._functions["_apply_k3_thinking_kwargs"](variables)
        ordered = self._functions["_normalize_k3_tool_messages"](messages)
        return "".join(each.text for each in self._module.build_chat_segments(ordered, tools, **variables))


class Cohere:
    """The library of Cohere, as vLLM calls it."""

    def __init__(self, folder: Path) -> None:
        self._library = importlib.import_module("cohere_melody")
        self._read = functions_of(folder / "vllm" / "renderers" / "cohere.py")["_build_render_config"]

    def apply_chat_template(self, messages: Any, tools: Any, *, tokenize: bool, **variables: Any) -> str:
        name, config = self._read(messages, {**variables, "tools": tools})
        return getattr(self._library, f"render_{name}")(config)


class Tokenizer:
    """A stand-in for the tokenizer that the encoders extend."""

    def get_added_vocab(self) -> dict[str, int]:
        return {}


def encoder(name: str, folder: Path) -> Any:
    """vLLM's tokenizer of a mode, without what else its modules import."""
    for package in ("vllm", "vllm.renderers", "vllm.tokenizers"):
        module = sys.modules.setdefault(package, ModuleType(package))
        module.__path__ = [str(folder.joinpath(*package.split(".")))]
    for module, attributes in {
        "vllm.renderers.chat_utils": ["ChatCompletionMessageParam"],
        "vllm.tokenizers.hf": ["HfTokenizer", "get_cached_tokenizer"],
        "vllm.tokenizers.protocol": ["TokenizerLike"],
    }.items():
        made = sys.modules.setdefault(module, ModuleType(module))
        for attribute in attributes:
            setattr(made, attribute, Any if attribute == "ChatCompletionMessageParam" else Tokenizer)
    if name == "inkling":
        return Inkling(folder)
    if name == "cohere":
        return Cohere(folder)
    if name == "kimi_k3":
        return KimiK3(folder, Path(sys.argv[2]))
    module = importlib.import_module(f"vllm.tokenizers.{name}")
    return getattr(module, f"get_{name}_tokenizer")(Tokenizer())


FEW = ("one question", "calls")
WITH_TOOLS = ("one question", "a system message", "several turns", "calls", "a message in the middle")


def main() -> None:
    prompts = []
    for name, choices in VARIABLES.items():
        tokenizer = encoder(name, Path(sys.argv[1]))
        for title, messages in CONVERSATIONS.items():
            for tools in (None, TOOLS) if title in WITH_TOOLS else (None,):
                shown = choices if title in FEW else choices[:6]  # to keep the file small
                for variables in shown if tools is None else choices[:2]:
                    try:
                        prompt = tokenizer.apply_chat_template(messages, tools, tokenize=False, **variables)
                    except (ValueError, IndexError):  # what it refuses is no example
                        continue
                    prompts.append([name, title, tools is not None, variables, prompt])
    recorded = {"conversations": CONVERSATIONS, "tools": TOOLS, "prompts": prompts}
    RESULT.write_text(json.dumps(recorded, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    print(f"{len(prompts)} prompts in {RESULT}")


if __name__ == "__main__":
    main()
