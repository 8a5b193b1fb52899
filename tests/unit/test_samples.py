"""What a forward shows of its number of samples, how certain a count is, and what a sampler knows of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from atoll.core.weighing import GUESSED, KNOWN, NONE, Certainty, said, told_unlike
from atoll.train.data.sampler import BatchesSampler, ShardedSampler
from atoll.train.gradients.samples import ContributionWeight, SampleCount, SeenSamples, seen_in


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


SCALAR = torch.tensor(1.0)
TOKENS = torch.zeros(3, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("inputs", "output", "samples", "confirms"),
    [
        (torch.zeros(3, 8), torch.zeros(3, 2), 3, True),
        (torch.zeros(3, 8), torch.zeros(3, 8), 3, True),  # vectors to vectors
        (torch.zeros(3, 3, 5, 5), torch.zeros(3, 3, 5, 5), 3, True),  # images to images
        (torch.zeros(2, 3, 5, 5), torch.zeros(2, 3, 5, 5), 2, True),
        (torch.zeros(9, 4, 8), torch.zeros(4, 2), 9, False),  # sequences first
        (torch.zeros(9, 4, 8), torch.zeros(9, 4, 2), 9, False),  # either may be the batch
        (torch.zeros(4, 4, 8), torch.zeros(4, 4, 2), 4, True),  # both are the same
        (TOKENS, torch.zeros(3, 4, 17), 3, False),
        (TOKENS, torch.zeros(3, 17), 3, True),
        (torch.zeros(3, 4), torch.zeros(3, 4, 17), 3, False),
        (torch.zeros(3, 8), SCALAR, 3, False),  # a loss
        (torch.zeros(3, 8), Output(SCALAR, torch.zeros(3, 2)), 3, True),
        (torch.zeros(3, 8), {"loss": SCALAR, "logits": [torch.zeros(5, 2)]}, 3, False),
        ([torch.zeros(5, 8), torch.zeros(5, 8)], torch.zeros(2, 4), 5, False),  # a list of samples
        ((SCALAR, torch.zeros(3, 8)), torch.zeros(3, 2), 3, True),
        ({"mask": torch.zeros(9, 9), "x": torch.zeros(3, 9, 8)}, torch.zeros(3, 2), 9, False),
        ("words", torch.zeros(3, 2), None, False),
    ],
)
def test_what_a_forward_shows(inputs: object, output: object, samples: float | None, confirms: bool) -> None:
    seen = seen_in(inputs, output)
    assert (seen.samples, seen.confirms) == (samples, confirms)


def test_an_output_that_disagrees_shows_its_own_number() -> None:
    assert seen_in(torch.zeros(9, 4, 8), torch.zeros(4, 2)) == SeenSamples(9.0, instead=(4.0,))


def test_an_iteration_s_count_is_as_certain_as_its_least_certain_batch() -> None:
    count = SampleCount()
    assert count.contribution(True) == ContributionWeight(1.0, 0.0, NONE)
    assert count.contribution(False).is_certain  # it has no part in the mean
    count.count(3.0)
    assert count.contribution(True) == ContributionWeight(3.0, 3.0, KNOWN)
    count.count(4.0, GUESSED)
    assert count.contribution(True) == ContributionWeight(7.0, 7.0, GUESSED)
    count.missed()  # a batch under no_sync did not go through the forward
    assert count.contribution(True).basis == NONE
    count.give(5.0)
    assert count.contribution(True) == ContributionWeight(5.0, 5.0, KNOWN)
    count.use()
    count.missed()  # a second backward over the batch that was used weighs what the first did
    assert count.contribution(True) == ContributionWeight(5.0, 0.0, KNOWN, again=True)
    assert count.contribution(False).weight == 0  # no backward came: there is no batch


def test_values_that_are_logged_weigh_as_the_gradients_did() -> None:
    count = SampleCount()
    count.count(3.0, GUESSED)
    count.use(alike=True)
    assert count.latest == 1.0
    count.reset()
    count.count(3.0)
    count.use()
    assert count.latest == 3.0


def test_an_empty_slice_is_told_from_a_fill() -> None:
    """Neither counts, and a fill alone has gradients."""
    samples = SampleCount()
    samples.count(4.0, KNOWN, 4.0, 4.0)
    samples.use()
    mark = samples.begins()
    samples.count(0.0, KNOWN, 0.0, 3.0)
    assert (samples.contribution(True).weight, samples.contribution(True).empty) == (0.0, False)
    samples.back_to(mark)
    samples.count(0.0, KNOWN, 0.0, 3.0, gives_zeros=True)
    assert (samples.contribution(True).weight, samples.contribution(True).empty) == (0.0, True)
    samples.back_to(mark)
    samples.count(0.0, KNOWN, 0.0, 0.0)
    assert (samples.contribution(True).weight, samples.contribution(True).empty) == (0.0, True)
    samples.count(2.0, KNOWN, 2.0, 2.0)  # another slice, of a batch of its own
    assert (samples.contribution(True).weight, samples.contribution(True).empty) == (2.0, False)


@pytest.mark.parametrize(
    ("weights", "certain", "equal"),
    [
        ([(3.0, True), (3.0, True)], True, True),
        ([(3.0, True), (9.0, True)], True, False),
        ([(3.0, False), (3.0, True)], False, True),
        ([(3.0, False), (9.0, True)], False, False),
        ([(3.0, True), (0.0, False), (3.0, True)], True, True),  # it does not count
        ([(2.0**24, True), (2.0**24 + 1, False)], False, False),  # not told apart by a float32
    ],
)
def test_sums_say_whether_weights_are_certain_and_equal(
    weights: list[tuple[float, bool]], certain: bool, equal: bool
) -> None:
    each = [said(weight, float(weight > 0), known) for weight, known in weights]
    found = Certainty(torch.tensor(each, dtype=torch.float32).sum(0).tolist())
    assert (found.workers, found.certain, found.equal) == (
        sum(weight > 0 for weight, _ in weights),
        certain,
        equal,
    )


def test_the_line_names_what_each_has_counted_where_it_makes_a_difference() -> None:
    two = {0: ContributionWeight(3.0, 3.0, GUESSED), 1: ContributionWeight(1.0, 0.0, NONE)}
    words = "worker 0 counted 3 (a guess), worker 1 counted none; to weight by"
    assert words in told_unlike("step 0", two)
    of_two = ContributionWeight(6.0, 6.0, KNOWN, alike=2.0)
    assert told_unlike("step 0", {0: ContributionWeight(3.0, 3.0, GUESSED), 1: of_two}) == ""
    assert told_unlike("step 0", {0: ContributionWeight(3.0, 3.0), 1: ContributionWeight(4.0, 4.0)}) == ""


def test_a_sampler_knows_the_sizes_of_batches_that_a_loader_fetches_ahead() -> None:
    sampler = ShardedSampler(26, rank=0, world=1)
    given = iter(sampler)
    for _ in range(12):  # three batches of four at once
        next(given)
    known = []
    for size in (4, 4, 4, 4, 4, 4, 2):
        known.append(float(size) in sampler.next_sizes())
        assert 3.0 not in sampler.next_sizes()
        sampler.count(size)
        for _ in range(4):
            next(given, None)
    assert known == [False, False, False, True, True, True, True]


def test_a_sampler_knows_the_sizes_of_batches_that_are_fetched_as_they_are_used() -> None:
    sampler = ShardedSampler(10, rank=0, world=1)
    for batch in DataLoader(torch.arange(10), batch_size=4, sampler=sampler):  # type: ignore[arg-type]
        assert sampler.next_sizes() == {float(len(batch))}
        sampler.count(len(batch))


def test_batches_know_their_sizes_however_many_are_fetched_ahead() -> None:
    sampler = BatchesSampler(10, batch=4, rank=0, world=1)
    sizes = [len(batch) for batch in sampler]
    for size in sizes:
        assert sampler.next_sizes() == {float(size)}
        sampler.count(size)
    assert sampler.next_sizes() == set()


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 16, 64, 200])
@pytest.mark.parametrize("times", [1e6 + 1, 1e30, 1e300])
def test_each_weight_is_looked_at_where_one_is_far_beyond_the_others(workers: int, times: float) -> None:
    for beyond in range(1, workers // 2 + 1):
        weights = [16.0 * times] * beyond + [16.0] * (workers - beyond)
        assert summed_up(weights).may_be_beyond
    for weights in ([16.0] * workers, [4096.0] * (workers - 1) + [1.0], [512.0, 64.0] * workers):
        assert not summed_up(weights).may_be_beyond
    assert not summed_up([0.0] * (workers - 1) + [times]).may_be_beyond


def summed_up(weights: list[float]) -> Certainty:
    each = [said(weight, float(weight > 0), True) for weight in weights]
    return Certainty([sum(values) for values in zip(*each, strict=True)])


def test_counts_go_back_to_a_mark_and_tell_what_came_since() -> None:
    count = SampleCount()
    count.count(8)
    mark = count.mark()
    assert count.since(mark) == 0
    count.count(3)
    assert count.since(mark) == 3
    count.back_to(mark)
    assert count.contribution(True).weight == 8
    count.give(5)
    assert count.since(mark) == 5
    inside = count.mark()
    count.count(2)  # the weight was given before, for this batch too
    assert count.since(inside) == 2
    count.give(0)
    assert count.since(inside) == 0
    assert count.contribution(True).weight == 5
    count.use()
    used = count.mark()
    count.count(4)
    assert count.since(used) == 4
    assert SampleCount().since(SampleCount().mark()) is None


def test_a_weight_given_anew_after_a_forward_that_raised_replaces_its_own_alone() -> None:
    """Two forwards have one backward: the first one's weight stays when the second one raises."""
    count = SampleCount()
    count.give(5.0, forwards=0)
    count.give(3.0, forwards=1)
    for _ in range(2):
        assert count.forward_raised(1)
        mark = count.begins()
        count.take_back(mark, is_empty=True, retried=True)
        count.give(3.0, forwards=1)
        assert count.known == 8.0


