"""What an entrance says of a request arrives where it is used."""

from typing import Any

import msgspec
import numpy as np
import pytest

from quire.core.errors import ParameterError
from quire.core.wire.protocol import PromptEmbeds
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.keys.caller import Caller
from quire.frontend.keys.rate_limits import RateLimits
from quire.frontend.offline.arguments import prompts_of
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.deadline import Deadline
from quire.frontend.requests.prompt import Prompt, split_prompt
from quire.frontend.requests.submission import Submission
from quire.frontend.text.truncation import Truncation
from quire.lora.request import LoRARequest

CALLER = Caller(
    "ann",
    weight=1.0,
    requests_per_minute=None,
    tokens_per_minute=None,
    limits=RateLimits(),
    count=lambda *_: None,
    is_alone=False,
)
SAID = {
    "priority": 3,
    "cache_salt": "salt",
    "add_special_tokens": False,
    "truncation": Truncation(5),
    "fit_context": True,
    "grammar_is_whole": True,
    "arrival_time": 1.5,
    "data_parallel_rank": 2,
    "caller": CALLER,
    "deadline": Deadline(9.5, 2.0),
    "adapter": "mine",
    "adapter_start": 1,
    "soft_prompt": PromptEmbeds("float32", b"", b""),
    "lora_request": LoRARequest("mine", 1, "/folder"),
    "prediction": [1, 2],
}


def test_resolving_keeps_what_the_entrance_said() -> None:
    assert SAID.keys() | {"prompt", "params", "request_id"} == set(Submission.__struct_fields__), "all are tried"
    given = Submission("Hello", None, "id", **SAID)
    prompt, params = Prompt("Hello", [1, 2]), SamplingParams(max_tokens=3)
    assert msgspec.structs.asdict(given.resolved(prompt, params)) == {
        **SAID,
        "prompt": prompt,
        "params": params,
        "request_id": "id",
    }
    assert given.resolved(prompt, params, "id-0").request_id == "id-0"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"request_id": 5}, "request_id"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"arrival_time": "now"}, "arrival_time"),
    ],
)
def test_wrong_fields_are_named(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Submission("Hello", None, **{"request_id": "id", **wrong}).check()
    assert caught.value.param == param


def test_prompts_and_beams_of_numpy_are_pythons() -> None:
    ids = np.array([5, 6])
    for prompt in (ids, list(ids), {"prompt_token_ids": ids}):
        assert split_prompt(prompt) == (None, [5, 6], None)  # type: ignore[arg-type]
    assert prompts_of(ids) == prompts_of(list(ids)) == [[5, 6]]  # type: ignore[arg-type]
    beams = BeamSearchParams(np.int64(2), np.int64(3))  # type: ignore[arg-type]
    assert (type(beams.beam_width), beams.max_tokens) == (int, 3)
