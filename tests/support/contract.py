"""Laws that hold for every `Generator`, as functions of one; no test framework is needed.

`tests/laws/test_generators.py` calls them with longtail's engine, `tests/vllm_wheel` with vLLM.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from longtail.assembly.drafters import FRESH, Target
from longtail.assembly.plan import RunPlan, plan_run
from longtail.assembly.worker import open_own
from longtail.config.rl import RunConfig
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.weights import DRAFT_IDS, copy_parameters
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import RequestError
from longtail.generator import Generator, StepReport
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.hf.weights import hf_rows
from longtail.rl.logprobs import score
from longtail.rl.packing import lay_out
from longtail.sampling import noise_key
from longtail.speculation.drafter import Statistics
from longtail.types import Completion, Request, SamplingParams
from support import toy
from support.engine_requests import request_of
from support.environments import in_episodes, requests_of

LIMITS = EngineLimits(max_running=4, max_step_tokens=48, max_len=112)
NUM_REQUESTS = 12
DRAFTERS = (str(toy.DRAFTERS["eagle1"]), str(toy.DRAFTERS["eagle3"]), "history")
"""Drafters that draft from the first step on."""
_KINDS: Sequence[dict[str, object]] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 12},
    {"temperature": 0.0},
    {"temperature": 1.0, "stop": ("and",)},
)

Opened = tuple[Generator, LoadedDrafter | None]
Open = Callable[[str], AbstractContextManager[Opened]]
"""Opens a generator of the toy model with a drafter by its name."""


def toy_target(seed: int | None = None) -> Target:
    """Return the toy model, or with `seed` one with other weights, in float32."""
    model = load_model(toy.REASONER, torch.float32, "cpu")
    if seed is not None:
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=random))
    return Target(
        model=model,
        tokenizer=load_tokenizer(toy.REASONER),
        directory=toy.REASONER,
        name=str(toy.REASONER),
    )


def plan(drafter: str, **rollout: object) -> RunPlan:
    """Return the plan of a run with the toy model."""
    sections = {
        "model": {"path": str(toy.REASONER)},
        "rollout": {"dtype": "float32", **rollout},
        "speculation": {"drafter": drafter},
    }
    return plan_run(RunConfig.model_validate(sections), toy.REASONER)


def requests(num: int = NUM_REQUESTS, max_tokens: int = 40) -> list[Request]:
    """Return requests of all kinds, two for each prompt; one prompt is longer than a step."""
    target, made = toy_target(), []
    for index in range(num):
        text = f"{index // 2} : {index // 2 + 13} {index % 3} " * (6 if index == 7 else 1)
        kind = {"max_tokens": max_tokens, **_KINDS[index % len(_KINDS)]}
        prompt, key = target.tokenizer.encode(text), noise_key(3, "contract", index)
        ends = target.tokenizer.eos_ids
        made.append(
            request_of(f"r{index}", prompt, key, f"g{index // 2}", stop_token_ids=ends, **kind)
        )
    return made


def texts(done: Sequence[Completion]) -> list[tuple[object, ...]]:
    """Return all of the completions but their logprobs, which are rounded."""
    return [(each.tokens, each.text, each.finish_reason, each.policy_version) for each in done]


def wander(
    generators: Sequence[Generator], requests: Sequence[Request], seed: int
) -> list[Completion]:
    """Write texts that are given up at random steps, twice at most, and then begin again."""
    choose, times = random.Random(seed), dict.fromkeys(requests, 0)
    done: dict[str, Completion] = {}
    for request in requests:
        choose.choice(generators).submit(request)
    while len(done) < len(requests):
        for generator in (each for each in generators if each.num_unfinished):
            done |= {each.request_id: each for each in generator.step().finished}
            for request in requests:
                is_here = generator.is_unfinished(request.request_id)
                if is_here and times[request] < 2 and choose.random() < 0.15:
                    times[request] += 1
                    generator.abort(request.request_id)
                    choose.choice(generators).submit(request)
    return [done[each.request_id] for each in requests]


def refusal(act: Callable[[], object]) -> str:
    """Return the message of a refusal; empty if nothing is refused."""
    try:
        act()
    except RequestError as error:
        return str(error)
    return ""


def episodes(generator: Generator) -> list[tuple[object, ...]]:
    """Write episodes of several turns; return all of them but their logprobs."""
    sampling = SamplingParams(max_tokens=40, stop_token_ids=tuple(range(0, 188, 9)))
    written = in_episodes(generator, max_len=LIMITS.max_len).generate(requests_of(6, sampling))
    assert any(each.episode and len(each.episode.rewards) > 1 for each in written)
    return [
        (*whole, each.episode and each.episode.messages)
        for whole, each in zip(texts(written), written, strict=True)
    ]


def law_1_drafts_change_no_text(opening: Open) -> None:
    """Drafts, accepted or not, change no text."""
    with opening("none") as (generator, _):
        plain, turns = texts(generator.generate(requests())), episodes(generator)
    assert len({reason for _, _, reason, _ in plain}) == 2, "ends of both kinds"
    for name in DRAFTERS:
        reports: list[StepReport] = []
        with opening(name) as (generator, _):
            drafted = texts(generator.generate(requests(), reports.append))
            again = texts(generator.generate(requests(), reports.append))
            assert episodes(generator) == turns, name
        verified = [each for report in reports for each in report.verified]
        assert drafted == again == plain, name
        assert name == "history" or sum(each.num_accepted for each in verified) > 0, name
        assert all(each.num_accepted <= each.num_drafted for each in verified), name


def law_1_texts_are_those_of_longtails_engine(opening: Open) -> None:
    """Every generator writes the texts of longtail's engine from equal weights and keys."""
    target = toy_target()
    own = open_own(plan("none"), LIMITS, [], target.tokenizer)[0]
    with opening(DRAFTERS[0]) as (generator, _):
        assert texts(generator.generate(requests())) == texts(own.generate(requests()))
        assert episodes(generator) == episodes(own)


