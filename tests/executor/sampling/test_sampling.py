"""The sampler against plain formulas and statistics. No model: logits are made up."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from quire import ops
from quire.core.config.model import LogprobsMode
from quire.core.wire.protocol import NewSlot
from quire.core.wire.sampling_params import SamplingParams, ThinkingMarks
from quire.executor.sampling.penalties import Penalties
from quire.executor.sampling.sampler import Sampled, Sampler
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.sampling.top_k_top_p import TopP
from quire.executor.step.request_table import RequestTable

VOCAB_SIZE = 50
EOS = 7


class Bench:
    """A table and a sampler whose slots hold given requests."""

    def __init__(
        self, max_num_seqs: int = 64, vocab_size: int = VOCAB_SIZE, mode: LogprobsMode = "raw_logprobs"
    ) -> None:
        self.table = RequestTable(max_num_seqs, 256, 16, torch.device("cpu"))
        self.sampler = Sampler(max_num_seqs, vocab_size, [EOS], ops=ops.bind("cpu"), logprobs_mode=mode)
        self.lengths = np.zeros(max_num_seqs, np.int64)

    def admit(self, slot: int, sampling: SamplingParams, prompt: Sequence[int] = (1, 2), output: Sequence[int] = ()):
        new = NewSlot(slot, [*prompt, *output], len(prompt), [[slot]], sampling)
        self.table.admit(new)
        self.sampler.admit(new)
        self.lengths[slot] = len(new.token_ids)
        return self

    def sample(self, logits: torch.Tensor, slots: Sequence[int]) -> Sampled:
        index = np.array(slots)
        sampled = self.sampler.sample(logits.clone(), SampleBatch(index, self.lengths[index], self.table))
        self.sampler.collect(sampled)
        return sampled

    def step(self, logits: torch.Tensor, slots: Sequence[int]) -> list[int]:
        """Samples and appends, as a decode does."""
        sampled = self.sample(logits, slots)
        index = np.array(slots)
        self.table.write(index, self.lengths[index], sampled.token_ids)
        self.lengths[index] += 1
        return sampled.token_ids.tolist()


def params(**options) -> SamplingParams:
    return SamplingParams(**{"seed": 0, "max_tokens": None, **options})


def random_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def expected_probs(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution by definition, one token at a time."""
    p = np.exp(logits.double().numpy() / temperature)
    p /= p.sum()
    if min_p:
        p[p < min_p * p.max()] = 0
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        mass = 0.0
        for token in order:
            if mass >= top_p:
                p[token] = 0
            mass += p[token]
    return p / p.sum()


# ------------------------------------------------------------------------------------------------------ distribution


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(options: dict) -> None:
    """Chi-square of 500 requests x 40 positions, with neighbouring seeds and neighbouring positions."""
    logits = random_logits(1, seed=3)
    bench = Bench(500)
    for slot in range(500):
        bench.admit(slot, params(**options, seed=slot))
    counts = np.zeros(VOCAB_SIZE)
    for _ in range(40):
        sampled = bench.sample(logits.expand(500, -1), range(500))
        counts += np.bincount(sampled.token_ids.numpy(), minlength=VOCAB_SIZE)
        bench.lengths += 1
    expected = expected_probs(logits[0], **options) * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token that was cut off was drawn"
    big = expected >= 5
    observed, expected_big = counts[big], expected[big]
    if (~big & (expected > 0)).any():
        observed = np.append(observed, counts[~big].sum())
        expected_big = np.append(expected_big, expected[~big].sum())
    assert stats.chisquare(observed, expected_big).pvalue > 1e-3


MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 10, "logprobs": 3},
    {"min_p": 0.05, "presence_penalty": 0.7},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.0},
    {"temperature": 0.5, "min_tokens": 20},
]


