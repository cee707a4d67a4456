"""The routing of experts: the products of all tokens with the router, and then the best experts of each token."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.routing import ExpertRouter
from quire.ops.triton.activations import softplus
from quire.ops.triton.launch import Kernel
from quire.ops.triton.variants import Variant


class LogitTiles(NamedTuple):
    """The tiles of the product of tokens with a router.

    A program multiplies `BLOCK_EXPERTS` experts, the rows of the tensor cores' product, with `BLOCK_TOKENS` tokens, in
    one part of the inputs. Parts give enough programs to read the router at once, and the next kernel adds their sums
    in passing. `PART` is constant, so the order of a sum does not depend on the number of tokens.
    """

    BLOCK_EXPERTS: int
    BLOCK_TOKENS: int
    BLOCK_IN: int
    PART: int
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        """The kernel's constants among them."""
        names = ("BLOCK_EXPERTS", "BLOCK_TOKENS", "BLOCK_IN", "PART")
        return {name: getattr(self, name) for name in names}


def choose_logit_tiles(num_tokens: int, form: str, *, is_even: bool) -> LogitTiles:
    """Chooses the tiles: more tokens at a time where there are more, unless loads of single numbers take the registers.

    Products of float32 are sums of a thread's own products, whose operands lie in its registers: they get small tiles.
    """
    if form == "float32":
        return LogitTiles(16, 16, 32, 256, 4, 2)
    return LogitTiles(64, 64 if num_tokens > 64 and is_even else 16, 64, 256, 4, 4)


