"""Groups are graded and packed while other completions of the step are being generated.

    completions --group complete--> graders --graded--> advantages, packing --> micro-batches

The order in which groups end changes nothing: the advantages of a group need no other group, and
its micro-batches follow from it alone. One thread of this process grades during the rollout.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

from longtail.config.losses import LOSSES
from longtail.config.rl import LearnerSection
from longtail.rl.advantage import keep_informative, shaped_rewards
from longtail.rl.configured_loss import advantages_of, by_group, loss_of
from longtail.rl.data.requests import RequestBatch, regroup, visit_of
from longtail.rl.grading.pool import Graded, GraderPool
from longtail.rl.packing import pack_mini_batches
from longtail.types import (
    Completion,
    GradingFailure,
    Group,
    MicroBatch,
    Prompt,
    Rollout,
    SamplingParams,
    TrainBatch,
)


def streams(own: LearnerSection) -> bool:
    """Return whether groups are learned from while others are being generated."""
    return why_not(own) is None if own.streaming is None else own.streaming


def samples_dynamically(own: LearnerSection) -> bool:
    """Return whether groups with equal rewards are left out and replaced."""
    given = own.dynamic_sampling
    return loss_of(own).dynamic_sampling if given is None else given


def step_batches(
    groups: Sequence[Group], own: LearnerSection, sampling: SamplingParams
) -> list[TrainBatch]:
    """Return the rollouts of groups with their advantages, packed into mini-batches."""
    rewards = shaped_rewards(groups, max_tokens=sampling.max_tokens, buffer=own.overlong_buffer)
    return pack_mini_batches(
        [rollout for group in groups for rollout in group.rollouts],
        [value for group in advantages_of(own, rewards) for value in group],
        sampling=sampling,
        budget=own.tokens_per_micro_batch,
        mini_batches=own.mini_batches,
        keep_idle=own.kl_coef > 0 or own.loss not in LOSSES,
    )


@final
class GroupStream:
    """The groups of one round of a step: graded as they come, and packed for the learners.

    `num_wanted`: groups that the step still lacks. With dynamic sampling only groups are packed
    here that are sure to be among them.
    """

    def __init__(
        self, requests: RequestBatch, grader: GraderPool, own: LearnerSection, *, num_wanted: int
    ) -> None:
        self._grader, self._own = grader, own
        self._sampling = requests.requests[0].sampling
        self._members: dict[str, list[tuple[str, Prompt]]] = {}
        """Request id and prompt of each completion of a group."""
        for request, prompt in zip(requests.requests, requests.prompts, strict=True):
            members = self._members.setdefault(visit_of(request.request_id), [])
            members.append((request.request_id, prompt))
        self._packed = set(list(self._members)[: num_wanted if streams(own) else 0])
        """Groups that are packed here if anything can be learned from them."""
        self._missing = {visit: len(members) for visit, members in self._members.items()}
        """Number of unfinished completions of each group."""
        self._completions: dict[str, Completion] = {}
        self._complete: deque[str] = deque()
        """Groups whose completions are finished, and not yet with the graders."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grading")
        self._graded: list[Future[Graded]] = []
        self._num_read = 0
        """Results of graders whose groups are packed."""

    def add(self, completions: Iterable[Completion]) -> None:
        """Add finished completions, in any order; those that are known are ignored."""
        for each in completions:
            if each.request_id not in self._completions:
                self._completions[each.request_id] = each
                visit = visit_of(each.request_id)
                self._missing[visit] -= 1
                if not self._missing[visit]:
                    self._complete.append(visit)
                    self._graded.append(self._thread.submit(self._grade_complete))

    def micro_batches(self) -> list[MicroBatch]:
        """Return the micro-batches of groups that were graded since the last call.

        Raises what grading raised.
        """
        found: list[MicroBatch] = []
        while self._num_read < len(self._graded) and self._graded[self._num_read].done():
            groups = regroup(self._graded[self._num_read].result().rollouts)
            self._num_read += 1
            chosen = keep_informative(groups) if samples_dynamically(self._own) else groups
            for group in chosen:
                if visit_of(group.rollouts[0].completion.request_id) in self._packed:
                    (batch,) = step_batches([group], self._own, self._sampling)
                    found += batch.micro_batches
        return found

    def finish(self) -> Graded:
        """Wait for all grades and return them in the order of the requests; the rollout is over."""
        assert not any(self._missing.values()), "all completions are finished"
        parts = [each.result() for each in self._graded]
        self.close()
        names = (name for members in self._members.values() for name, _ in members)
        order = {name: number for number, name in enumerate(names)}

        def by_request(graded: Rollout | GradingFailure) -> int:
            return order[graded.completion.request_id]

        return Graded(
            rollouts=tuple(sorted((r for part in parts for r in part.rollouts), key=by_request)),
            failures=tuple(sorted((f for part in parts for f in part.failures), key=by_request)),
        )

    def close(self) -> None:
        """Wait for the task that is being graded, and drop the others."""
        self._thread.shutdown(cancel_futures=True)

    def _grade_complete(self) -> Graded:
        """Grade all groups that are complete now, in one call: graders share the work."""
        pairs: list[tuple[Prompt, Completion]] = []
        while self._complete:
            members = self._members[self._complete.popleft()]
            pairs += [(prompt, self._completions[name]) for name, prompt in members]
        return self._grader.grade(pairs)


def why_not(own: LearnerSection) -> str | None:
    """Return why no group can be learned from before the step's last completion is finished."""
    if own.mini_batches > 1:
        return f"learner.mini_batches = {own.mini_batches}: later updates need earlier ones"
    if own.sharding == "full":
        return "learner.sharding = 'full': the shards of a layer are computed by all workers"
    if not by_group(own):
        name = "loss" if own.advantage is None else "advantage"
        return f"learner.{name} = {getattr(own, name)!r}: its advantages need the whole batch"
    return None
