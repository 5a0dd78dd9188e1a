"""Laws of coupled drafts in a real vLLM that runs its V1 model runner on the CPU."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longtail.assembly.drafters import read_drafter
from longtail.cluster.work.publisher import DrafterState
from longtail.drafter.formats.checkpoint import LoadedDrafter, load_unbound
from longtail.drafter.formats.layouts import write_layout
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.ridge.trainer import RidgeTrainer
from longtail.drafter.weights import copy_parameters, with_prefix
from longtail.programs.drafter_eval import complete, find_prompts, open_target
from longtail.rl.data.examples import Example
from longtail.rl.packing import pack_texts
from longtail.run.drafter_store import DrafterStore
from longtail.sampling import noise_key
from longtail.types import SamplingParams
from support import toy
from vllm_wheel.runs import NEEDS_VLLM, play

pytestmark = NEEDS_VLLM
_NUM_PROMPTS = 14
DRAFTING = ("eagle1", "ridge", "draft_model", "cramped")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Play all scenes once; `own` are the texts of longtail's engine at temperature 1."""
    root = tmp_path_factory.mktemp("wheel")
    asked = Namespace(
        target=str(toy.REASONER), drafter="history", prompts=str(toy.PROBLEMS), dtype="float32",
        n=_NUM_PROMPTS, max_tokens=48, seed=0,
    )  # fmt: skip
    target = open_target(asked)
    prompts = find_prompts(asked, target)
    paths = {"target": str(target.directory)}
    for recipe in ("eagle1", "eagle3"):
        loaded = read_drafter(str(toy.DRAFTERS[recipe]), target, print, torch.float32)
        assert loaded is not None
        if recipe == "eagle3":
            worse = loaded.copied()
            worse.layer.initialize(torch.Generator().manual_seed(0))
            _write(root / "worse", worse, target)
            _publish(root / "run", worse, loaded)
            paths |= {"worse": str(root / "worse"), "run": str(root / "run" / "drafter")}
        _write(root / recipe, loaded, target)
        paths[recipe] = str(root / recipe)
    _write(root / "ridge", _ridge(prompts, asked).as_eagle(), target)
    paths["ridge"] = str(root / "ridge")
    seeds = [noise_key(0, "drafter eval", index) for index in range(_NUM_PROMPTS)]
    job = paths | {"prompts": prompts, "seeds": seeds, "saved": str(root / "saved")}
    job |= {"runner": "v1", "turns": 5, "scenes": ["plain", "eagle3", "learned", "live", *DRAFTING]}
    done = play("scenes.py", json.dumps(job))
    assert done.returncode == 0, done.stderr[-3000:]
    own = complete(target, prompts, SamplingParams(max_tokens=48), None)[0]
    return {**json.loads(done.stdout), "own": [list(each.tokens) for each in own]}


def _ridge(prompts: Sequence[tuple[int, ...]], asked: Namespace) -> LoadedDrafter:
    """Return the ridge drafter of texts after these prompts."""
    target, written = open_target(asked), open_target(asked)
    done = complete(written, prompts, SamplingParams(max_tokens=48), None)[0]
    texts = [
        Example(tokens=(*prompt, *each.tokens), prompt_len=len(prompt))
        for prompt, each in zip(prompts, done, strict=True)
    ]
    trainer = RidgeTrainer(RidgeLayer(RidgeConfig(target=target.model.config)), target.model)
    trainer.step(list(pack_texts(texts, 1024)))
    eagle = read_drafter(str(toy.DRAFTERS["eagle1"]), target, print, torch.float32)
    assert eagle is not None
    return replace(eagle, layer=trainer.layer, draft_ids=None)


def _write(path: Path, loaded: Any, target: Any) -> None:
    loaded = loaded.copied()
    loaded.layer.fold()
    write_layout(path, loaded, target.model)


