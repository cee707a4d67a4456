"""Notices a device that computes nothing usable any more.

A request with values that are NaN or infinite is tried again from its start, and then fails by itself, because its own
prompt may be the reason. If the values of all requests are unusable, the device or the weights may be at fault: then
none of the requests to come would succeed either. A probe tells: a prompt that was fine before. Until it has run,
failures are kept back, because those requests may succeed elsewhere.

Numbers that come from outside may be the reason as well, for as many requests as there are. So all requests with the
same adapter count as one, and so do all with `prompt_embeds`.
"""

from collections.abc import Collection

from quire.core.errors import EngineError
from quire.core.scheduling.in_flight import StepInFlight
from quire.core.scheduling.probe import PROBE_ID, Probes
from quire.core.scheduling.request import Request, RequestStatus
from quire.core.wire.protocol import EngineRequest, RequestDelta, StepResult
from quire.core.wire.request_ids import reply_id_of
from quire.core.wire.row_outputs import HiddenStates, PooledVector, RequestFailure

NUM_TOGETHER = 3
"""Suspects that fail in one step, after they or others have failed in a step before."""
NUM_IN_TURN = 8
"""Suspects that fail one after another; a client may repeat a few of its own requests."""
_EMBEDS = b"prompt_embeds"


class UsableValues:
    """Counts what may be the reason for the failures since the last usable value: requests, adapters, embeddings.

    Args:
        eos_token_ids: of the model, which knows them.
    """

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._failed: set[str | bytes] = set()
        self._num_steps = 0
        self._probes = Probes(eos_token_ids)
        self._wanted: EngineRequest | None = None  # a probe that has not been taken yet
        self._is_probing = False
        self._kept_back: list[RequestDelta] = []

    def check(self, step: StepInFlight, result: StepResult) -> None:
        """Takes in the result of a step, before its requests end.

        Raises:
            EngineError: the device computes nothing usable. The requests of this step may succeed elsewhere.
        """
        if not result.outputs:  # the usual case
            if result.token_ids:
                self._forget()
            for request in step.prefilled:
                self._probes.add(request)
            return
        failed, is_usable = _judge(step, result)
        if PROBE_ID in failed and self._is_probing and not is_usable:
            raise EngineError(
                f"The model's values were NaN or infinite for each of the last {len(self._failed)} requests, and then "
                f"for {self._probes.description}: the device or the weights are at fault."
            )
        if is_usable:
            self._forget()
            for request in step.prefilled:
                if request.status is not RequestStatus.FINISHED and request.request_id not in failed:
                    self._probes.add(request)
        elif not self._is_probing and (requests := [each for each in failed.values() if each.request_id != PROBE_ID]):
            self._suspect(requests)

    def keep_back(self, deltas: list[RequestDelta]) -> list[RequestDelta]:
        """Returns the deltas that may be delivered: those of a step, and earlier ones once the device is acquitted.
        Those of a probe are nobody's."""
        if self._is_probing:
            self._kept_back += [delta for delta in deltas if _may_pass(delta)]
            return [delta for delta in deltas if not _may_pass(delta) and delta.request_id != PROBE_ID]
        if self._kept_back:
            deltas = self._kept_back + deltas
            self._kept_back = []
        if self._probes.num_made:
            return [delta for delta in deltas if delta.request_id != PROBE_ID]
        return deltas

    def take_probe(self) -> EngineRequest | None:
        """A request that shall run now, before all others; None: no doubt has arisen since the last call."""
        wanted, self._wanted = self._wanted, None
        return wanted

    def _suspect(self, requests: list[Request]) -> None:
        """Counts requests that have failed in a step without any usable value."""
        suspects = {_suspect(request) for request in requests}
        self._num_steps += 1
        self._failed |= suspects
        is_doubtful = len(suspects) >= NUM_TOGETHER and self._num_steps > 1
        if not is_doubtful and len(self._failed) < NUM_IN_TURN:
            return
        self._wanted = self._probes.make(requests[0])
        self._is_probing = True
        if self._wanted is None:
            raise EngineError(
                f"The model's values were NaN or infinite for each of the last {len(self._failed)} requests: the "
                "device or the weights are at fault."
            )

    def _forget(self) -> None:
        self._failed.clear()
        self._num_steps = 0
        self._is_probing = False


def _judge(step: StepInFlight, result: StepResult) -> tuple[dict[str, Request], bool]:
    """The requests of a step with unusable values, by id, and whether another request got anything of the step."""
    failed: dict[str, Request] = {}
    without: set[str] = set()  # any values, for reasons of their own
    is_usable = False
    for row, output in result.outputs:
        request = step.request_of(row)
        if request.status is RequestStatus.FINISHED:  # it failed in the step before
            continue
        if isinstance(output, RequestFailure) and output.may_pass:
            failed[request.request_id] = request
        elif isinstance(output, RequestFailure) and output.kind == "internal":
            without.add(request.request_id)
            is_usable = is_usable or request.request_id == PROBE_ID  # it has told nothing, and shall not be waited for
        elif isinstance(output, PooledVector | HiddenStates):
            is_usable = True
    is_usable = is_usable or any(
        request.status is not RequestStatus.FINISHED
        and request.request_id not in failed
        and request.request_id not in without
        for request in step.requests
    )
    return failed, is_usable


def _suspect(request: Request) -> str | bytes:
    """What may be the reason for a request's unusable values, if the device is not."""
    if request.adapter is not None:
        return request.adapter.digest
    return _EMBEDS if request.prompt.embeds is not None else reply_id_of(request.request_id)


def _may_pass(delta: RequestDelta) -> bool:
    return delta.failure is not None and delta.failure.may_pass
