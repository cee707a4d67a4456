"""A request counts what is known, what is computed, and what is in flight."""

from quire.core.scheduling.request import Request, RequestStatus
from tests.core.scheduling.fake_worker import make_request


def test_a_resumed_request_knows_its_outputs_but_not_as_prompt() -> None:
    wire = make_request("a", [1, 2, 3], output=[4, 5])
    request = Request(wire, priority_key=(0,), max_num_tokens=9, stop_ids=frozenset(), queued_at=2.5)
    assert request.token_ids == [1, 2, 3, 4, 5]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 2, 5)
    assert (request.status, request.queued_at, request.num_planned_tokens) == (RequestStatus.WAITING, 2.5, 0)


def test_placeholders_are_tokens_that_are_counted_but_not_known() -> None:
    request = Request(make_request("a", 3), priority_key=(0,), max_num_tokens=9, stop_ids=frozenset(), queued_at=0.0)
    request.num_tokens += 2
    assert request.num_placeholders == 2
    request.token_ids.append(7)
    assert (request.num_placeholders, request.num_output_tokens) == (1, 1)


def test_the_wire_request_is_left_as_it_was() -> None:
    wire = make_request("a", [1, 2], output=[3])
    request = Request(wire, priority_key=(0,), max_num_tokens=9, stop_ids=frozenset(), queued_at=0.0)
    request.token_ids.append(4)
    assert (wire.prompt_token_ids, wire.output_token_ids) == ([1, 2], [3])
