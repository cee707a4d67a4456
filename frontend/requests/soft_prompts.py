"""Soft prompts: embeddings that were trained to stand before prompts (prompt tuning, arXiv:2104.08691; P-tuning,
arXiv:2103.10385), as PEFT saves them."""

from pathlib import Path

from quire.core.errors import ParameterError
from quire.core.wire.adapters import WEIGHTS_NAMES
from quire.core.wire.protocol import PromptEmbeds
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.requests.prompt import Prompt, ReadEmbeds

SOFT_PROMPTS = ("PROMPT_TUNING", "P_TUNING")
"""PEFT's names of the types of adapters that are soft prompts."""


class SoftPrompts:
    """Reads soft prompts for one model.

    Args:
        read: reads embeddings as they come in requests.
        longest: rows of a soft prompt at most.
    """

    def __init__(self, read: ReadEmbeds, longest: int) -> None:
        self._read = read
        self._longest = longest

    def read(self, name: str, folder: Path) -> PromptEmbeds:
        """Reads the soft prompt in an adapter's folder.

        Raises:
            ParameterError: it is stored otherwise than PEFT does, has another width or too many rows.
        """
        path = folder / WEIGHTS_NAMES[0]
        if not path.is_file():
            raise ParameterError(
                f"The soft prompt {name!r} has no {path.name}; save it with safe_serialization.", param="lora_path"
            )
        try:
            embeds, _ = self._read(path.read_bytes(), self._longest + 1)
        except OSError as error:
            raise ParameterError(f"The soft prompt {name!r} cannot be read: {error}.", param="lora_path") from None
        except ParameterError as error:
            why = str(error).removeprefix("prompt_embeds ")
            raise ParameterError(f"The file {path.name} of the soft prompt {name!r} {why}", param="lora_path") from None
        return embeds


def check_soft_prompt(prompt: Prompt, sampling: SamplingParams) -> None:
    """Refuses what does not go with a soft prompt.

    Raises:
        ParameterError: the field, by name.
    """
    if prompt.encoder is not None:
        raise ParameterError(
            "Soft prompts are served for decoders, and this model has an encoder; leave the adapter out.", param="model"
        )
    if prompt.embeds is not None or prompt.media:
        raise ParameterError(
            "A soft prompt stands before text or token ids; leave prompt_embeds, images and sounds out.", param="prompt"
        )
    if sampling.scores_prompt:
        raise ParameterError(
            "prompt_logprobs and prompt_logprob_token_ids are not served behind a soft prompt, whose rows have no ids; "
            "leave one out.",
            param="prompt_logprobs",
        )
