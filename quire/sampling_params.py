"""Parameters of requests, where vLLM's programs import them."""

from quire.core.wire.repetition import RepetitionDetection as RepetitionDetectionParams
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.core.wire.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from quire.frontend.requests.beam_params import BeamSearchParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
