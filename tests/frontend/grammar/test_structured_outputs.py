"""Outputs of a model with random weights match schemas, patterns, choices and grammars, offline and over HTTP."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import psutil
import pytest

from quire import LLM, AsyncLLM, GuidedDecodingParams, SamplingParams
from quire.core.config.engine_args import EngineArgs
from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.core.errors import ConfigError, ParameterError
from quire.core.wire.sampling_params import RequestOutputKind
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.cli import serve
from quire.frontend.flags.parser import CommandParser
from quire.frontend.metrics.reader import Histogram
from tests.schemas import API_SCHEMAS, SchemaMaker
from tests.servers import ServerProcess
from tests.weather import QUESTION, WEATHER_FUNCTION

NUM_MADE = 240
BOTH: list[Any] = ["xgrammar", "guidance"]
EXTRAS = {"outlines": "outlines_core", "lm-format-enforcer": "lmformatenforcer"}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
        "end": "</f>",
    },
}


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(checkpoint("llama"), max_num_seqs=32, num_gpu_blocks_override=2048, disable_log_stats=False) as llm:
        yield llm


def sampling(seed: int, constraint: StructuredOutputsParams, **params: Any) -> SamplingParams:
    params = {"max_tokens": 400, "temperature": 1.0, **params}
    return SamplingParams(seed=seed, structured_outputs=constraint, **params)


def generate(llm: LLM, params: list[SamplingParams]) -> list[tuple[str, str | None]]:
    """(text, finish reason) of each request."""
    outputs = llm.generate(["Answer:"] * len(params), params, use_tqdm=False)
    return [(output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs]


def violations(text: str, schema: dict[str, Any]) -> list[str]:
    """The errors of a JSON text."""
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(json.loads(text))]


@pytest.mark.parametrize(("backend", "num_made"), [("auto", NUM_MADE), ("guidance", NUM_MADE // 2)])
def test_every_finished_output_parses_and_validates(llm: LLM, backend: Any, num_made: int) -> None:
    """A few hundred schemas, 32 different ones in each step. Two in three forbid free whitespace."""
    maker = SchemaMaker(seed=11)
    schemas = [*API_SCHEMAS.values(), *(maker.make() for _ in range(num_made))]
    options: dict[str, Any] = {"backend": backend, "disable_additional_properties": True}
    params = [
        sampling(seed, StructuredOutputsParams(json=schema, disable_any_whitespace=seed % 3 > 0, **options))
        for seed, schema in enumerate(schemas)
    ]
    finished = 0
    for schema, (text, reason) in zip(schemas, generate(llm, params), strict=True):
        if reason == "length":
            continue
        finished += 1
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    assert finished >= 0.9 * len(schemas)


def test_different_schemas_are_followed_in_the_same_steps(llm: LLM) -> None:
    """32 requests run, most of them at the same time, and each output matches its own schema."""
    schemas: list[dict[str, Any]] = [
        {"type": "array", "items": {"enum": [f"value {number}"]}, "minItems": 25, "maxItems": 25}
        for number in range(32)
    ]
    params = [
        sampling(seed, StructuredOutputsParams(json=schema, disable_any_whitespace=True, backend=BOTH[seed % 2]))
        for seed, schema in enumerate(schemas)
    ]
    # Once before, so that no request waits until its schema is compiled, which takes long on a busy machine.
    llm.generate(["Answer:"] * 32, [each.replace(max_tokens=1) for each in params], use_tqdm=False)
    before = steps_and_tokens(llm)
    outputs = llm.generate(["Answer:"] * 32, [each.replace(max_tokens=1000) for each in params], use_tqdm=False)
    num_steps, num_tokens = (after - former for after, former in zip(steps_and_tokens(llm), before, strict=True))
    for number, output in enumerate(outputs):
        assert json.loads(output.outputs[0].text) == [f"value {number}"] * 25
    assert num_tokens > 8 * num_steps, "a step serves more than eight of them on average"


def steps_and_tokens(llm: LLM) -> tuple[float, float]:
    """How many steps an engine took, and how many tokens these served."""
    [steps] = [each for each in llm.get_metrics() if each.name == "vllm:iteration_tokens_total"]
    assert isinstance(steps, Histogram)
    return steps.count, steps.sum


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines", "lm-format-enforcer"])
def test_every_library_holds_outputs_to_a_schema(llm: LLM, backend: Any) -> None:
    if backend in EXTRAS:
        pytest.importorskip(EXTRAS[backend])
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}, "open": {"type": "boolean"}},
        "required": ["color", "open"],
        "additionalProperties": False,
    }
    constraint = StructuredOutputsParams(json=schema, backend=backend)
    for text, reason in generate(llm, [sampling(seed, constraint) for seed in range(4)]):
        assert reason == "stop"
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        ({"regex": "[a-z]{2,5}@(x|y)\\.com"}, lambda text: text[-6:] in ("@x.com", "@y.com") and text[:-6].isalpha()),
        ({"regex": "[^a-z]{3}é?"}, lambda text: len(text) - text.endswith("é") == 3),
        ({"choice": ["yes", "no", "Grüße", '"q"\\\n']}, lambda text: text in ("yes", "no", "Grüße", '"q"\\\n')),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, lambda text: text.count("(") == text.count(")")),
        ({"grammar": 'start: "a" start | "b"'}, lambda text: set(text[:-1]) <= {"a"} and text[-1] == "b"),
        ({"json_object": True, "disable_any_whitespace": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"structural_tag": TAG}, lambda text: text in ("<f>true</f>", "<f>false</f>")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["auto", "guidance"])
def test_other_constraints_hold_too(
    llm: LLM, constraint: dict[str, Any], fits: Callable[[str], bool], backend: Any
) -> None:
    params = [sampling(seed, StructuredOutputsParams(backend=backend, **constraint)) for seed in range(6)]
    outputs = generate(llm, params)
    assert [text for text, reason in outputs if reason == "stop" and not fits(text)] == []
    assert any(reason == "stop" for _, reason in outputs)


def test_conversations_offline_follow_what_each_asked_for(llm: LLM) -> None:
    asked = [
        StructuredOutputsParams(json=API_SCHEMAS["weather tool"], disable_any_whitespace=True),
        StructuredOutputsParams(choice=["left", "right"]),
    ]
    params = [sampling(seed, each) for seed, each in enumerate(asked)]
    outputs = llm.chat([[{"role": "user", "content": "Weather?"}]] * 2, params, use_tqdm=False)
    first, second = (output.outputs[0].text for output in outputs)
    jsonschema.validate(json.loads(first), API_SCHEMAS["weather tool"])
    assert second in ("left", "right")


def test_the_older_name_offline_is_the_same(llm: LLM) -> None:
    guided = GuidedDecodingParams(choice=["left", "right"], backend="guidance")
    params = SamplingParams(guided_decoding=guided, seed=1, max_tokens=50)
    assert params == SamplingParams(structured_outputs=guided, seed=1, max_tokens=50)
    [(text, reason)] = generate(llm, [params])
    assert text in ("left", "right")
    assert reason == "stop"
    with pytest.raises(ParameterError, match="give one") as caught:
        SamplingParams(guided_decoding=guided, structured_outputs=guided)
    assert caught.value.param == "guided_decoding"


def test_a_seed_gives_the_same_output_beside_others(llm: LLM) -> None:
    constraint = StructuredOutputsParams(json=API_SCHEMAS["weather tool"])
    [alone] = generate(llm, [sampling(5, constraint)])
    together = generate(llm, [sampling(seed, constraint) for seed in range(8)])
    assert together[5] == alone


def test_a_preempted_request_goes_on_in_its_grammar(checkpoint: Callable[..., Path]) -> None:
    schema = API_SCHEMAS["calendar event"]
    with LLM(checkpoint("llama"), max_num_seqs=8, block_size=4, num_gpu_blocks_override=100, max_model_len=320) as llm:
        params = [sampling(seed, StructuredOutputsParams(json=schema), max_tokens=300) for seed in range(12)]
        outputs = llm.generate(["Answer:"] * len(params), params, use_tqdm=False)
    for output in outputs:
        if output.outputs[0].finish_reason == "stop":
            jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert any(output.metrics.num_preemptions for output in outputs if output.metrics)


@pytest.mark.parametrize("constraint", [{"choice": ["yes", "no"]}, {"regex": "[a-z]{1,3}x?|no"}])
def test_more_tokens_than_the_longest_output_has_are_refused_at_once(llm: LLM, constraint: dict[str, Any]) -> None:
    asked = StructuredOutputsParams(**constraint)
    with pytest.raises(ParameterError, match="lower min_tokens") as caught:
        generate(llm, [sampling(0, asked, min_tokens=50)])
    assert caught.value.param == "min_tokens"
    assert generate(llm, [sampling(0, asked)])[0][1] == "stop"


def test_an_output_that_may_neither_end_nor_go_on_is_cut_short(llm: LLM) -> None:
    """The text so far is delivered, and the other requests of the steps go on. Without any text, it is an error."""
    constraint = StructuredOutputsParams(json={"const": "yes"})
    stuck, other = sampling(0, constraint, min_tokens=50), sampling(1, StructuredOutputsParams(choice=["left"]))
    first, second = llm.generate(["Answer:"] * 2, [stuck, other], use_tqdm=False)
    end = first.outputs[0]
    assert (end.text, end.finish_reason, end.stop_reason) == ('"yes"', "length", "grammar_dead_end")
    assert (second.outputs[0].text, second.outputs[0].finish_reason) == ("left", "stop")
    with pytest.raises(ParameterError, match="loosen one of them"):
        generate(llm, [sampling(0, constraint, allowed_token_ids=[5])])


# ------------------------------------------------------------------------------------------------------------- HTTP

SCHEMA = API_SCHEMAS["weather tool"]
MESSAGES: list[Any] = [{"role": "user", "content": "Weather?"}]


def as_format(json_schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": json_schema}


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": as_format({"name": "weather", "schema": SCHEMA, "strict": True})},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "_backend": "guidance"}},
        {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_chat_answers_validate(client: openai.OpenAI, fields: dict[str, Any], stream: bool) -> None:
    answer: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=300, seed=1, stream=stream, extra_body=fields
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    else:
        text = answer.choices[0].message.content
    assert violations(text, SCHEMA) == []


def test_completions_take_patterns_and_choices(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> str:
        answer = client.completions.create(model="tiny", prompt="x", max_tokens=50, seed=1, extra_body=fields)
        return answer.choices[0].text

    assert text(guided_choice=["left", "right"]) in ("left", "right")
    assert text(guided_regex="[0-9]{4}").isdigit()
    assert set(text(guided_grammar='root ::= "ab" root | "c"')) <= set("abc")
    assert text(structured_outputs={"choice": ["only"]}) == "only"


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_end_is_no_error_to_a_client(client: openai.OpenAI, stream: bool) -> None:
    fields = {"structured_outputs": {"json": {"const": "yes"}}, "min_tokens": 50}
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "extra_body": fields}
    answer = client.chat.completions.create(**asked, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    texts = [choice.delta.content if stream else choice.message.content for choice in choices]
    assert "".join(filter(None, texts)) == '"yes"'
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("length", "grammar_dead_end")


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": as_format({"schema": {"uniqueItems": True}})}, "response_format", "uniqueItems"),
        ({"response_format": as_format({"name": "x"})}, "response_format", "schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "contradict"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regular expression"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "jsn"),
        ({"guided_regex": "(?=x)"}, "guided_regex", "look"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "needs one of"),
        (
            {"guided_json": {"pattern": "^a+$", "maxLength": 4}, "guided_decoding_backend": "xgrammar"},
            "guided_json",
            "maxLength beside pattern is not supported as it is used here. Only the backend xgrammar was tried",
        ),
    ],
)  # fmt: skip
def test_a_wrong_constraint_names_the_field(base_url: str, fields: dict[str, Any], param: str, word: str) -> None:
    answer = httpx.post(f"{base_url}/v1/chat/completions", json={"messages": MESSAGES, **fields}, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].split("[")[0].startswith(param)
    assert word in error["message"]


HARD = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-z/]+$", "maxLength": 5},
        "share": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 2},
    },
    "required": ["code", "share"],
    "additionalProperties": False,
}
"""What llguidance alone can follow, after reasoning, too."""


@pytest.mark.parametrize("effort", ["high", "none"])
def test_a_schema_for_the_second_library_holds_after_reasoning(demo_server: ServerProcess, effort: str) -> None:
    with openai.OpenAI(base_url=demo_server.base_url + "/v1", api_key="none", max_retries=0) as client:
        answer: Any = client.chat.completions.create(
            model="quire-demo", messages=MESSAGES, temperature=0, max_tokens=300,
            response_format=as_format({"name": "x", "schema": HARD}), extra_body={"reasoning_effort": effort},
        )  # fmt: skip
        assert violations(answer.choices[0].message.content, HARD) == []


def test_anthropics_format_takes_the_same_schema(demo_server: ServerProcess) -> None:
    body = {
        "model": "quire-demo",
        "messages": MESSAGES,
        "max_tokens": 300,
        "output_config": {"format": {"type": "json_schema", "schema": HARD}},
    }
    answer = httpx.post(demo_server.base_url + "/v1/messages", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    [text] = [block["text"] for block in answer.json()["content"] if block["type"] == "text"]
    jsonschema.validate(json.loads(text), HARD)


@pytest.mark.parametrize("is_strict", [False, True])
def test_only_a_strict_function_is_refused_for_its_schema(demo_server: ServerProcess, is_strict: bool) -> None:
    schema = {**WEATHER_FUNCTION["parameters"], "not": {"required": ["planet"]}}
    function = {**WEATHER_FUNCTION, "parameters": schema, "strict": is_strict}
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    answer = httpx.post(demo_server.base_url + "/v1/chat/completions", json=body, timeout=60)
    if is_strict:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "tools"
        assert "xgrammar: not is not supported" in answer.json()["error"]["message"]
    else:
        [call] = answer.json()["choices"][0]["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def test_streams_go_on_while_a_bomb_is_being_compiled(base_url: str) -> None:
    """A schema and a pattern that take very long to compile do not delay 16 streams.

    Both are refused with an HTTP status, also for a stream, however late the refusal comes.
    """
    bombs = [
        {"structured_outputs": {"choice": ["ab" * length for length in range(1, 700)]}, "stream": True},
        {"structured_outputs": {"regex": "(((a|b){1,999}c){1,999}d){1,999}|" * 20 + "e"}},
    ]

    async def run() -> tuple[list[int], list[str]]:
        ended: list[str] = []
        async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:

            async def ask(name: str, fields: dict[str, Any]) -> int:
                body = {"prompt": "x", "max_tokens": 48, "ignore_eos": True, **fields}
                answer = await client.post("/v1/completions", json=body)
                ended.append(name)
                return answer.status_code

            streams = [ask("stream", {"stream": True, "seed": seed}) for seed in range(16)]
            return await asyncio.gather(*(ask("bomb", bomb) for bomb in bombs), *streams), ended

    statuses, ended = asyncio.run(run())
    assert statuses == [400, 400, *[200] * 16]
    assert ended[-1] == "bomb"  # all streams ended before


# ----------------------------------------------------------------------------------------------- options and crashes


def test_options_come_from_dotted_flags_and_keywords(checkpoint: Callable[..., Path]) -> None:
    parser = CommandParser("quire serve", "Serve.")
    serve.add_arguments(parser)
    args = parser.parse_args(
        [
            "--structured-outputs-config.backend",
            "guidance",
            "--structured-outputs-config.disable_any_whitespace",
            "true",
        ]
    )
    options = ServedModel.from_args(args.engine_args, checkpoint("llama")).structured_outputs
    assert options == StructuredOutputsOptions(backend="guidance", disable_any_whitespace=True)
    whole = EngineArgs.from_flat(structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True})
    assert ServedModel.from_args(whole, checkpoint("llama")).structured_outputs == options
    with pytest.raises(ConfigError, match="structured_outputs_config"):
        EngineArgs.from_flat(structured_outputs_config={"backend": "none"})


def test_a_library_that_is_not_installed_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be found on an empty path."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    for backend, package in EXTRAS.items():
        monkeypatch.delitem(sys.modules, package, raising=False)
        with pytest.raises(ConfigError, match=rf"{backend} is not installed.*pip install 'quire\[{backend}\]'"):
            EngineArgs.from_flat(structured_outputs_config={"backend": backend})
    assert EngineArgs.from_flat(structured_outputs_config={"backend": "guidance"})


def test_another_engine_goes_on_in_the_grammar_after_a_crash(checkpoint: Callable[..., Path]) -> None:
    """The new engine replays the tokens that were delivered before the old one was killed."""
    schema = {"type": "array", "items": API_SCHEMAS["payment intent"], "minItems": 2, "maxItems": 2}
    params = sampling(3, StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    params.output_kind = RequestOutputKind.DELTA

    def engines() -> set[psutil.Process]:
        children = psutil.Process().children()
        return {child for child in children if "quire.frontend.launch.engine_main" in " ".join(child.cmdline())}

    others = engines()

    async def run() -> tuple[str, str]:
        async with AsyncLLM.from_engine_args(model=str(checkpoint("llama"))) as llm:
            texts = []
            for is_disturbed in (False, True):
                text = ""
                async for output in llm.generate("Answer:", params, f"request-{is_disturbed}"):
                    text += output.outputs[0].text
                    if is_disturbed and len(text) > 30:
                        is_disturbed = False
                        [engine] = engines() - others
                        engine.kill()
                texts.append(text)
            return texts[0], texts[1]

    undisturbed, disturbed = asyncio.run(run())
    jsonschema.validate(json.loads(undisturbed), schema)
    assert disturbed == undisturbed
