from longtail.rl.data.prompts import Taken
from longtail.rl.data.requests import regroup, requests_of
from longtail.sampling import noise_key
from longtail.types import Prompt, Rollout, SamplingParams
from support.rollouts import completion

P = Prompt(prompt_id="p/1", tokens=(3, 4), text="p")
Q = Prompt(prompt_id="q#2", tokens=(5,), text="q")
SAMPLING = SamplingParams(max_tokens=7)


def test_every_sample_epoch_seed_and_purpose_has_noise_of_its_own() -> None:
    epochs = [Taken(prompt=p, epoch=e) for p in (P, Q) for e in (0, 1, None)]
    other = requests_of(epochs[:1], samples=3, seed=1, sampling=SAMPLING).requests
    requests = [*requests_of(epochs, samples=3, seed=0, sampling=SAMPLING).requests, *other]
    assert len({r.noise_key for r in requests}) == len(requests) == 21
    assert requests[0].noise_key == noise_key(0, "p/1", 0, 0)


def test_rollouts_of_one_visit_are_a_group_and_two_visits_of_a_prompt_are_two() -> None:
    ids = ["p/1@0#0", "p/1@0#2", "p/1@1#0", "q#2@0#1"]  # some gradings failed
    rollouts = [
        Rollout(prompt=Q if id.startswith("q") else P, completion=completion(id, (1,)), reward=0.0)
        for id in ids
    ]
    groups = regroup(rollouts)
    assert [group.prompt for group in groups] == [P, P, Q]
    found = [[rollout.completion.request_id for rollout in group.rollouts] for group in groups]
    assert found == [ids[:2], ids[2:3], ids[3:]]
    assert regroup([]) == []
