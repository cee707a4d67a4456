"""The types of parameters that programs make in Python: wrong ones are refused where they are made."""

from typing import Any

import msgspec
import numpy as np
import pytest

from quire.core.errors import ParameterError
from quire.core.wire.protocol import EngineRequest, SequenceStart, encoder
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams, ThinkingMarks
from quire.core.wire.structured_outputs import StructuredOutputsParams

SENT_IN_ANOTHER_FORM = {"structured_outputs", "guided_decoding"}
"""The engine gets a compiled grammar instead."""


class Odd:
    """Fits no field."""

    def __repr__(self) -> str:
        return "Odd()"


def made(name: str, value: Any) -> SamplingParams | ParameterError:
    try:
        return SamplingParams(**{name: value})
    except ParameterError as error:
        return error


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
@pytest.mark.parametrize("value", ["yes", 1.5, b"x", {"a": Odd()}, [Odd()], Odd(), {1: 2}, 2**70], ids=repr)
def test_every_field_holds_its_type_or_is_refused_by_name(name: str, value: Any) -> None:
    """Parameters that could be made can be sent, and are read as they were."""
    params = made(name, value)
    if isinstance(params, ParameterError):
        assert params.param in (name, "structured_outputs", "prompt_logprob_token_ids")
        return
    if name in SENT_IN_ANOTHER_FORM:
        return
    sent = encoder().encode(EngineRequest([SequenceStart("a", seed=1)], [1], params))
    assert msgspec.msgpack.decode(sent, type=EngineRequest).sampling == params


@pytest.mark.parametrize(
    "values",
    [
        {"ignore_eos": "yes"},
        {"detokenize": "x"},
        {"skip_special_tokens": 2},
        {"include_stop_str_in_output": None},
        {"output_kind": 7},
        {"bad_words_token_ids": [["a"]]},
        {"shown_special_token_ids": [True]},
        {"skip_reading_prefix_cache": "no"},
        {"thinking": {"begin": [], "end": [[1]]}},
        {"prompt_logprob_token_ids": 5},
        {"extra_args": {"x": "\ud800"}},
    ],
    ids=repr,
)
def test_fields_without_a_check_of_their_own(values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**values)
    assert caught.value.param == next(iter(values))


def test_fields_within_fields_and_fields_that_were_set_later() -> None:
    params = SamplingParams(thinking=ThinkingMarks(begin=[[1]], end=[[2]]))
    params.thinking.end = ["x"]  # type: ignore[union-attr, list-item]
    with pytest.raises(ParameterError, match="end has a wrong type"):
        params.replace(max_tokens=3)
    params = SamplingParams()
    params.ignore_eos = "yes"  # type: ignore[assignment]
    with pytest.raises(ParameterError, match="ignore_eos has a wrong type"):
        params.replace(max_tokens=3)


def test_numbers_that_mean_the_same_are_read() -> None:
    params = SamplingParams(temperature=np.float64(0.5), ignore_eos=1, detokenize=np.True_, output_kind=2)  # type: ignore[arg-type]
    assert (params.temperature, params.ignore_eos, params.detokenize) == (0.5, True, True)
    assert type(params.temperature) is float
    assert params.output_kind is RequestOutputKind.FINAL_ONLY


def test_numbers_of_numpy_are_pythons() -> None:
    given: dict[str, Any] = {
        "max_tokens": np.int64(5), "temperature": np.float32(0.5), "top_k": np.int32(3), "seed": np.uint8(7),
        "stop_token_ids": np.array([1, 2]), "allowed_token_ids": [np.int64(4), 5],
    }  # fmt: skip
    params = SamplingParams(**given)
    expected = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "seed": 7, "stop_token_ids": [1, 2]}
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.allowed_token_ids == [4, 5]
    msgspec.msgpack.encode(params)
    for wrong in ({"max_tokens": np.float32(1.5)}, {"stop_token_ids": np.array([[1]])}):
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            SamplingParams(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"json": 5},
        {"json": ["a"]},
        {"regex": 5},
        {"choice": "yes"},
        {"choice": [1, 2]},
        {"grammar": b"root ::= 1"},
        {"json_object": "yes"},
        {"structural_tag": 5},
        {"regex": "a", "whitespace_pattern": 3},
        {"regex": "a", "disable_any_whitespace": "no"},
        {"regex": "a", "backend": "none"},
    ],
    ids=repr,
)
def test_constraints_of_a_wrong_type(values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="wrong type"):
        StructuredOutputsParams(**values)