def test_a_token_does_not_depend_on_its_batch() -> None:
    """Each request alone, and among 35 others in another slot and order."""
    vocab_size = 2000
    logits = random_logits(36, vocab_size=vocab_size)
    options = [params(**MIXED[i % len(MIXED)], seed=i) for i in range(36)]
    together = Bench(64, vocab_size)
    slots = np.random.default_rng(0).permutation(64)[:36]
    for slot, sampling in zip(slots, options, strict=True):
        together.admit(slot, sampling, prompt=[int(slot) % 5, 9])
    steps = [together.step(logits.roll(step, -1), slots) for step in range(5)]
    for i, (slot, sampling) in enumerate(zip(slots, options, strict=True)):
        alone = Bench(1, vocab_size).admit(0, sampling, prompt=[int(slot) % 5, 9])
        tokens = [alone.step(logits[i : i + 1].roll(step, -1), [0])[0] for step in range(5)]
        assert tokens == [step[i] for step in steps]


def test_a_seed_repeats_and_another_differs() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    outputs = []
    for seed in (5, 5, 6, -2, 2**64 - 2):
        bench = Bench(1).admit(0, params(seed=seed))
        outputs.append([bench.step(logits, [0])[0] for _ in range(20)])
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[3] == outputs[4], "a negative seed is its 64-bit pattern"


def test_a_resumed_request_continues_as_if_nothing_had_happened() -> None:
    logits = random_logits(1)
    sampling = params(seed=11, frequency_penalty=0.5, min_tokens=12)
    whole = Bench(1).admit(0, sampling)
    tokens = [whole.step(logits, [0])[0] for _ in range(20)]
    resumed = Bench(1).admit(0, sampling, output=tokens[:9])
    assert [resumed.step(logits, [0])[0] for _ in range(11)] == tokens[9:]


def test_a_slot_forgets_its_last_request() -> None:
    everything = params(
        temperature=3, top_k=2, top_p=0.1, min_p=0.9, presence_penalty=2, frequency_penalty=2, repetition_penalty=2,
        min_tokens=99, stop_token_ids=[0], logprobs=5, seed=9,
    )  # fmt: skip
    logits = random_logits(1, seed=4)
    used = Bench(1).admit(0, everything, output=[3] * 30).admit(0, params(seed=1))
    fresh = Bench(1).admit(0, params(seed=1))
    assert [used.step(logits, [0]) for _ in range(20)] == [fresh.step(logits, [0]) for _ in range(20)]
    assert used.sample(logits, [0]).logprobs is None


# ------------------------------------------------------------------------------------------------------ features


def test_greedy_rows_take_the_likeliest_token_whatever_else_they_ask() -> None:
    logits = random_logits(8)
    bench = Bench(8)
    for slot in range(8):
        bench.admit(slot, params(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5, seed=slot))
    assert bench.sample(logits, range(8)).token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("repetition", "frequency", "presence"), [(1.5, 0, 0), (0.5, 0, 0), (1, 0.7, 0), (1, 0, -1.2), (1.2, -0.3, 0.9)]
)
def test_penalties_follow_their_formulas(repetition: float, frequency: float, presence: float) -> None:
    """Greedy over all tokens one by one: the sampler's order of preference is the formula's."""
    prompt, output = [1, 2, 2, 3], [3, 4, 4, 4, 5]
    logits = random_logits(1, seed=8)
    expected = logits[0].tolist()
    for token in set(prompt + output):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(output):
        expected[token] -= frequency * output.count(token) + presence
    options = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
    bench = Bench(3)
    bench.admit(0, params(temperature=0), prompt=[9]).admit(2, params(temperature=0), prompt=[9] * 40)
    bench.admit(1, params(temperature=0, **options), prompt=prompt, output=output)
    batch = SampleBatch(np.array([1]), bench.lengths[[1]], bench.table)
    penalties = Penalties(3)
    penalties.admit(NewSlot(1, prompt + output, len(prompt), [[1]], params(**options)))
    torch.testing.assert_close(penalties.apply(logits.clone(), batch)[0], torch.tensor(expected))
    sampled = bench.sample(logits.expand(3, -1), [0, 1, 2]).token_ids.tolist()
    plain = int(logits.argmax())
    assert sampled == [plain, int(np.argmax(expected)), plain]


