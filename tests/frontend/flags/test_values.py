"""Texts of flags become values by vLLM's rules."""

import argparse

import pytest

from quire.core.config.cache import CacheConfig
from quire.core.config.engine_args import EngineArgs
from quire.core.config.model import ModelConfig
from quire.core.config.scheduler import SchedulerConfig
from quire.frontend.flags.dotted import DottedValue, merge
from quire.frontend.flags.values import Field, fields_of, human_int, human_int_or_auto
from quire.frontend.http.server_config import ServerConfig


def field(struct: type, name: str) -> Field:
    return next(item for item in fields_of(struct) if item.name == name)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2M", 2 * 1024**2), ("2m", 2_000_000), ("4096", 4096),
     ("1.0015k", 1001), ("3g", 3 * 10**9), ("3G", 3 * 2**30), ("1t", 10**12), ("1T", 2**40), ("-1", -1)],
)  # fmt: skip
def test_human_int(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["25.6", "1e3", "k", "", "1kb", "1 000", "0x10", "nan"])
def test_human_int_refuses_what_is_not_a_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        human_int(text)


def test_fraction_with_upper_case_suffix_hints_at_lower_case() -> None:
    with pytest.raises(ValueError, match=r"write 25\.6k"):
        human_int("25.6K")


@pytest.mark.parametrize(("text", "value"), [("auto", -1), ("AUTO", -1), ("-1", -1), ("2k", 2000)])
def test_human_int_or_auto(text: str, value: int) -> None:
    assert human_int_or_auto(text) == value


def test_only_marked_fields_take_suffixes() -> None:
    assert field(SchedulerConfig, "max_num_batched_tokens")("2k") == 2000
    with pytest.raises(argparse.ArgumentTypeError, match=r"whole number \(got '2k'\)"):
        field(SchedulerConfig, "max_num_seqs")("2k")


@pytest.mark.parametrize("text", ["", "None"])
def test_empty_and_none_are_null_where_null_is_allowed(text: str) -> None:
    assert field(SchedulerConfig, "max_num_seqs")(text) is None
    assert field(ModelConfig, "max_model_len")(text) is None
    assert field(ModelConfig, "quantization")(text.lower()) is None
    assert field(ModelConfig, "tokenizer")("none") == "none"
    with pytest.raises(argparse.ArgumentTypeError):
        field(ModelConfig, "seed")(text)


def test_choices_are_strict_and_listed() -> None:
    dtype = field(ModelConfig, "dtype")
    assert dtype("half") == "half"
    with pytest.raises(argparse.ArgumentTypeError, match=r"choose from auto, bfloat16, .*float32.* \(got 'fp32'\)"):
        dtype("fp32")
    assert field(ServerConfig, "ssl_cert_reqs")("2") == 2
    quantization = field(ModelConfig, "quantization")
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"^did you mean int8 or int4\? --help=quantization .*\(got 'i"
    ):
        quantization("int5")
    with pytest.raises(argparse.ArgumentTypeError, match=r"^choose from .*int4, .* \(got 'zzz'\)"):
        quantization("zzz")


@pytest.mark.parametrize("text", ["0", "1.5", "nan", "-0.1"])
def test_range_is_part_of_the_error(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="above 0 and at most 1"):
        field(CacheConfig, "gpu_memory_utilization")(text)


def test_json_needs_the_right_shape() -> None:
    overrides = field(ModelConfig, "hf_overrides")
    assert overrides('{"a": {"b": 1}}') == {"a": {"b": 1}}
    for wrong in ("[1]", "1", "{a: 1}", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="needs a JSON object"):
            overrides(wrong)
    origins = field(ServerConfig, "allowed_origins")
    assert origins('["https://a"]') == ["https://a"]
    with pytest.raises(argparse.ArgumentTypeError, match="needs a JSON list"):
        origins('{"a": 1}')
    with pytest.raises(argparse.ArgumentTypeError, match="expected str"):
        origins("[1]")


def test_every_option_is_described_and_named_once() -> None:
    groups = [*EngineArgs.__annotations__.values(), ServerConfig]
    fields = [item for group in groups for item in fields_of(group)]
    assert len({item.flag for item in fields}) == len(fields)
    assert [item.name for item in fields if not item.description.endswith(".")] == []


# --------------------------------------------------------------------------------------------------------- dotted


def dotted(keys: str, text: str, *, append: bool = False) -> DottedValue:
    return DottedValue("--x", keys.split(".") if keys else [], append, text)


def test_dotted_keys_nest_and_keep_their_neighbours() -> None:
    start = {"a": {"b": 1, "c": 2}}
    assert merge(start, dotted("a.b", "5")) == {"a": {"b": 5, "c": 2}}
    assert merge(merge(start, dotted("d.e.f", "true")), dotted("g", "text")) == {
        "a": {"b": 1, "c": 2}, "d": {"e": {"f": True}}, "g": "text",
    }  # fmt: skip
    assert start == {"a": {"b": 1, "c": 2}}


def test_append_takes_one_value_or_several() -> None:
    assert merge(None, dotted("l", "v", append=True)) == {"l": ["v"]}
    assert merge({"l": ["v"]}, dotted("l", "w,3", append=True)) == {"l": ["v", "w", 3]}
    assert merge({}, dotted("l", '{"a": 1, "b": 2}', append=True)) == {"l": [{"a": 1, "b": 2}]}
    assert merge([], dotted("", "https://a", append=True)) == ["https://a"]


def test_dotted_keys_do_not_overwrite_by_accident() -> None:
    with pytest.raises(ValueError, match="not an object"):
        merge({"a": 1}, dotted("a.b", "1"))
    with pytest.raises(ValueError, match="not a list"):
        merge({"a": 1}, dotted("a", "1", append=True))
