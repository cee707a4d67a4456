"""The fields that constrain an answer, in the dialects of vLLM, SGLang, llama-server and Together."""

from typing import Any

import msgspec
import pytest

from quire.core.errors import ParameterError
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.openai.output_format import OutputFields
from quire.frontend.openai.responses.schema import ResponsesRequest
from quire.frontend.openai.responses.tools import OfferedTools
from quire.frontend.openai.schema import ChatRequest, CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GBNF = 'root ::= "a"'


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object", "schema": {}}}, {"json": {}}),
        ({"response_format": {"type": "json_object", "schema": None}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json": SCHEMA}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": GBNF}, {"grammar": GBNF}),
        ({"grammar": GBNF}, {"grammar": GBNF}),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"json_schema": '{"type": "integer"}'}, {"json": '{"type": "integer"}'}),
        (
            {"structured_outputs": {"grammar": GBNF}, "guided_grammar": GBNF, "guided_decoding_backend": "guidance"},
            {"grammar": GBNF, "backend": "guidance"},
        ),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["b"]}, {"regex": "a"}),
        ({"structured_outputs": {"regex": "a"}, "regex": "b"}, {"regex": "a"}),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}, "structured_outputs": {"json": SCHEMA}},
            {"json": SCHEMA},
        ),
        ({"guided_json": SCHEMA, "json_schema": msgspec.json.encode(SCHEMA).decode()}, {"json": SCHEMA}),
        ({"response_format": {"type": "text"}, "ebnf": GBNF}, {"grammar": GBNF}),
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_dialect_is_read(kind: type[OutputFields], fields: dict[str, Any], constraint: dict[str, Any]) -> None:
    prompt = {"messages": []} if kind is ChatRequest else {"prompt": "a"}
    request = msgspec.convert({**prompt, **fields}, kind)
    assert request.read_format() == StructuredOutputsParams(**constraint)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format.schema"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        ({"regex": "a", "ebnf": GBNF}, "ebnf"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_decoding_backend": "guidance"}, "guided_decoding_backend"),
    ],
)
def test_a_contradiction_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        OutputFields(**fields).read_format()
    assert caught.value.param == param


def test_what_structured_outputs_overrules_is_told_as_ignored() -> None:
    fields = OutputFields(structured_outputs={"regex": "a"}, guided_regex="a", guided_choice=["b"], ebnf=GBNF)
    assert list(fields.ignored_parts()) == ["guided_choice", "ebnf"]
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": {}}
    assert list(OutputFields(response_format=form).ignored_parts()) == ["response_format.schema"]
    assert list(OutputFields(structured_outputs={"x": 1}, regex="a").ignored_parts()) == []


def test_a_responses_format_may_have_a_schema_by_either_name() -> None:
    for name in ("json_object", "json_schema"):
        text = {"format": {"type": name, "name": "n", "schema": SCHEMA}}
        request = msgspec.convert({"input": "a", "text": text}, ResponsesRequest)
        sampling = request.to_chat_input([{"role": "user", "content": "a"}], OfferedTools(None)).sampling
        assert sampling["structured_outputs"] == StructuredOutputsParams(json=SCHEMA)
