"""`--model MODEL --prompts SOURCE`: a user's own model in benchmarks of rollouts and engines."""

from pathlib import Path
from typing import Any

import pytest

from end_to_end.workshop import Workshop, build, save_untaught, write_lines
from longtail.bench.engine.measure import make_subject as engine_subject
from longtail.bench.rollout.subjects import GROUP, chosen_subject
from longtail.errors import ConfigError, DataError
from longtail.model.hf.tokenizer import load_tokenizer
from support.benches import parse


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    workshop = build(tmp_path_factory.mktemp("own"))
    write_lines(workshop.prompts, *({"prompt": "say " + "x" * i} for i in range(1, 4)))
    return workshop


def options(name: str, workshop: Workshop, *words: str) -> Any:
    return parse(name, f"--model={workshop.model}", f"--prompts={workshop.prompts}", *words)


@pytest.mark.parametrize("name", ["rollout", "engine", "tuner"])
def test_a_model_needs_prompts_and_prompts_need_a_model(name: str) -> None:
    with pytest.raises(ConfigError, match="--model = 'here': give its prompts"):
        parse(name, "--model=here")
    with pytest.raises(ConfigError, match=r"--prompts = 'p.jsonl': it is for a model of your own"):
        parse(name, "--prompts=p.jsonl")


def test_the_tuner_needs_a_drafter_that_does_not_remember_texts() -> None:
    words = ("--model=here", "--prompts=p.jsonl")
    for more in ((), ("--drafter=history",)):
        with pytest.raises(ConfigError, match="give a trained drafter by --drafter DIR"):
            parse("tuner", *words, *more)
    assert parse("tuner", *words, "--drafter=there").dtype_name == "bfloat16"


def test_a_subject_has_the_model_its_chat_and_the_named_drafters(workshop: Workshop) -> None:
    drafter = save_untaught(workshop.model, workshop.path / "drafter")
    own = options("rollout", workshop, f"--drafter={drafter}", "--dtype=float32")
    assert own.model_names == (str(workshop.model),)
    subject = chosen_subject(str(workshop.model), own, print)
    assert list(subject.drafters) == ["history", "drafter"]
    assert subject.drafters["drafter"]() is not subject.drafters["drafter"]()
    tokenizer = load_tokenizer(workshop.model)
    said = tokenizer.chat([{"role": "user", "content": "say x"}])
    assert list(subject.prompts[:GROUP]) == [said] * GROUP
    assert subject.sampling.stop_token_ids == tokenizer.eos_ids
    assert len(subject.prompts) == 3 * GROUP


def test_prompts_of_engines_have_one_length_and_repeat(workshop: Workshop) -> None:
    own = options("engine", workshop, "--batches=1,5", "--dtype=float32")
    subject = engine_subject(str(workshop.model), own, print)
    lengths = {len(prompt) for prompt in subject.prompts}
    assert lengths == {subject.prompt_len}
    assert len(subject.prompts) == 5
    assert subject.prompts[0] == subject.prompts[3] != ()


def test_a_mistake_names_the_option(workshop: Workshop, tmp_path: Path) -> None:
    wrong = options("rollout", workshop, "--drafter=nowhere", "--dtype=float32")
    with pytest.raises(ConfigError, match="--drafter = 'nowhere'"):
        chosen_subject(str(workshop.model), wrong, print)
    lost = parse("rollout", f"--model={workshop.model}", "--prompts=nowhere.jsonl")
    with pytest.raises(DataError, match=r"--prompts = 'nowhere.jsonl'"):
        chosen_subject(str(workshop.model), lost, print)
    nowhere = parse("rollout", f"--model={tmp_path / 'no'}", f"--prompts={workshop.prompts}")
    with pytest.raises(ConfigError, match="--model"):
        chosen_subject(str(tmp_path / "no"), nowhere, print)
