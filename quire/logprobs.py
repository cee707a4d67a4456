"""Log-probabilities, where vLLM's programs import them."""

from quire.frontend.outputs import FlatLogprobs, Logprob, PromptLogprobs, SampleLogprobs

__all__ = ["FlatLogprobs", "Logprob", "PromptLogprobs", "SampleLogprobs"]
