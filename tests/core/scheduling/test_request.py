"""A request counts its known tokens, its computed tokens, and its tokens in flight."""

from msgspec.structs import replace

from quire.core.scheduling.request import RequestStatus
from quire.core.wire.protocol import EngineRequest
from tests.core.scheduling.fake_worker import make_request, scheduled


def test_a_resumed_request_knows_its_outputs_but_not_as_prompt() -> None:
    request = scheduled(make_request("a", [1, 2, 3], output=[4, 5]))
    assert [request.known_tokens(start, 5) for start in (0, 2, 3, 4)] == [[1, 2, 3, 4, 5], [3, 4, 5], [4, 5], [5]]
    assert request.known_tokens(1, 3) == [2, 3]
    assert (request.num_prompt_tokens, request.num_known_tokens, request.num_tokens) == (3, 5, 5)
    assert (request.status, request.queued_at, request.num_planned_tokens) == (RequestStatus.WAITING, 2.5, 0)


def test_placeholders_are_tokens_that_are_counted_but_not_known() -> None:
    request = scheduled(make_request("a", 3))
    request.num_tokens += 2
    assert request.num_placeholders == 2
    request.output_token_ids.append(7)
    assert (request.num_placeholders, request.num_known_tokens) == (1, 4)


def test_the_wire_request_is_left_as_it_was() -> None:
    def wire() -> EngineRequest:
        made = make_request("a", [1, 2], output=[3], prompt_logprobs=1)
        return replace(made, sequences=[replace(made.sequences[0], scores_prompt=False)])

    given = wire()
    request = scheduled(given)
    request.output_token_ids.append(4)
    assert request.sampling.prompt_logprobs is None
    assert given == wire()
