"""Every option of the batch runner, declared once, as in `core/config/`."""

from typing import Annotated

from msgspec import Meta, Struct

from quire.core.config.types import Positive
from quire.frontend.chat.config import ChatConfig

ANSWER_OPTIONS = [
    *ChatConfig.__struct_fields__,
    *("response_role", "strict_fields", "return_tokens_as_token_ids", "fingerprint_mode", "fingerprint_value"),
    *("enable_prompt_tokens_details", "max_log_len", "enable_log_outputs", "enable_log_deltas"),
]
"""Options of the server that shape answers and their log, so that they hold for a batch as well."""


class BatchConfig(Struct, frozen=True, kw_only=True):
    """The JSONL file of requests, and where its answers go."""

    input_file: Annotated[
        str,
        Meta(description="Requests in OpenAI's batch format: a file or an http(s) URL.", extra={"aliases": ["-i"]}),
    ]
    output_file: Annotated[
        str,
        Meta(
            description="File for the answers, one line each; or an http(s) URL to PUT them to.",
            extra={"aliases": ["-o"]},
        ),
    ]
    resume: Annotated[
        bool,
        Meta(description="Keep the good answers that the output file already has, and run all other requests."),
    ] = False
    overwrite: Annotated[bool, Meta(description="Replace an output file that exists.")] = False
    max_in_flight: Annotated[
        Positive | None, Meta(description="Most requests in the engine at once; twice --max-num-seqs when unset.")
    ] = None
