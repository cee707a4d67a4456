"""The sums of the example in docs/architecture.md."""

from tests.core.scheduling.fake_worker import Harness


def test_the_example_of_the_architecture_page() -> None:
    harness = Harness(
        num_pages=2340, max_model_len=2048, check=False, max_num_seqs=64, max_num_batched_tokens=512, block_size=16
    )
    for number in range(30):
        harness.add(f"running {number}", 5, max_tokens=400)
    harness.step()
    prompt = list(range(1000, 2000))
    harness.add("new", prompt, max_tokens=100)
    for _ in range(3):
        harness.step()
    first, second, third = harness.plans[1:4]
    [admitted] = first.admitted
    assert [len(pages) for pages in admitted.page_ids] == [63]
    assert [plan.num_scheduled[-1] for plan in (first, second, third)] == [482, 482, 36]
    assert [sum(plan.num_scheduled) for plan in (first, second)] == [512, 512]
    assert [plan.num_wanted[-1] for plan in (first, second, third)] == [0, 0, 1]
    assert third.num_computed[-1] == 964
    for _ in range(99):
        assert not harness.streams["new"].finish_reason
        harness.step()
    assert harness.streams["new"].finish_reason
    appended = [pages[0] for plan in harness.plans for slot, pages in plan.appended_pages if slot == admitted.slot]
    assert 63 + sum(map(len, appended)) == 69
    harness.add("same", prompt)
    harness.step()
    assert harness.plans[-1].num_scheduled[-1] == 8
