"""An output ends at the same token, whether its tokens come one by one or several at once."""

import random

import pytest

from quire.core.scheduling.stop_conditions import End, StopConditions
from quire.core.wire.protocol import FinishReason
from quire.core.wire.repetition import RepetitionDetection
from tests.core.scheduling.fake_worker import make_request, scheduled

EOS, STOP = 2, 17
PROMPT = [9, 9, 9]


def look_at(tokens: list[int], **sampling) -> tuple[End | None, list[int], list[int]]:
    """(the end found when `tokens` come at once, the tokens kept, all of the request's tokens)."""
    wire = make_request("a", PROMPT, **{"max_tokens": 50, "ignore_eos": False} | sampling)
    ends = StopConditions([EOS])
    max_num_tokens = len(PROMPT) + (wire.sampling.max_tokens or 0)
    request = scheduled(wire, max_num_tokens=max_num_tokens, stop_ids=ends.stop_ids(wire.sampling))
    tokens = list(tokens)
    request.output_token_ids += tokens
    return ends.first(request, tokens), tokens, request.known_tokens(0, request.num_known_tokens)


def test_what_comes_after_an_end_is_dropped() -> None:
    end, tokens, known = look_at([5, STOP, 6, EOS], stop_token_ids=[STOP])
    assert end == End(FinishReason.STOP, STOP)
    assert (tokens, known) == ([5, STOP], [*PROMPT, 5, STOP])


def test_tokens_without_an_end_stay() -> None:
    end, tokens, known = look_at([5, EOS, 6], ignore_eos=True)
    assert end is None
    assert (tokens, known) == ([5, EOS, 6], [*PROMPT, 5, EOS, 6])


def test_eos_is_not_named_unless_it_is_a_stop_token_too() -> None:
    assert look_at([EOS])[0] == End(FinishReason.STOP, None)
    assert look_at([EOS], ignore_eos=True, stop_token_ids=[EOS])[0] == End(FinishReason.STOP, EOS)


def test_stop_tokens_before_min_tokens_are_passed_over() -> None:
    end, tokens, _ = look_at([EOS, EOS, 5, EOS, 6], min_tokens=4)
    assert (end, tokens) == (End(FinishReason.STOP), [EOS, EOS, 5, EOS])


def test_the_length_ends_a_list_and_a_stop_at_that_token_is_a_stop() -> None:
    assert look_at([5, 6, 7], max_tokens=2)[:2] == (End(FinishReason.LENGTH), [5, 6])
    assert look_at([5, EOS, 7], max_tokens=2)[:2] == (End(FinishReason.STOP), [5, EOS])


def test_a_repetition_in_the_middle_ends_the_list_there() -> None:
    twice = RepetitionDetection(max_pattern_size=2, min_count=2)
    end, tokens, known = look_at([5, 6, 5, 6, EOS], repetition_detection=twice)
    assert end == End(FinishReason.REPETITION)
    assert (tokens, known) == ([5, 6, 5, 6], [*PROMPT, 5, 6, 5, 6])


@pytest.mark.parametrize("seed", range(20))
def test_a_list_ends_where_its_tokens_would_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        tokens = [rng.choice([EOS, STOP, 5, 6]) for _ in range(8)]
        sampling = {
            "max_tokens": rng.randrange(1, 12),
            "min_tokens": rng.choice([0, 0, 3]),
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": rng.choice([None, [STOP]]),
            "repetition_detection": rng.choice([None, RepetitionDetection(max_pattern_size=2, min_count=2)]),
        }
        sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
        # Tokens are checked one by one, so the right answer is the first prefix that ends.
        prefixes = (look_at(tokens[:count], **sampling) for count in range(1, len(tokens) + 1))
        first = next((found for found in prefixes if found[0] is not None), (None, tokens, PROMPT + tokens))
        assert look_at(tokens, **sampling) == first