def _publish(run: Path, first: Any, newest: Any) -> None:
    """Write the drafter folder of a run that began with `first` and published `newest`."""
    first.save(run / "drafter" / "initial")
    tensors = with_prefix("drafter/", copy_parameters(newest.layer, newest.draft_ids))
    store = DrafterStore(run / "drafter")
    store.save(3, DrafterState(tensors=tensors, numbers={"version": 5}))


@pytest.mark.parametrize("scene", DRAFTING)
def test_texts_do_not_depend_on_drafts(played: dict[str, Any], scene: str) -> None:
    assert played[scene]["tokens"] == played["plain"]["tokens"]
    assert played[scene]["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0


def test_texts_do_not_depend_on_order_or_the_prefix_cache(played: dict[str, Any]) -> None:
    for turn in played["eagle3"]:
        assert turn["tokens"] == played["plain"]["tokens"]


def test_logprobs_are_those_of_plain_decoding(played: dict[str, Any]) -> None:
    for plain, drafted in zip(
        played["plain"]["logprobs"], played["eagle3"][0]["logprobs"], strict=True
    ):
        assert plain == pytest.approx(drafted, abs=1e-4)


def test_vllm_writes_the_texts_of_longtails_engine(played: dict[str, Any]) -> None:
    ours = [played["own"][index] for index in range(0, _NUM_PROMPTS, 7)]
    theirs = [played["plain"]["tokens"][index] for index in range(0, _NUM_PROMPTS, 7)]
    assert ours == theirs


def test_preempted_requests_keep_their_texts(played: dict[str, Any]) -> None:
    assert played["cramped"]["metrics"]["vllm:num_preemptions"] > 0


def accept_length(earlier: dict[str, Any], later: dict[str, Any]) -> float:
    """Tokens per verification step between two readings of vLLM's counters."""
    drafts, accepted = (
        later["metrics"][name] - earlier.get("metrics", {}).get(name, 0.0)
        for name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    )
    return 1 + accepted / drafts


def accepted_share(earlier: dict[str, Any], later: dict[str, Any]) -> float:
    """Accepted share of the drafted tokens, whatever depths the seconds of steps led to."""
    drafted, accepted = (
        later["metrics"][name] - earlier["metrics"][name]
        for name in (
            "vllm:spec_decode_num_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens",
        )
    )
    return accepted / drafted


def test_vllm_reads_the_exported_ridge_drafter_rightly(played: dict[str, Any]) -> None:
    """A layout that is read wrongly, by a layer or a position, drafts almost nothing right."""
    assert accept_length({}, played["ridge"]) > 1.5


def test_vllm_learns_a_drafter_from_nothing(played: dict[str, Any]) -> None:
    learned = played["learned"]
    for turn in (*learned["turns"], learned["renewed"]):
        assert turn["tokens"] == played["plain"]["tokens"]
    assert learned["turns"][-1]["metrics"]["vllm:num_preemptions"] > 0
    assert accepted_share(learned["turns"][-2], learned["turns"][-1]) > 0.5
    status = learned["status"]["learned"]
    assert status["tokens"] > 1000
    assert status["accept_length"] > 1.2
    saved = load_unbound(Path(learned["saved"]))
    assert isinstance(saved.layer, RidgeLayer)
    assert saved.sums["counts"].sum() > 0


def test_a_drafter_is_adopted_while_running(played: dict[str, Any]) -> None:
    live = played["live"]
    for turn in ("before", "after", "still", "of_run"):
        assert live[turn]["tokens"] == played["plain"]["tokens"]
    before, trained = accept_length({}, live["before"]), accept_length(live["after"], live["still"])
    assert trained > 2 * before
    assert accept_length(live["still"], live["of_run"]) == pytest.approx(trained, rel=0.05)
    assert [version for _, version in live["adopted"]] == [None, 5]


def test_what_does_not_fit_is_refused_before_anything_changes(played: dict[str, Any]) -> None:
    assert "give a drafter trained from that one" in played["live"]["refused"]
