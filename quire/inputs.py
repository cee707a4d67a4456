"""Forms of prompts, where vLLM's programs import them."""

from quire.frontend.requests.prompt import EmbedsPrompt, ExplicitEncoderDecoderPrompt, TextPrompt, TokensPrompt
from quire.frontend.requests.prompt import PromptLike as PromptType

__all__ = ["EmbedsPrompt", "ExplicitEncoderDecoderPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
