"""Sampling parameters as programs for vLLM make them."""

import pytest

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams


class TestVllmsHabits:
    """Programs written for vLLM make parameters in these ways."""

    def test_positions_of_the_first_fields(self) -> None:
        params = SamplingParams(2, 0.1, 0.2, 1.3, 0.7, None, 0.9, 40)
        assert (params.n, params.presence_penalty, params.frequency_penalty) == (2, 0.1, 0.2)
        assert (params.repetition_penalty, params.temperature, params.top_p, params.top_k) == (1.3, 0.7, 0.9, 40)

    def test_loose_values(self) -> None:
        params = SamplingParams(logprobs=True, prompt_logprobs=True, seed=-1)
        assert (params.logprobs, params.prompt_logprobs, params.seed) == (1, 1, None)

    def test_optional_values(self) -> None:
        params = SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, logit_bias={"5": 300, 6: -1.5})
        assert (params.n, params.temperature, params.top_p) == (1, 1.0, 0.5)
        assert params.logit_bias == {5: 100.0, 6: -1.5}
        with pytest.raises(ParameterError, match="logit_bias must map"):
            SamplingParams.from_optional(logit_bias={"x": 1})

    def test_a_clone_shares_nothing_unless_it_may(self) -> None:
        params = SamplingParams(stop=["a"], extra_args={"x": [1]})
        assert params.clone() == params
        params.clone().extra_args["x"].append(2)
        assert params.extra_args == {"x": [1]}
        assert params.replace(skip_clone=True).clone().stop is params.stop

    @pytest.mark.parametrize(
        ("values", "name"),
        [
            ({"watermarking": True}, "watermarking"),
            ({"routed_experts_prompt_start": 3}, "routed_experts_prompt_start"),
            ({"trace_decode_token_ids": [3]}, "trace_decode_token_ids"),
            ({"prompt_logprob_start": 3}, "prompt_logprob_start"),
            ({"prompt_logprob_token_ids": [[]]}, "prompt_logprob_token_ids"),
            ({"prompt_logprob_token_ids": [3]}, "prompt_logprob_token_ids"),
            ({"prompt_logprobs": 3, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
        ],
    )
    def test_what_cannot_be_had_is_named(self, values: dict, name: str) -> None:
        with pytest.raises(ParameterError, match=name) as caught:
            SamplingParams(**values)
        assert caught.value.param == name
        SamplingParams(watermarking=False, routed_experts_prompt_start=0, trace_decode_token_ids=None)
