"""Experts that are divided over ranks whole, against one rank with all of them."""

import contextlib
import random
import re
from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.core.config.cache import CacheConfig
from quire.core.config.parallel import EplbConfig, ExpertPlacement, ExpertPlacementStrategy
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.wire.rank import Rank
from quire.executor.layers.experts.balancer import ExpertBalancer
from quire.executor.layers.experts.places import ExpertPlaces
from quire.executor.memory.dry_build import ShapeReader, dry_build, held_bytes
from quire.executor.models.registry import build_model
from quire.executor.parallel.expert_placement import ExpertMap, moves_between
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from tests.executor.models.test_hybrid_models import Folder
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.models.test_models import prompts
from tests.executor.models.test_moe_models import VARIANTS
from tests.executor.paged_driver import (
    Checkpoints,
    PagedDriver,
    load_model,
    model_context,
    read_spec,
    transformers_spec,
)
from tests.executor.step.test_model_runner import engine_config, request, tokens_of
from tests.executor.step.test_sameness import start
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)


def place(
    num_experts: int,
    num_ranks: int,
    strategy: ExpertPlacementStrategy = "linear",
    num_redundant: int = 0,
    *,
    is_balanced: bool = False,
) -> ExpertMap:
    asked = ExpertPlacement(strategy=strategy, num_redundant=num_redundant)
    return ExpertMap.initial(num_experts, num_ranks, asked, is_balanced=is_balanced)


def test_places_are_as_equal_as_can_be() -> None:
    assert place(6, 4).ranks == ((0, 1), (2, 3), (4,), (5,))
    assert place(6, 4, "round_robin").ranks == ((0, 4), (1, 5), (2,), (3,))
    assert place(2, 3).ranks == ((0,), (1,), ())
    assert place(6, 4, num_redundant=2).ranks == ((0, 1), (2, 3), (4, 5), (0, 1))


@pytest.mark.parametrize(
    ("num_experts", "num_redundant", "message"),
    [
        (6, 0, r"on each of 4 ranks, and 6 with num_redundant_experts 0 are 6: .*num_redundant_experts 2\."),
        (6, 5, r"are 11: .*num_redundant_experts 6\."),
        (2, 10, "10 is more than the 6 copies that give each of 4 ranks all 2 experts"),
    ],
)
def test_places_that_cannot_be_exchanged_are_refused(num_experts: int, num_redundant: int, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        place(num_experts, 4, num_redundant=num_redundant, is_balanced=True)


def test_a_placement_suits_its_load() -> None:
    """The hot expert gets copies, and the others go where these leave room."""
    before = place(6, 4, num_redundant=2)
    loads = [10, 10, 300, 100, 20, 20]
    after = before.balanced(loads)
    assert (before.imbalance(loads), after.imbalance(loads)) == (
        pytest.approx(3.478, abs=1e-3),
        pytest.approx(1.043, abs=1e-3),
    )
    assert sum(2 in own for own in after.ranks) == 3
    assert after.balanced(loads) is after


def test_any_load_finds_a_placement() -> None:
    generator = random.Random(0)
    for _ in range(200):
        num_ranks, each = generator.choice([2, 3, 4, 8]), generator.randint(1, 5)
        num_experts = generator.randint(each, num_ranks * each)
        before = place(num_experts, num_ranks, num_redundant=num_ranks * each - num_experts, is_balanced=True)
        loads = [int(generator.paretovariate(0.6)) for _ in range(num_experts)]
        after = before.balanced(loads)
        assert after.imbalance(loads) <= before.imbalance(loads)
        assert {expert for own in after.ranks for expert in own} == set(range(num_experts))
        assert [len(own) for own in after.ranks] == [each] * num_ranks
        assert after is before or all(len(set(own)) == each for own in after.ranks)
        # Each move reads what was there before all of them.
        places = [list(own) for own in before.ranks]
        for move in moves_between(before, after):
            assert before.ranks[move.source][move.source_place] == move.expert
            places[move.target][move.target_place] = move.expert
        assert places == [list(own) for own in after.ranks]


class Counting(ExpertBalancer):
    """Notes the load of the busiest rank over the mean whenever experts are placed anew."""

    noted: list[float]

    def rebalance(self) -> None:
        layers = self._experts.layers
        self.noted.append(sum(each.places.placement.imbalance(each.places.loads.tolist()) for each in layers))
        super().rebalance()


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_experts_move_while_a_model_runs(quantization: Any, checkpoint: Checkpoints) -> None:
    """A few tokens again and again: their experts are busy, until they are placed anew. Logits stay the same."""
    spec, building = read_spec(checkpoint("qwen3_moe")), Lock()
    eplb = EplbConfig(window_size=2, step_interval=3, num_redundant_experts=3)
    steps = [{0: [5] * 12, 1: [6, 7] * 5}, *({0: [5], 1: [6]} for _ in range(8))]

    def run(driver: PagedDriver, after_step: Callable[[], None]) -> list[Tensor]:
        got = []
        for step in steps:
            got += driver.step(step).values()
            after_step()
        return got

    whole = run(PagedDriver(load_model(spec, quantization=quantization), 2, 40), lambda: None)

    def on_rank(group: ParallelGroup) -> tuple[list[Tensor], list[float], list[ExpertMap]]:
        context = model_context(spec, group=group, experts=ExpertPlacement(num_redundant=3), quantization=quantization)
        with building, contextlib.closing(context.weights), torch.inference_mode():
            model = build_model(spec, context)
        assert context.experts is not None
        balancer = Counting(eplb, context.experts, logs=False)
        balancer.noted = []
        assert balancer.balancedness is None
        got = run(PagedDriver(model, 2, 40), balancer.after_step)
        assert balancer.balancedness is not None
        return got, balancer.noted, [layer.places.placement for layer in context.experts.layers]

    ranks = on_every_rank(4, on_rank)
    for got, noted, placements in ranks:
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)
        assert (noted, placements) == ranks[0][1:]
    assert placements[0] != place(9, 4, num_redundant=3)
    assert len(noted) == 3
    assert noted[1] < 0.8 * noted[0]


