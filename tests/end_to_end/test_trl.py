"""TRL's trainers with longtail's engine: texts, metrics, checkpoints, processes."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import longtail
from longtail.errors import ConfigError
from support import toy, trl_jobs
from support.rank_processes import free_address

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of libraries that are not ours
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    yield
    del os.environ["TRL_EXPERIMENTAL_SILENCE"]


def train(
    out: Path,
    *,
    drafter: str = "none",
    trainer: str = "GRPO",
    resume_from: str | None = None,
    **changes: Any,
) -> Any:
    """Train; return the trainer, the texts and the rollouts."""
    import trl

    from longtail.integrations.trl import longtail_rollouts

    extra = {name: changes.pop(name) for name in ("peft_config",) if name in changes}
    recorder = trl_jobs.Recorder()
    args = trl_jobs.arguments(getattr(trl, f"{trainer}Config"), out, use_vllm=True, **changes)
    with longtail_rollouts(drafter=drafter) as rollouts:
        made = getattr(trl, f"{trainer}Trainer")(
            model=str(toy.REASONER),
            reward_funcs=recorder,
            train_dataset=trl_jobs.dataset(),
            args=args,
            callbacks=[rollouts.callback()],
            **extra,
        )
        made.train(resume_from_checkpoint=resume_from)
    return made, recorder.texts, rollouts


def rows(trainer: Any) -> list[dict[str, Any]]:
    """Return the logged rows of steps."""
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of three steps without drafts."""
    return train(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run with a drafter that begins fresh, saved after two steps."""
    out = tmp_path_factory.mktemp("drafted")
    return (*train(out, drafter="auto", save_strategy="steps", save_steps=2), out)


def test_texts_and_losses_do_not_depend_on_the_drafter(plain, drafted):
    assert plain[1] == drafted[1]
    assert len(plain[1]) == 3 * trl_jobs.COMPLETIONS
    assert [row["loss"] for row in rows(plain[0])] == [row["loss"] for row in rows(drafted[0])]
    assert len({tuple(text) for text in plain[1]}) > trl_jobs.COMPLETIONS
    for row in rows(plain[0]):  # the trainer's logprobs are the engine's, its log has our metrics
        assert row["sampling/sampling_logp_difference/mean"] < 1e-5
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["timing_s/gen"] > 0
        assert row["rollout/generated_tokens"] == row["completions/mean_length"] * 8
        assert "rollout/spec_accept_length" not in row
    speculating = [row for row in rows(drafted[0]) if "rollout/spec_accept_length" in row]
    assert speculating
    assert all(row["rollout/spec_accept_length"] >= 1 for row in speculating)
    assert all("drafter/version" in row for row in rows(drafted[0]))


def test_trls_own_class_is_back_after_the_context():
    import trl.generation.vllm_generation as own
    import trl.trainer.grpo_trainer as grpo
    import trl.trainer.rloo_trainer as rloo

    assert grpo.VLLMGeneration is rloo.VLLMGeneration is own.VLLMGeneration


def test_a_resumed_run_goes_on_with_its_texts_and_its_drafter_which_is_exported(drafted, tmp_path):
    _, texts, rollouts, out = drafted
    checkpoint = out / "checkpoint-2"
    assert (checkpoint / "longtail").is_dir()
    again, later, resumed = train(
        out, drafter="auto", resume_from=str(checkpoint), save_strategy="no"
    )
    assert later == texts[2 * trl_jobs.COMPLETIONS :]
    assert again.state.global_step == 3
    saved = sorted((checkpoint / "longtail").iterdir())
    assert [each.name for each in saved] == ["initial", "step_000002"]
    state = json.loads((saved[1] / "state.json").read_text())
    assert state["numbers"]["rollouts"] == 2
    assert resumed.session.drain_metrics() == {}
    place = rollouts.export(tmp_path / "drafter")
    assert {each.name for each in place.iterdir()} == {"config.json", "model.safetensors"}
    with pytest.raises(ConfigError, match="exists"):
        rollouts.export(place)


def test_rloo_generates_once_for_accumulated_gradients(tmp_path):
    half = trl_jobs.COMPLETIONS // 2
    trainer, texts, _ = train(
        tmp_path,
        trainer="RLOO",
        per_device_train_batch_size=half,
        gradient_accumulation_steps=2,
        max_steps=1,
    )
    assert len(texts) == trl_jobs.COMPLETIONS
    assert rows(trainer)[0]["rollout/generated_tokens"] == sum(map(len, texts))


def test_an_adapter_is_merged_into_the_weights_that_generate(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer, _, _ = train(tmp_path, peft_config=lora, max_steps=1)
    for row in rows(trainer):
        assert row["sampling/sampling_logp_difference/mean"] < 1e-4


def test_the_trainer_without_the_callback_is_refused(tmp_path):
    from trl import GRPOConfig, GRPOTrainer

    from longtail.integrations.trl import longtail_rollouts

    args = trl_jobs.arguments(GRPOConfig, tmp_path, use_vllm=True)
    made = {"reward_funcs": trl_jobs.Recorder(), "train_dataset": trl_jobs.dataset()}
    with (
        longtail_rollouts(),
        pytest.raises(ConfigError, match=r"callbacks=\[rollouts\.callback\(\)\]"),
    ):
        GRPOTrainer(model=str(toy.REASONER), args=args, **made)


def test_texts_do_not_depend_on_the_number_of_processes(plain, tmp_path):
    """Two processes with gloo, each with half a batch and a drafter that learns from both."""
    port = free_address().rpartition(":")[2]
    sources = Path(longtail.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, trl_jobs.__file__, str(tmp_path), "2"],
        env={
            **os.environ,
            "PYTHONPATH": f"{sources}{os.pathsep}{ROOT / 'tests'}",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "ACCELERATE_USE_CPU": "true",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    half = trl_jobs.COMPLETIONS // 2
    first = found[0]["texts"][:half] + found[1]["texts"][:half]
    recorder = trl_jobs.Recorder()
    recorder.texts = plain[1][: trl_jobs.COMPLETIONS]
    assert first == recorder.digests()
    logged = [row for row in found[0]["log"] if "loss" in row]
    assert [row["drafter/version"] for row in logged] == [0, 1]  # sums of both processes


TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}"
    "{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}"
    "{% endfor %}<eos>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def toy_with_tools(place: Path) -> None:
    """Write the toy so that its last sentence, "The answer is 8.", calls the example's tool."""
    from transformers import AutoTokenizer

    shutil.copytree(toy.REASONER, place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    function = {"name": "check", "arguments": {"total": "{content}"}}
    call = {"open": "The answer is ", "close_pattern": r"\.", "repeats": True, "content": "text"}
    call["transform"] = {"type": "function", "function": function}
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<assistant>",
        "fields": {"tool_calls": call, "content": {"close_pattern": "<eos>", "content": "text"}},
    }
    tokenizer.save_pretrained(place)


@pytest.mark.parametrize("name", ["trl_grpo", "trl_tools", "trl_peft"])
def test_an_example_runs(name, tmp_path, capsys):
    run = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    toy_with_tools(tmp_path / "toy")
    run["main"](str(tmp_path / "out"), str(tmp_path / "toy"), steps=1)
    printed = capsys.readouterr().out
    assert "timing_s/gen" in printed
    if name == "trl_tools":
        assert "tools/call_frequency 0.000" not in printed
