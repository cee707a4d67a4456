"""Formats of messages that makers describe in code: compared with what vLLM 0.33's encoders made of conversations.

`scripts/record_message_formats.py` made the examples.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.config.model import TokenizerMode
from quire.core.errors import ParameterError
from quire.frontend.parsing.formats.recognition import recognize
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.message_formats import NAMES, template_of
from quire.frontend.text.tokenizer_files import read_tokenizer_files
from tests.frontend.text import tokenizers_zoo

RECORDED = json.loads(Path(__file__).with_name("message_formats.json").read_text(encoding="utf-8"))
REFUSED = (
    "refused the messages: (messages.1. is the result|a (role|result|message)|reasoning_eff|cohere_f|ground|templ)"
)
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_prompts_are_those_of_the_makers_encoders(name: str) -> None:
    template, num_compared = ChatTemplate(template_of(name), {}), 0
    for recorded, title, with_tools, variables, prompt in RECORDED["prompts"]:
        if recorded == name:
            messages, tools = RECORDED["conversations"][title], RECORDED["tools"] if with_tools else None
            others = {key: value for key, value in variables.items() if key != "documents"}
            written = template.render(messages, tools=tools, documents=variables.get("documents"), variables=others)
            assert written == prompt, (title, variables, with_tools)
            num_compared += 1
    assert num_compared > 40


@pytest.mark.parametrize("name", sorted(NAMES))
def test_parts_of_a_message_are_joined(name: str) -> None:
    template, parts = ChatTemplate(template_of(name), {}), [{"type": "text", "text": text} for text in "ab"]
    joined = {
        "cohere": "<|USER_TOKEN|><|START_TEXT|>ab<|END_TEXT|>",
        "deepseek_v32": "<｜User｜>a\nb<｜Assistant｜>",
        "kimi_k3": '<|open|>message role="user"<|sep|>a\nb<|close|>message<|sep|>',
        "inkling": "<|message_user|><|content_text|>a<|end_message|><|message_user|><|content_text|>b<|end_message|>",
    }
    prompt = template.render([{"role": "user", "content": parts}])
    assert joined.get(name, "<｜User｜>a\n\nb<｜Assistant｜>") in prompt


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "deepseek_v41"])
def test_an_answer_is_begun_or_gone_on_with(name: str) -> None:
    template = ChatTemplate(template_of(name), {})
    assert template.render(QUESTION, add_generation_prompt=False).endswith("<｜User｜>a")
    begun = [*QUESTION, {"role": "assistant", "content": "b c"}]
    told = {"add_generation_prompt": False, "variables": {"thinking": False}}
    assert template.render(begun, continue_final_message=True, **told).endswith("<｜Assistant｜></think>b c")
    assert template.render(begun, **told).endswith("</think>b c<｜end▁of▁sentence｜>")


@pytest.mark.parametrize(
    ("name", "messages", "variables"),
    [
        ("deepseek_v32", [*QUESTION, {"role": "tool", "content": "r"}], {}),
        ("deepseek_v32", [{"role": "robot", "content": "r"}], {}),
        ("deepseek_v4", [{"role": "robot", "content": "r"}], {}),
        ("deepseek_v41", QUESTION, {"reasoning_effort": "medium"}),
        ("deepseek_v41", QUESTION, {"reasoning_effort": 101}),
        ("inkling", QUESTION, {"reasoning_effort": 1}),
        ("kimi_k3", QUESTION, {"reasoning_effort": "medium"}),
        ("kimi_k3", [*QUESTION, {"role": "tool", "content": "r", "tool_call_id": "x"}], {}),
        ("cohere", QUESTION, {"cohere_format": "cmd5"}),
        ("cohere", QUESTION, {"grounding": "often"}),
        ("cohere", QUESTION, {"template_id": "cmd4@1"}),
        ("cohere", [*QUESTION, {"role": "tool", "content": "r"}], {}),
        ("cohere", [{"role": "robot", "content": "r"}], {}),
    ],
)
def test_what_a_format_has_not_is_refused(name: str, messages: list[Any], variables: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=REFUSED):
        ChatTemplate(template_of(name), {}).render(messages, variables=variables)


def chosen(folder: Path, mode: TokenizerMode = "auto") -> dict[str, str]:
    return read_tokenizer_files(folder, mode, False).chat_templates


def test_a_model_without_a_template_has_its_makers_format(tmp_path: Path) -> None:
    tokenizers_zoo.byte_level().save(str(tmp_path / "tokenizer.json"))
    assert chosen(tmp_path) == {}
    for architecture, name in {
        "DeepseekV32ForCausalLM": "deepseek_v32",
        "DeepseekV4ForCausalLM": "deepseek_v4",
        "DeepseekV41ForCausalLM": "deepseek_v41",
        "InklingForCausalLM": "inkling",
        "KimiK3ForConditionalGeneration": "kimi_k3",
    }.items():
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert chosen(tmp_path) == {"default": template_of(name)}
        assert recognize(template_of(name)) == name
    assert recognize(template_of("cohere")) == "cohere_command4"
    assert chosen(tmp_path, "hf") == {}
    (tmp_path / "chat_template.jinja").write_text("own")
    assert chosen(tmp_path) == {"default": "own"}
    assert chosen(tmp_path, "deepseek_v4") == {"default": template_of("deepseek_v4")}


def test_a_token_has_the_name_that_the_vocabulary_has(tmp_path: Path) -> None:
    backend = tokenizers_zoo.byte_level()
    backend.add_special_tokens(["<|unused_200024|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    [template] = chosen(tmp_path, "inkling").values()
    tools = RECORDED["tools"]
    prompt = ChatTemplate(template, {}).render(QUESTION, tools=tools)
    assert prompt.startswith("<|message_system|>tool_declare<|unused_200024|>[{")