def test_copies_share_the_tokens_of_an_expert() -> None:
    """By what a token is: alike on all ranks, and whatever the batch."""
    placement = ExpertMap(((0, 1), (0, 2), (0, 3), (0, 1)))
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0, 1]]).expand(4000, 2)
    places = [ExpertPlaces(placement, rank, 4, torch.device("cpu")) for rank in range(4)]
    local = torch.stack([each.local(x, ids) for each in places])
    assert ((local >= 0).sum(dim=0) == 1).all()
    shares = (local >= 0).float().mean(dim=1)
    torch.testing.assert_close(shares[:, 0], torch.full((4,), 0.25), atol=0.03, rtol=0)
    torch.testing.assert_close(shares[:, 1], torch.tensor([0.5, 0, 0, 0.5]), atol=0.03, rtol=0)
    assert torch.equal(places[2].local(x[7:8], ids[:1]), local[2, 7:8])
    for rank in range(4):  # two ranks for each of two engines, which exchange tokens with the same one of the other
        shared = ExpertPlaces(placement, rank, 4, torch.device("cpu"), num_engines=2)
        here = torch.stack([local[first + rank % 2] >= 0 for first in (0, 2)])
        assert torch.equal(shared.engines(x, ids), torch.where(here.any(dim=0), here.int().argmax(dim=0), 2))


def logits(spec: ModelSpec, building: Lock, **options: Any) -> list[Tensor]:
    """Of three prompts, and of a step after them."""
    with building:  # ranks are processes, and do not share Transformers' tables
        model = load_model(spec, **options)
    driver = PagedDriver(model, 3, 80)
    some = dict(enumerate(prompts(3, spec.vocab_size)))
    return [*driver.step(some).values(), *driver.step({0: [3], 1: [4], 2: [9]}).values()]


CASES: list[tuple[str, dict[str, Any], int, ExpertPlacementStrategy]] = [
    ("mixtral", {}, 2, "linear"),
    ("mixtral", {"num_local_experts": 3}, 4, "linear"),  # a rank without any
    ("gpt_oss", {}, 4, "round_robin"),
    ("granite_moe", {}, 4, "linear"),
    ("gemma4", VARIANTS["gemma4"][1], 2, "round_robin"),
    ("qwen2_moe", {"num_local_experts": 9}, 4, "linear"),
    ("llama4", {}, 2, "linear"),
    ("deepseek_v3", {}, 4, "round_robin"),
]