def test_min_tokens_holds_off_every_end() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, [EOS, 20, 21]] = torch.tensor([9.0, 8.0, 7.0])
    bench = Bench(2)
    bench.admit(0, params(temperature=0, min_tokens=3, stop_token_ids=[20, 10**6, -4]))
    bench.admit(1, params(temperature=0))
    assert [bench.step(logits, [0, 1]) for _ in range(5)] == [[21, EOS]] * 3 + [[EOS, EOS]] * 2


def test_logprobs_are_of_the_models_own_distribution() -> None:
    """Before penalties and temperature; every number as torch.log_softmax has it, the sampled token's rank counted."""
    logits = random_logits(4)
    wanted = [0, 3, None, -1]
    bench = Bench(4)
    for slot, num in enumerate(wanted):
        bench.admit(slot, params(temperature=2.0, repetition_penalty=1.8, logprobs=num, seed=slot), output=[5, 6])
    sampled = bench.sample(logits, range(4))
    raw = logits.log_softmax(-1)
    assert sampled.logprobs is not None
    rows = dict(sampled.logprobs.rows())
    assert list(rows) == [0, 1, 3]
    for row, entry in rows.items():
        num = VOCAB_SIZE if wanted[row] == -1 else wanted[row]
        token = int(sampled.token_ids[row])
        order = raw[row].argsort(descending=True).tolist()
        assert entry.token_ids == [token, *order[:num]]
        assert entry.logprobs == pytest.approx(raw[row, entry.token_ids].tolist(), abs=1e-6)
        assert entry.nth_likeliest == order.index(token) + 1


def test_no_logprobs_unless_asked() -> None:
    assert Bench(1).admit(0, params()).sample(random_logits(1), [0]).logprobs is None


def test_top_p_of_a_flat_distribution_keeps_thousands_of_tokens() -> None:
    vocab_size = 20_000
    shares = [0.9, 0.5, 0.01, 1e-9]
    logits = 0.01 * random_logits(4, vocab_size=vocab_size)
    table, top_p = Bench(4, vocab_size).table, TopP(4, ops.bind("cpu").sampling)
    for slot, share in enumerate(shares):
        top_p.admit(NewSlot(slot, [1], 1, [[0]], params(top_p=share)))
    kept = top_p.apply(logits.clone(), SampleBatch(np.arange(4), np.ones(4, np.int64), table)).isfinite()
    for row, share in enumerate(shares):
        expected = expected_probs(logits[row], top_p=share) > 0
        assert abs(int(kept[row].sum()) - int(expected.sum())) <= 2, "off by rounding at the cut at most"


def test_tokens_as_likely_as_the_last_one_kept_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0] + [-9.0] * 45])
    seen = set()
    for seed in range(300):
        seen.update(Bench(1).admit(0, params(top_k=2, seed=seed)).step(logits, [0]))
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_unusable_row_harms_no_other(value: float, temperature: float) -> None:
    logits = random_logits(6)
    options = [params(temperature=temperature if i == 2 else i % 2, logprobs=i, seed=i, top_p=0.9) for i in range(6)]
    bench = Bench(6)
    for slot, sampling in enumerate(options):
        bench.admit(slot, sampling)
    clean = bench.sample(logits, range(6))
    logits[2, 17] = value
    sampled = bench.sample(logits, range(6))
    others = [0, 1, 3, 4, 5]
    assert sampled.usable.tolist() == [True, True, False, True, True, True]
    assert sampled.token_ids[others].tolist() == clean.token_ids[others].tolist()
    assert 0 <= int(sampled.token_ids[2]) < VOCAB_SIZE


