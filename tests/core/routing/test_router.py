"""The router's formula, what it remembers, and what it forgets."""

import math
import os
import random
import subprocess
import sys

from quire.core.routing.engine_load import EngineLoad
from quire.core.routing.prompt_blocks import prompt_blocks
from quire.core.routing.router import FULL, Router, RoutingRules
from quire.core.wire.protocol import SchedulerStats

TOKENS = [each * 7919 % 50_000 for each in range(4096)]


def router_of(*loads: float, **rules: float) -> Router:
    router = Router(len(loads), RoutingRules(**rules))  # type: ignore[arg-type]
    for engine, load in enumerate(loads):
        router.set_load(engine, load)
    return router


def chosen(router: Router, blocks: list[int]) -> tuple[int, int]:
    choice = router.choose(blocks)
    assert choice is not None
    router.sent(choice.engine, blocks)
    return tuple(choice)


def test_a_block_stands_for_all_before_it_and_for_what_else_differs() -> None:
    whole = prompt_blocks(TOKENS[:640], None)
    assert len(whole) == 10
    assert prompt_blocks(TOKENS[:200], None) == whole[:3]
    assert prompt_blocks(TOKENS[:63], None) == []
    changed = prompt_blocks([1, *TOKENS[1:640]], None)
    assert not set(changed) & set(whole)
    assert not set(prompt_blocks(TOKENS[:640], "salt")) & set(whole)


def test_processes_with_one_key_of_hashes_give_the_same_names() -> None:
    program = (
        "from quire.core.routing.prompt_blocks import prompt_blocks\n"
        "print(prompt_blocks(range(130), None, None), prompt_blocks(range(64), 'salt', b'digests'))"
    )
    names = [
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("5", "5", "6")
    ]
    first, second, other = (each.stdout for each in names)
    assert first == second != other
    assert len(first.split()) == 3


def test_the_engine_that_has_the_longest_part_is_taken() -> None:
    router = router_of(0, 0, 0)
    router.sent(1, prompt_blocks(TOKENS[:640]))
    router.sent(2, prompt_blocks(TOKENS[:1280]))
    assert router.choose(prompt_blocks(TOKENS[:2000])) == (2, 1280)
    assert router.choose(prompt_blocks([*TOKENS[:640], *TOKENS[:700]])) == (1, 640)  # both have it: the first


def test_a_cache_excuses_one_sequence_for_each_128_tokens() -> None:
    blocks = prompt_blocks(TOKENS[:1280])
    router = router_of(10, 0)
    router.sent(0, blocks)
    assert router.choose(blocks) == (0, 1280)
    router.set_load(0, 11)
    assert router.choose(blocks) == (1, 0)


def test_no_cache_excuses_more_than_the_bound() -> None:
    blocks = prompt_blocks(TOKENS)
    router = router_of(8, 0, most_sequences=8)
    router.sent(0, blocks)
    assert router.choose(blocks) == (0, 4096)
    router.set_load(0, 9)
    assert router.choose(blocks) == (1, 0)


def test_load_alone_decides_where_no_prefix_weighs_anything() -> None:
    blocks = prompt_blocks(TOKENS)
    router = router_of(1, 0, tokens_per_sequence=math.inf)
    router.sent(0, blocks)
    assert router.choose(blocks) == (1, 0)


def test_engines_of_equal_load_take_turns() -> None:
    router = router_of(3, 3, 3)
    assert [chosen(router, [number])[0] for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_full_engines_get_nothing_even_what_they_have_in_their_cache() -> None:
    blocks = prompt_blocks(TOKENS)
    router = router_of(FULL, 500)
    router.sent(0, blocks)
    assert router.choose(blocks) == (1, 0)
    router.set_load(1, FULL)
    assert router.choose(blocks) is None


def test_an_engine_that_died_is_known_to_have_nothing() -> None:
    blocks = prompt_blocks(TOKENS)
    router = router_of(0, 0)
    for engine in (0, 1):
        router.sent(engine, blocks)
    router.forget(0)
    assert router.choose(blocks) == (1, 4096)
    router.forget(1)
    assert router.choose(blocks) == (0, 0)


def test_prefixes_are_forgotten_in_lru_order_and_from_their_end() -> None:
    one, other, third = (prompt_blocks([first, *TOKENS[:639]]) for first in (1, 2, 3))
    router = router_of(0)
    router.set_capacity(0, 25 * 64)
    for blocks in (one, other, one, third):  # `other` is the oldest when room is short by 5 blocks
        router.sent(0, blocks)
    assert [router.choose(blocks) for blocks in (one, other, third)] == [(0, 640), (0, 320), (0, 640)]


def test_memory_is_bounded_over_all_engines() -> None:
    router = router_of(0, 0, max_blocks=20)
    for engine in (0, 1):
        router.sent(engine, prompt_blocks(TOKENS))
    assert [router.choose(prompt_blocks(TOKENS))] == [(0, 10 * 64)]


def test_choices_depend_on_the_calls_before_and_nothing_else() -> None:
    def run() -> list[tuple[int, int]]:
        draw, router = random.Random(5), router_of(*[0] * 20)
        answers = []
        for _ in range(300):
            router.set_load(draw.randrange(20), draw.randrange(30))
            length = draw.randrange(64, 1500)
            answers.append(chosen(router, prompt_blocks([draw.randrange(6), *TOKENS[:length]])))
        return answers

    assert run() == run()


def test_load_is_the_last_report_and_what_was_sent_since() -> None:
    load = EngineLoad()
    load.add(3)
    assert load.value == 3
    load.report(SchedulerStats(num_running=6, num_waiting=2))  # of all frontends
    assert load.value == 6 + 4 * 2
    load.add(1)
    assert load.value == 15
    load.report(SchedulerStats())  # made before anything sent arrived
    assert (load.value, load.num_own) == (4, 4)
    load.remove(4)
    assert load.value == 0


def test_a_prefix_that_hundreds_of_engines_have_leads_to_the_least_loaded_of_them() -> None:
    drawn = random.Random(2)
    loads = [drawn.randrange(5, 400) for _ in range(700)]
    router = router_of(*loads, most_sequences=1e9, tokens_per_sequence=0.1)
    blocks = prompt_blocks(TOKENS[:640])
    holders = sorted(drawn.sample(range(700), 300))
    for engine in holders:
        router.sent(engine, blocks)
    for _ in range(20):
        least = min(holders, key=lambda engine: (loads[engine], engine))
        assert chosen(router, blocks) == (least, 640)
        loads[least] += 50
        router.set_load(least, loads[least])