@Kernel
def multiply_router(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    num_experts,
    in_features,
    x_stride,
    FORM: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PART: tl.constexpr,
):
    """Products of one part of the inputs: `out_ptr` [parts, num_tokens, num_experts] float32.

    The grid is (blocks of tokens, blocks of experts, parts). `FORM` is "same" for operands of one dtype with 16 bits;
    "split" for float32 weights and bfloat16 tokens, where a weight is the sum of three bfloat16, exactly; "float32" for
    float32 weights and float16 tokens. `IS_EVEN`: inputs are a multiple of 64, and rows are aligned.
    """
    if IS_EVEN:
        in_features, x_stride = in_features // 64 * 64, x_stride // 8 * 8  # tells the compiler, and changes nothing
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    experts = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    first = tl.program_id(2) * PART
    inputs = tl.arange(0, BLOCK_IN)
    weights = weight_ptr + tl.minimum(experts, num_experts - 1)[:, None] * in_features + inputs[None, :]
    values = x_ptr + tl.minimum(tokens, num_tokens - 1).to(tl.int64)[None, :] * x_stride + inputs[:, None]
    total = tl.zeros((BLOCK_EXPERTS, BLOCK_TOKENS), tl.float32)
    for at in range(first, tl.minimum(first + PART, in_features), BLOCK_IN):
        if IS_EVEN:
            weight, x = tl.load(weights + at), tl.load(values + at)
        else:
            known = at + inputs < in_features
            weight = tl.load(weights + at, mask=known[None, :], other=0.0)
            x = tl.load(values + at, mask=known[:, None], other=0.0)
        if FORM == "split":
            high = weight.to(tl.bfloat16)
            rest = weight - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(low, x, total)
            total = tl.dot(middle, x, total)
            total = tl.dot(high, x, total)
        elif FORM == "same":
            total = tl.dot(weight, x, total)
        else:
            total = tl.dot(weight.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
    places = out_ptr + (tl.program_id(2).to(tl.int64) * num_tokens + tokens[None, :]) * num_experts + experts[:, None]
    tl.store(places, total, mask=(experts < num_experts)[:, None] & (tokens < num_tokens)[None, :])


_TAKEN = tl.constexpr(float("-inf"))
_OUT = tl.constexpr(-3.3e38)
_LEAST = tl.constexpr(-3.2e38)


@Kernel
def select_experts(
    logits_ptr,
    bias_ptr,
    correction_ptr,
    shares_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    num_experts,
    num_parts,
    top_k,
    num_groups,
    top_groups,
    group_best,
    floor,
    scale,
    distance,
    SCORE: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """The experts of one token, and their weights, as `Routing` describes them. Of equal experts, the first is chosen.

    `logits_ptr` is [num_parts, num_tokens, num_experts], which are summed in order. `GROUPS`, `GROUP` and `CHOSEN` are
    the powers of two from the groups, their experts, and `top_k` on.
    """
    token = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    group_size = num_experts // num_groups
    experts = groups[:, None] * group_size + members[None, :]
    is_there = (groups < num_groups)[:, None] & (members < group_size)[None, :]
    logits = tl.zeros((GROUPS, GROUP), tl.float32)
    for part in range(num_parts):
        sums = logits_ptr + (part * num_tokens + token) * num_experts
        logits += tl.load(sums + experts, mask=is_there, other=0.0)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + experts, mask=is_there, other=0.0).to(tl.float32)
    scores = _scores(logits, is_there, SCORE)
    choice = scores
    if correction_ptr is not None:
        choice += tl.load(correction_ptr + experts, mask=is_there, other=0.0).to(tl.float32)
    choice = tl.where(choice != choice, float("inf"), choice)  # NaN is the greatest
    choice = tl.where(is_there, tl.maximum(choice, _LEAST), _TAKEN)
    if HAS_GROUPS:
        choice = _within_best_groups(choice, groups, num_groups, top_groups, group_best, members, GROUP)
    places = tl.arange(0, CHOSEN)
    ids, weights = tl.zeros((CHOSEN,), tl.int32), tl.zeros((CHOSEN,), tl.float32)
    for place in range(top_k):
        best = tl.max(tl.max(choice, axis=1), axis=0)
        chosen = _least(tl.where((choice == best) & is_there, experts, num_experts))
        is_chosen = experts == chosen
        if SCORE == "sparse_mixer":
            weight = _near_share(logits, (choice != _TAKEN) & is_there, is_chosen, distance)
        else:
            weight = _sum(tl.where(is_chosen & is_there, scores, 0.0))
        choice = tl.where(is_chosen, _TAKEN, choice)
        ids = tl.where(places == place, chosen, ids)
        weights = tl.where(places == place, weight, weights)
    if RENORMALIZES:
        total = tl.sum(weights, axis=0)
        weights = weights / tl.where(total < floor, floor, total)
    weights = weights * scale
    known = places < top_k
    if shares_ptr is not None:
        weights *= tl.load(shares_ptr + ids, mask=known, other=0.0).to(tl.float32)
    tl.store(ids_ptr + token * top_k + places, ids.to(tl.int64), mask=known)
    tl.store(weights_ptr + token * top_k + places, weights, mask=known)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _least(x):
    return tl.min(tl.min(x, axis=1), axis=0)


@triton.jit
def _scores(logits, is_there, SCORE: tl.constexpr):
    if SCORE == "softmax":
        most = tl.max(tl.max(tl.where(is_there, logits, float("-inf")), axis=1), axis=0)
        shares = tl.where(is_there, tl.exp(logits - most), 0.0)
        return shares / _sum(shares)
    elif SCORE == "sigmoid":
        return tl.sigmoid(logits)
    elif SCORE == "sqrt_softplus":
        return tl.sqrt(softplus(logits))
    else:
        tl.static_assert(SCORE == "sparse_mixer")
        return logits


@triton.jit
def _near_share(logits, is_left, is_chosen, distance):
    """The share of the chosen expert among those that are left and near; see `quire.ops.routing.Score`."""
    most = _sum(tl.where(is_chosen & is_left, logits, 0.0))
    is_far = (most - logits) / tl.maximum(tl.abs(logits), most) > distance
    return 1.0 / _sum(tl.where(is_left & ((is_far == 0) | is_chosen), tl.exp(logits - most), 0.0))


@triton.jit
def _within_best_groups(choice, groups, num_groups, top_groups, group_best, members, GROUP: tl.constexpr):
    """`choice` [GROUPS, GROUP], with `_OUT` for experts outside the best groups."""
    left = choice
    scores = tl.zeros_like(tl.max(choice, axis=1))
    for _ in range(group_best):
        best = tl.max(left, axis=1)
        scores += best
        first = tl.min(tl.where(left == best[:, None], members[None, :], GROUP), axis=1)
        left = tl.where(members[None, :] == first[:, None], _TAKEN, left)
    scores = tl.where(groups < num_groups, tl.maximum(scores, _LEAST), _TAKEN)
    is_in = groups < 0
    for _ in range(top_groups):
        first = tl.min(tl.where(scores == tl.max(scores, axis=0), groups, num_groups), axis=0)
        is_in = is_in | (groups == first)
        scores = tl.where(groups == first, _TAKEN, scores)
    return tl.where(is_in[:, None] | (choice == _TAKEN), choice, _OUT)


def variants() -> Iterator[Variant]:
    """The forms for routers that most mixtures of experts have."""
    sizes = dict.fromkeys(("num_tokens", "num_experts", "in_features", "x_stride"), "i32")
    for (form, weight), num_tokens in product((("same", "*bf16"), ("split", "*fp32")), (1, 128)):
        tiles = choose_logit_tiles(num_tokens, form, is_even=True)
        types = sizes | {"x_ptr": "*bf16", "weight_ptr": weight, "out_ptr": "*fp32"}
        constants = {"FORM": form, "IS_EVEN": True, **tiles.constants()}
        yield Variant(multiply_router, types, constants, tiles.num_warps, tiles.num_stages, "half a router at once")
    scalars = ("num_tokens", "num_experts", "num_parts", "top_k", "num_groups", "top_groups", "group_best")
    types = dict.fromkeys(scalars, "i32") | dict.fromkeys(("floor", "scale", "distance"), "fp32")
    types |= {"logits_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32"}
    absent = {"bias_ptr": None, "shares_ptr": None}
    for size, chosen in ((8, 2), (32, 4), (64, 8), (128, 8), (256, 8), (512, 16)):
        constants = absent | {"correction_ptr": None, "SCORE": "softmax", "RENORMALIZES": True, "HAS_GROUPS": False}
        constants |= {"GROUPS": 1, "GROUP": size, "CHOSEN": chosen}
        yield Variant(select_experts, types, constants, _num_warps(size), 3, "eight experts a thread, or fewer")
    for groups, size in ((1, 128), (1, 256), (8, 32)):
        constants = absent | {"SCORE": "sigmoid", "RENORMALIZES": True, "HAS_GROUPS": groups > 1}
        constants |= {"GROUPS": groups, "GROUP": size, "CHOSEN": 8}
        corrected = types | {"correction_ptr": "*fp32"}
        yield Variant(select_experts, corrected, constants, _num_warps(groups * size), 3, "as with softmax")


def _num_warps(num_experts: int) -> int:
    return 1 if num_experts <= 256 else 4


def covers(x: Tensor, router: ExpertRouter) -> bool:
    """Returns True if the kernels route `x`."""
    return x.dtype in (torch.bfloat16, torch.float16) and router.weight.dtype in (x.dtype, torch.float32)


def route(x: Tensor, router: ExpertRouter) -> tuple[Tensor, Tensor]:
    """Runs `Backend.route`."""
    routing, weight = router.routing, router.weight.contiguous()
    num_tokens, num_experts = len(x), len(weight)
    ids = torch.empty(num_tokens, routing.top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(num_tokens, routing.top_k, dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return ids, weights
    logits = logits_in_parts(x if x.stride(1) == 1 else x.contiguous(), weight)
    groups = routing.num_groups if routing.num_groups > routing.top_groups else 1
    select_experts(
        (num_tokens,), logits, router.bias, router.correction, router.shares, ids, weights, num_tokens, num_experts,
        len(logits), routing.top_k, groups, routing.top_groups, routing.group_best, routing.floor, routing.scale,
        routing.distance, SCORE=routing.score, RENORMALIZES=routing.renormalize, HAS_GROUPS=groups > 1,
        GROUPS=triton.next_power_of_2(groups), GROUP=triton.next_power_of_2(num_experts // groups),
        CHOSEN=triton.next_power_of_2(routing.top_k), num_warps=_num_warps(num_experts),
    )  # fmt: skip
    return ids, weights


def logits_in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Computes the products of one part of the inputs after another: [parts, num_tokens, num_experts]."""
    num_tokens, (num_experts, in_features) = len(x), weight.shape
    form = "same" if x.dtype == weight.dtype else "split" if x.dtype == torch.bfloat16 else "float32"
    is_even = in_features % 64 == 0 and x.stride(0) % 8 == 0
    tiles = choose_logit_tiles(num_tokens, form, is_even=is_even)
    parts = triton.cdiv(in_features, tiles.PART)
    out = torch.empty(parts, num_tokens, num_experts, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(num_tokens, tiles.BLOCK_TOKENS), triton.cdiv(num_experts, tiles.BLOCK_EXPERTS), parts
    multiply_router(
        grid, x, weight, out, num_tokens, num_experts, in_features, x.stride(0), FORM=form,
        IS_EVEN=is_even, **tiles._asdict(),
    )  # fmt: skip
    return out
