"""A request with images has the same tokens whatever the batch, the chunks, the prefix cache or the workers."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from quire import LLM, SamplingParams
from tests.image_checkpoints import FAMILIES, make_image, write_checkpoint

pytestmark = pytest.mark.turns(4, among="whole systems")

IMAGES = [make_image(70, 45), make_image(37, 91, 1), make_image(120, 33, 2)]
NUM_TOKENS = 48


class Kind(NamedTuple):
    """A model, and what it reads."""

    family: str

    @property
    def placeholder(self) -> str:
        return FAMILIES[self.family]["placeholder"]


KINDS = {"placeholders-alone": Kind("llava"), "places-and-deep-features": Kind("qwen3_vl")}
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 400, "max_num_seqs": 16}


def prompts(kind: Kind) -> list[Any]:
    """Prompts with several items of odd sizes beside text alone; some begin with the same item."""
    one, two, three = IMAGES
    cases = [
        (("What is ", " and ", "?"), [one, two]),
        (("What is ", " and ", "?"), [one, three]),
        (("", " tell me more."), [three]),
        (("The quick brown fox jumps over the lazy dog.",), []),
        (("A prompt that begins with words and goes on: ", "", " now", " end"), [two, two, one]),
        (("What is ", " then?"), [one]),
        (("Nothing but words here, and no picture at all, for once.",), []),
    ]
    return [
        {"prompt": kind.placeholder.join(texts), "multi_modal_data": {"image": items}} if items else texts[0]
        for texts, items in cases
    ]


def params(number: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)


def run(llm: LLM, kind: Kind) -> list[Any]:
    cases = prompts(kind)
    return llm.generate(cases, [params(number) for number in range(len(cases))], use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


class Served(NamedTuple):
    """A model, and the tokens of a first pass: all requests together, nothing cached."""

    kind: Kind
    model: str
    llm: LLM
    expected: list[list[int]]


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind = KINDS[request.param]
    model = str(write_checkpoint(tmp_path_factory.mktemp("images") / kind.family, kind.family))
    with LLM(model, **OPTIONS) as llm:
        expected = tokens(run(llm, kind))
        assert len({tuple(row) for row in expected}) == len(expected), "outputs must differ to prove anything"
        yield Served(kind, model, llm, expected)


def test_alone_or_after_others(served: Served) -> None:
    again = run(served.llm, served.kind)
    assert tokens(again) == served.expected
    assert sum(output.num_cached_tokens or 0 for output in again) > 100
    served.llm.reset_prefix_cache()
    for number, prompt in enumerate(prompts(served.kind)):
        [output] = served.llm.generate(prompt, params(number), use_tqdm=False)
        assert list(output.outputs[0].token_ids) == served.expected[number]


def test_in_chunks_and_preempted(served: Served) -> None:
    few = {"max_model_len": 200, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 16}
    with LLM(served.model, **(OPTIONS | few), enable_prefix_caching=False, disable_log_stats=False) as llm:
        outputs = run(llm, served.kind)
    assert tokens(outputs) == served.expected
    if served.kind.family == "llava":  # whose prompts are long enough
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("served", ["placeholders-alone"], indirect=True)
def test_on_two_ranks(served: Served) -> None:
    more = {"max_num_batched_tokens": 48, "tensor_parallel_size": 2, "mm_encoder_tp_mode": "weights"}
    with LLM(served.model, **OPTIONS, **more) as llm:
        assert tokens(run(llm, served.kind)) == served.expected
