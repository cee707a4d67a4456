"""The names of tensors in GGUF files, and the changes that llama.cpp's converter makes to some of them."""

import re
from collections.abc import Container

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.weights.names import halves_apart

_MEMBER_OF_STACK = re.compile(r"(.*\.(?:experts|altup_(?:unembed_)?projections))\.(\d+)(\..*)")
_MEMBER = re.compile(r"(_exps|altup_proj|altup_unembd_proj)\.\d+")
_ROTATED = re.compile(r"self_attn\.[qk]_proj\.")
_NORM = re.compile(r"(?<!linear_attn\.)norm\.weight$")
_OTHER_NAMES = tuple(
    (re.compile(known), used)
    for known, used in (
        (r"e_score_correction_bias$", "e_score_correction.bias"),
        (r"(\.sinks|\.correct_output_scale|\.layer_scalar)$", r"\1.weight"),
        (r"\.expert_bias$", ".expert_bias.bias"),
        (r"^model\.(layers\.\d+\.feed_forward\.experts\.\d+\.w[123]\.)", r"\1"),
        (r"^backbone\.layers\.(\d+)\.mixer\.experts\.", r"model.layers.\1.mlp.experts."),
    )
)
"""A tensor's name on the hub, and its name in `gguf`'s table."""
_UNLISTED = tuple(
    (re.compile(rf".*\.layers\.(\d+)\.{known}"), used)
    for known, used in (
        (r"self_attn\.([qkv])_proj\.(weight|bias)", r"blk.\1.attn_\2.\3"),  # of fused tensors
        (r".*\.dt_bias", r"blk.\1.ssm_dt.bias"),
        (r".*\.A_log", r"blk.\1.ssm_a"),
        (r".*\.D", r"blk.\1.ssm_d"),
        (r"mlp\.act_fn\.(alpha_p|alpha_n|beta|eps)", r"blk.\1.xielu_\2"),
        (r"router\.scale", r"blk.\1.ffn_gate_inp.scale"),
        (r"router\.per_expert_scale", r"blk.\1.ffn_down_exps.scale"),
    )
)
"""Names on the hub that the table lacks, and their names in files."""
_TURNS_NEIGHBOURS = (
    "llama", "mistral3", "internlm2", "arcee", "olmo", "granite", "granitemoe", "granitehybrid", "minicpm",
    "smollm3", "deepseek", "bailingmoe",
)  # fmt: skip
"""Architectures whose files have the rows of queries and keys in another order than the hub."""
_PARTS_APART = ("bloom",)
"""Architectures whose files have all queries, then all keys, then all values; the hub has them by head."""
_FUSED = re.compile(r"query_key_value\.")
_ADDS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")
"""Architectures whose files have 1 added to the weights of norms."""


class GgufNames:
    """Maps names by the table of llama.cpp's own converter, in the `gguf` package."""

    @classmethod
    def of(cls, spec: ModelSpec, architecture: str) -> "GgufNames":
        """Returns the names in a file with the model of `spec`, with those of layers that predict further tokens."""
        num_layers = spec.num_layers + (spec.hf_config.get("num_nextn_predict_layers") or 0)
        return cls(architecture, num_layers, spec.head_dim)

    def __init__(self, architecture: str, num_layers: int, head_dim: int) -> None:
        import gguf  # optional, and only such files need it

        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        self._map = gguf.get_tensor_name_map(kind, num_layers)
        self._head_dim = head_dim
        self._turns_neighbours = architecture in _TURNS_NEIGHBOURS
        self._has_parts_apart = architecture in _PARTS_APART
        self._adds_one = architecture in _ADDS_ONE

    def find(self, name: str, present: Container[str]) -> str | None:
        stored = self.stored_name(name)
        return stored if stored is not None and stored in present else None

    def stored_name(self, name: str) -> str | None:
        """Returns the name in files of the model's `name`. A member of a stack has its index before the last dot."""
        for known, used in _UNLISTED:
            if match := known.fullmatch(name):
                return match.expand(used)
        for known, used in _OTHER_NAMES:
            name = known.sub(used, name)
        member = _MEMBER_OF_STACK.fullmatch(name)
        whole = name if member is None else member[1] + member[3]
        names = (self._map.get_name(each, (".weight", ".bias")) for each in (whole, whole.removeprefix("transformer.")))
        stored = next((each for each in names if each is not None), None)
        if stored is None or member is None:
            return stored
        stem, _, kind = stored.rpartition(".")
        return f"{stem}.{member[2]}.{kind}"

    def arrange(self, name: str, tensor: Tensor) -> Tensor:
        """Undoes the converter's changes to a tensor. It may be uint8: the bytes of each row's blocks."""
        if self._turns_neighbours and _ROTATED.search(name):
            return halves_apart(tensor, self._head_dim)
        if self.mixes_rows(name):
            return tensor.unflatten(0, (3, -1, self._head_dim)).transpose(0, 1).flatten(0, 2)
        if self._adds_one and _NORM.search(name):
            return tensor - 1
        if name.endswith(".A_log"):  # files have -exp of it
            return tensor.neg().log()
        return tensor

    def mixes_rows(self, name: str) -> bool:
        return self._has_parts_apart and _FUSED.search(name) is not None


def whole_stack(stored: str) -> str:
    """Returns the name of the stack that holds the member `stored`; other names are returned unchanged."""
    return _MEMBER.sub(r"\1", stored)


GATES, UPS, BOTH = "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"
"""Stacks of experts' gates and ups, and the joint stack that may replace them: an expert's gate, then its up."""


def stack_of_both(stored: str) -> str:
    """Returns the name of the joint stack that a file may have in place of the stack `stored`."""
    return stored.replace(GATES, BOTH).replace(UPS, BOTH)