def test_extreme_parameters_stay_finite() -> None:
    logits = random_logits(3)
    bench = Bench(3)
    bench.admit(0, params(temperature=1e300, min_tokens=5)).admit(1, params(temperature=2e-5))
    bench.admit(2, params(top_k=10**9, top_p=1e-9, min_p=1.0))
    sampled = bench.sample(logits, range(3))
    assert sampled.usable.all()
    assert sampled.token_ids[1:].tolist() == logits[1:].argmax(-1).tolist()


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_modes_of_logprobs(mode: LogprobsMode) -> None:
    logits = random_logits(2, seed=4)
    bench = Bench(2, mode=mode)
    bench.admit(0, params(temperature=0.5, top_k=3, logit_bias={4: 2.0}, logprobs=2))
    bench.admit(1, params(temperature=0, logprobs=2))
    changed = logits.clone()
    if mode.startswith("processed"):
        changed[0, 4] += 2
        changed[0] /= 0.5
        changed[0, changed[0].argsort(descending=True)[3:]] = -torch.inf
    expected = changed if mode.endswith("logits") else changed.log_softmax(-1)
    sampled = bench.sample(logits, [0, 1])
    assert sampled.logprobs is not None
    for row, entry in sampled.logprobs.rows():
        torch.testing.assert_close(torch.tensor(entry.logprobs), expected[row, entry.token_ids])
        assert entry.token_ids[1:] == expected[row].topk(2).indices.tolist()


class _Spy(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_feature_that_nobody_uses_costs_nothing() -> None:
    """An all-greedy step reads the logits once."""
    bench = Bench(4)
    for slot in range(4):
        bench.admit(slot, params(temperature=0))
    logits = random_logits(4)
    batch = SampleBatch(np.arange(4), bench.lengths[:4], bench.table)
    with _Spy() as spy:
        bench.sampler.sample(logits, batch)
    names = {call.split(".")[1] for call in spy.calls}
    assert names <= {"empty", "argmax", "gather", "squeeze", "unsqueeze", "abs", "eq", "ne", "mul"}


MASKS = [
    {"allowed_token_ids": [4, 9, 30]},
    {"bad_words_token_ids": [[11], [2, 12]]},
    {"min_tokens": 3, "stop_token_ids": [8]},
    {"thinking_token_budget": 0, "thinking": ThinkingMarks(begin=[[3]], end=[[21, 22]], opened=True)},
]
FORBIDDEN = [[i for i in range(VOCAB_SIZE) if i not in (4, 9, 30)], [11], [EOS, 8], None]
"""Of each mask, before a request has generated anything; None where one token, of a logit of 0, is all that is left."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_work_where_the_logits_are_in_any_type_and_leave_other_rows(dtype: torch.dtype) -> None:
    bench = Bench()
    for slot, options in enumerate([{}, *MASKS, {}]):
        bench.admit(slot, params(**options, seed=slot))
    written = random_logits(6, seed=4).to(dtype)
    logits = written.clone()
    slots = np.arange(6)
    bench.sampler.sample(logits, SampleBatch(slots, bench.lengths[slots], bench.table))
    for row, forbidden in enumerate(FORBIDDEN, start=1):
        if forbidden is None:
            written[row], written[row, 21] = -torch.inf, 0
        else:
            written[row, forbidden] = -torch.inf
    assert torch.equal(logits, written)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_tokens_and_logprobs_are_those_of_float32(mode: LogprobsMode) -> None:
    """Masks may change logits before or after another row's feature converts all of them to float32."""
    logits = random_logits(6, seed=6).bfloat16()
    tokens, values = [], []
    for given in (logits, logits.float()):
        bench = Bench(mode=mode)
        for slot, options in enumerate([{"temperature": 0.7}, *MASKS, {"logit_bias": {5: 3.0}}]):
            bench.admit(slot, params(**options, seed=slot, logprobs=2))
        sampled = bench.sample(given, range(6))
        assert sampled.logprobs is not None
        tokens.append(sampled.token_ids.tolist())
        values.append(sampled.logprobs.transfer.values()[1])
    assert tokens[0] == tokens[1]
    assert values[0].dtype == torch.float32
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