@pytest.mark.parametrize(("family", "options", "size", "strategy"), CASES)
def test_ranks_together_are_the_whole_model(
    family: Any, options: dict[str, Any], size: int, strategy: ExpertPlacementStrategy, checkpoint: Checkpoints
) -> None:
    spec, building = read_spec(checkpoint(family, **options)), Lock()
    whole = logits(spec, building)
    for got in on_every_rank(size, lambda group: logits(spec, building, group=group, experts=strategy)):
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


def test_hybrid_models_and_a_latent_space_of_experts(hybrid: Folder) -> None:  # noqa: F811
    spec, building = read_spec(hybrid("nemotron-h-experts")), Lock()
    whole = logits(spec, building)
    for got in on_every_rank(2, lambda group: logits(spec, building, group=group, experts="linear")):
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


def test_experts_of_few_bits(checkpoint: Checkpoints) -> None:
    spec, building = read_spec(checkpoint("mixtral")), Lock()
    whole = logits(spec, building, quantization="int4")
    for got in on_every_rank(
        2, lambda group: logits(spec, building, group=group, experts="round_robin", quantization="int4")
    ):
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


def test_classes_of_transformers(checkpoint: Checkpoints) -> None:
    spec, building = transformers_spec(checkpoint("qwen3_moe")), Lock()
    whole = logits(spec, building)
    for got in on_every_rank(2, lambda group: logits(spec, building, group=group, experts="linear")):
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_rank_reads_only_its_own_experts(family: Any, checkpoint: Checkpoints) -> None:
    """And what it will hold is counted before."""
    spec = read_spec(checkpoint(family))
    read = []
    for rank in range(4):
        context = model_context(spec, group=ParallelGroup(rank, 4), experts="linear")
        with contextlib.closing(context.weights), torch.inference_mode():
            reader = ShapeReader(torch.float32)
            counted = held_bytes(dry_build(spec, context, reader))
        read.append({(each.name, each.shard) for each in reader.reads if "experts" in each.name})
        assert counted == held_bytes(load_model(spec, group=context.group, experts="linear"))
    num_reads = len(set.union(*read))
    assert num_reads == sum(map(len, read))
    assert max(map(len, read)) <= 0.4 * num_reads


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_without_experts_is_refused(size: int, checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelLoadError, match=r"no experts that could be divided.*without --enable-expert-parallel"):
        load_model(read_spec(checkpoint("llama")), group=ParallelGroup(0, size), experts="linear")


def test_one_worker_has_all_experts_and_says_so(checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    config = engine_config(checkpoint("mixtral"), expert_placement=ExpertPlacement())
    Worker(config, Rank(), ParallelGroup()).load()
    assert "--enable-expert-parallel has no effect on one worker" in caplog.text


def test_tokens_are_those_of_one_worker(checkpoint: Checkpoints, capfd: pytest.CaptureFixture[str]) -> None:
    """Six experts on two workers, placed anew after every fifth step."""
    folder = checkpoint("gpt_oss")
    options = {"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "disable_log_stats": False}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [list(range(first, first + 20)) for first in (5, 40, 80)]
    requests = [request(str(i), prompt, max_tokens=16) for i, prompt in enumerate(prompts)]
    whole = tokens_of(start(folder, cache=CacheConfig(num_gpu_blocks_override=64)).generate(requests))
    eplb = {"step_interval": 5, "window_size": 4, "num_redundant_experts": 2, "log_balancedness": True}
    division = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": eplb}
    with LLM(str(folder), **options, **division) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        measured = {each.name: each.value for each in llm.get_metrics() if each.name == "quire:expert_balancedness"}
    assert [output.outputs[0].token_ids for output in outputs] == list(whole.values())
    log = capfd.readouterr().err
    placed = re.findall(r"rebalanced experts in [\d.]+ s, (\d+) moved: the busiest rank had ([\d.]+) times", log)
    assert len(placed) == 3
    assert int(placed[0][0]) > 0
    assert float(placed[0][1]) > 1
    assert 0.5 <= measured["quire:expert_balancedness"] <= 1
    assert len(re.findall(r"balancedness of experts: [\d.]+ over 2 layers", log)) >= 15