def test_a_weight_given_once_holds_for_the_batch_that_is_computed_again() -> None:
    count = SampleCount()
    for _ in range(2):
        if count.known is None:
            count.give(5.0)
        assert count.awaits_backward
        mark = count.begins()
        count.take_back(mark, is_empty=True, retried=True)
    assert count.known == 5.0
    mark = count.begins()
    count.take_back(mark, is_empty=True, retried=False)
    assert count.known is None


def test_a_forward_that_raises_is_not_of_the_weight_of_one_that_has_ended() -> None:
    count = SampleCount()
    count.give(5.0, forwards=0)
    assert not count.forward_raised(1)
    count.give(3.0, forwards=1)
    assert count.known == 8.0


def test_of_weights_that_were_dropped_none_is_kept_for_a_forward_that_raises_again() -> None:
    """A batch came before; then a forward raised, and the script dropped all and began anew."""
    count = SampleCount()
    count.give(1.0, forwards=0)
    count.begins()
    for _ in range(2):
        count.give(3.0, forwards=1)
        assert count.forward_raised(1)
        mark = count.begins()
        count.take_back(mark, is_empty=True, retried=True)
    count.give(3.0, forwards=1)
    assert count.known == 3.0


@pytest.mark.parametrize("how", ["back_to", "reset"])
def test_a_forward_that_raised_is_forgotten_with_what_was_given(how: str) -> None:
    """As where memory ran out in a piece of a batch."""
    count = SampleCount()
    mark = count.mark()
    count.give(6.0, forwards=0)
    assert count.forward_raised(0)
    count.back_to(mark) if how == "back_to" else count.reset()
    for _ in range(2):
        count.give(5.0, forwards=0)
        count.give(3.0, forwards=1)
        begun = count.begins()
        count.take_back(begun, is_empty=True, retried=True)
    count.give(8.0, forwards=2)
    assert count.known == 8.0