def law_1_a_text_that_is_given_up_is_written_again(opening: Open) -> None:
    """It is the same text, and counts once."""
    asked = requests()
    for name in (DRAFTERS[1], FRESH):
        with opening(name) as (generator, _):
            plain, counted = generator.generate(asked), _num_counted(generator)
            assert texts(wander([generator], asked, seed=5)) == texts(plain), name
            assert _num_counted(generator) == counted, name


def _statistics(generator: Generator) -> Statistics | None:
    """Return what adds up the texts of longtail's engine for a drafter; None in another one."""
    speculation: Speculation | None = getattr(generator, "speculation", None)
    return None if speculation is None else speculation.statistics


def _num_counted(generator: Generator) -> float | None:
    """Return the number of tokens in the sums since the last call; None without sums."""
    found = _statistics(generator)
    return None if found is None else found.take().num_tokens


def law_3_logprobs_are_the_learners(opening: Open) -> None:
    """The logprob of each token is that of the learner."""
    target = toy_target()
    with opening(DRAFTERS[0]) as (generator, _):
        asked = requests()
        done = generator.generate(asked)
    assert_logprobs_of(target, asked, done)


def assert_logprobs_of(
    target: Target, asked: Sequence[Request], done: Sequence[Completion]
) -> None:
    """Check the logprobs of sampled tokens; those of greedy ones are 0."""
    for request, each in zip(asked, done, strict=True):
        if request.sampling.temperature == 0:
            continue
        tokens = (*request.prompt_tokens, *each.tokens)
        packed = lay_out([tokens], prompt_lens=[len(request.prompt_tokens)])
        with torch.no_grad():
            own = score(target.model, packed, request.sampling).logprobs
        gap = (own - torch.tensor(each.logprobs)).abs().max()
        assert gap < 1e-4, f"{request}: {gap}"


def law_4_no_request_depends_on_its_neighbours(opening: Open) -> None:
    """Order and company change no text."""
    asked = requests()
    with opening(DRAFTERS[0]) as (generator, _):
        together = texts(generator.generate(asked))
        backwards = texts(generator.generate(asked[::-1]))[::-1]
        alone = [texts(generator.generate([request]))[0] for request in asked[:4]]
    assert backwards == together
    assert alone == together[:4]


