"""Notices a device that computes nothing usable any more.

A request with values that are NaN or infinite is tried again from its start, and then fails by itself, because its own
prompt may be the reason. If the values of all requests are unusable, the reason is the device or the weights: none of
the requests to come would succeed either.

Numbers that come from outside may be the reason as well, for as many requests as there are. So all requests with the
same adapter count as one, and so do all with `prompt_embeds`.
"""

from quire.core.errors import EngineError
from quire.core.scheduling.in_flight import StepInFlight
from quire.core.scheduling.request import Request, RequestStatus
from quire.core.wire.protocol import StepResult
from quire.core.wire.request_ids import reply_id_of
from quire.core.wire.row_outputs import HiddenStates, PooledVector, RequestFailure

NUM_TOGETHER = 3
"""Suspects that fail in one step, after they or others have failed in a step before."""
NUM_IN_TURN = 8
"""Suspects that fail one after another; a client may repeat a few of its own requests."""
_EMBEDS = b"prompt_embeds"


class UsableValues:
    """Counts what may be the reason for the failures since the last usable value: requests, adapters, embeddings."""

    def __init__(self) -> None:
        self._failed: set[str | bytes] = set()
        self._num_steps = 0

    def check(self, step: StepInFlight, result: StepResult) -> None:
        """Takes in the result of a step, before its requests end.

        Raises:
            EngineError: the device computes nothing usable. The requests of this step may succeed elsewhere.
        """
        if not result.outputs:  # the usual case
            if result.token_ids:
                self._forget()
            return
        failed, is_usable = _judge(step, result)
        if is_usable:
            self._forget()
        elif failed:
            self._num_steps += 1
            self._failed |= failed
            is_dead = len(failed) >= NUM_TOGETHER and self._num_steps > 1
            if is_dead or len(self._failed) >= NUM_IN_TURN:
                raise EngineError(
                    f"The model's values were NaN or infinite for each of the last {len(self._failed)} requests: the "
                    "device or the weights are at fault."
                )

    def _forget(self) -> None:
        self._failed.clear()
        self._num_steps = 0


def _judge(step: StepInFlight, result: StepResult) -> tuple[set[str | bytes], bool]:
    """The suspects of a step's unusable values, and whether another request got anything of the step."""
    failed: set[str] = set()
    suspects: set[str | bytes] = set()
    is_usable = False
    for row, output in result.outputs:
        request = step.request_of(row)
        if request.status is RequestStatus.FINISHED:  # it failed in the step before
            continue
        if isinstance(output, RequestFailure) and output.may_pass:
            failed.add(request.request_id)
            suspects.add(_suspect(request))
        elif isinstance(output, PooledVector | HiddenStates):
            is_usable = True
    is_usable = is_usable or any(
        request.status is not RequestStatus.FINISHED and request.request_id not in failed for request in step.requests
    )
    return suspects, is_usable


def _suspect(request: Request) -> str | bytes:
    """What may be the reason for a request's unusable values, if the device is not."""
    if request.adapter is not None:
        return request.adapter.digest
    return _EMBEDS if request.prompt.embeds is not None else reply_id_of(request.request_id)