def law_6_no_text_begins_under_old_weights(opening: Open) -> None:
    """All texts after a pull are the new policy's, whatever was under way before it."""
    asked, new = requests(), toy_target(seed=1)
    with opening("none") as (generator, _):
        before = texts(generator.generate(asked))
        generator.submit(asked[0])
        generator.step()
        refused = refusal(lambda: generator.load_policy(7, hf_rows(new.model).items()))
        assert "1 requests are unfinished" in refused
        generator.abort(asked[0].request_id)
        generator.load_policy(7, hf_rows(new.model).items())
        after = generator.generate(asked)
        again = generator.generate(asked)
    assert {each.policy_version for each in after} == {7} == {generator.policy_version}
    assert texts(after) == texts(again)
    assert sum(old[0] != each.tokens for old, each in zip(before, after, strict=True)) > 8
    assert_logprobs_of(new, asked, after)


def law_7_a_drafter_is_adopted_in_mid_text(opening: Open) -> None:
    """Weights that come between two steps change no text, and speed it up from then on."""
    with opening("none") as (generator, _):
        plain = texts(generator.generate(requests()))
    reports: list[StepReport] = []
    with opening(FRESH) as (generator, _):
        if (written := _statistics(generator)) is not None:
            written.take()
        first = generator.generate(requests(), reports.append)
        if written is None:  # it learns by itself
            assert texts(generator.generate(requests(), reports.append)) == plain == texts(first)
            assert any(each.num_accepted for report in reports for each in report.verified)
        else:
            assert not any(report.verified for report in reports)
            sums = written.take()
            assert sums.num_tokens == sum(max(len(each.tokens) - 1, 0) for each in first)
            ends = toy_target().tokenizer.eos_ids
            drafter: Mapping[str, torch.Tensor] = sums.weights(ends)
            assert DRAFT_IDS in drafter
            adopted = _adopting(generator, drafter, reports)
            assert adopted == plain == texts(first)
    if written is None:
        with opening(DRAFTERS[0]) as (generator, learned):
            assert learned is not None
            weights = copy_parameters(learned.layer, learned.draft_ids)
            reports.clear()
            assert _adopting(generator, weights, reports) == plain
    verified = [each for report in reports for each in report.verified]
    assert sum(each.num_accepted for each in verified) > len(verified) / 4


def _adopting(
    generator: Generator, drafter: Mapping[str, torch.Tensor], reports: list[StepReport]
) -> list[tuple[object, ...]]:
    """Return the texts of a generator that takes a drafter's weights every 20 steps."""
    for request in requests():
        generator.submit(request)
    done: dict[str, Completion] = {}
    while generator.num_unfinished:
        if len(reports) % 20 == 5:
            generator.load_drafter(drafter)
        report = generator.step()
        reports.append(report)
        done |= {each.request_id: each for each in report.finished}
    return texts([done[each.request_id] for each in requests()])


def a_request_that_cannot_be_served_is_refused(opening: Open) -> None:
    """Nothing is begun for it."""
    (good,) = requests(1)
    with opening("none") as (generator, _):
        for bad, message in (
            ({"prompt_tokens": ()}, "empty prompt"),
            ({"prompt_tokens": (10**6,)}, "vocabulary"),
            ({"prompt_tokens": (1,) * 100}, "over the engine's 112"),
        ):
            values = {name: getattr(good, name) for name in ("request_id", "noise_key", "sampling")}
            request = Request(**values, **bad)  # type: ignore[arg-type]
            assert message in refusal(lambda request=request: generator.submit(request))
        assert generator.num_unfinished == 0
        assert generator.generate([good])[0].request_id == good.request_id


LAWS = (
    law_1_texts_are_those_of_longtails_engine,
    law_1_a_text_that_is_given_up_is_written_again,
    law_3_logprobs_are_the_learners,
    law_4_no_request_depends_on_its_neighbours,
    law_6_no_text_begins_under_old_weights,
    law_7_a_drafter_is_adopted_in_mid_text,
    a_request_that_cannot_be_served_is_refused,
    law_1_drafts_change_no_text,
)
