"""Configuration of `longtail train`: one frozen tree of pydantic models.

`load` reads a TOML file, applies command-line options and validates. It opens no model and no data
file.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from longtail.config import files
from longtail.config.losses import ADVANTAGES, LOSSES, choices
from longtail.config.rewards import ENVIRONMENT, EnvironmentSection, RewardSection
from longtail.config.sections import (
    Amount,
    CommonRunSection,
    Count,
    Dtype,
    Generated,
    HeldOut,
    ModelSection,
    Name,
    NotNegative,
    OptimizerSection,
    Positive,
    Processes,
    PromptSection,
    Samples,
    Seconds,
    Section,
    Table,
    Temperature,
    Text,
)
from longtail.system.machine import MAX_INT32, is_path, module_hint

REASONING_GYM = "reasoning_gym"
RUNNING_SUMS = "running_sums"
SEEDS = "seeds"


class DataSection(PromptSection):
    """Prompts to train on, and held-out prompts."""

    source: Name = RUNNING_SUMS
    """A .jsonl or .parquet file, `hf:OWNER/NAME[/CONFIG][:SPLIT]` (a dataset of the hub),
    `hf:DIR[:SPLIT]`, `reasoning_gym:TASK`, `reasoning_gym:FILE.yaml` (a mixture of tasks, as its
    CompositeConfig), `running_sums` (additions of several numbers), or `seeds` (numbers, for
    environments that begin by one)."""
    heldout: Name | None = None
    """Source of held-out prompts, in the same forms; unset uses the last `heldout_size` rows of
    `source`, or generates others for `running_sums`."""
    heldout_size: HeldOut = 64
    """Number of held-out prompts, for the evaluation before and after."""
    size: Generated = 2048
    """Number of prompts of a generated source; files give all their rows."""
    answer_column: Name | None = None
    """Column with the reference answer; unset tries TRL's and verl's names."""
    max_prompt_len: Count = 512
    """Longest prompt in tokens, chat template applied; a longer one is an error unless
    `drop_long_prompts`."""
    drop_long_prompts: bool = False
    """Whether to leave out and count prompts over `max_prompt_len` instead of stopping."""
    drop_ungradable: bool = False
    """Whether to leave out and count rows whose reference answer the reward cannot use."""
    shuffle: bool = True
    """Whether prompts come in a new order each epoch, drawn from the run's seed."""


_MOST_SEQUENCES = 1_000_000


class RolloutSection(Section):
    """Generation of completions."""

    engine: Literal["auto", "own", "vllm"] = "auto"
    """`own`: longtail's engine, on CPUs, for the families of its decoder. `vllm`: vLLM in each
    worker's process, for any architecture. `auto`: `own` where it can run, else `vllm`."""
    vllm: Table | None = None
    """Arguments of vLLM's engine: {gpu_memory_utilization = 0.5, enable_sleep_mode = true}."""
    prompts_per_step: Count = 16
    """Number of prompts per step, each with `group_size` completions."""
    group_size: Count = 8
    """Number of completions per prompt."""
    max_tokens: Count = 2048
    """Longest completion in tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature; not 0, because greedy completions of a group are equal."""
    top_k: Amount = 0
    """Sample from the k most likely tokens; 0 keeps every token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that hold this probability; 1 keeps every token."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Least probability of a token, relative to the most likely one; 0 keeps every token."""
    stop: tuple[Name, ...] = ()
    """Strings that end a completion, in addition to the tokenizer's end-of-sequence token."""
    max_running: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Largest number of requests that generate at the same time."""
    max_step_tokens: Count = 512
    """Most tokens of one engine step; longer prompts are prefilled in chunks."""
    kv_tokens: Amount = 0
    """Capacity of the KV cache in tokens; 0 fits `max_running` longest requests."""
    dtype: Dtype = "auto"
    """Type of the weights and the KV cache during generation; `auto` is bfloat16 where it is fast
    (native kernels, a processor that multiplies it), else float32."""


class SpeculationSection(Section):
    """Speculative decoding of rollouts: changes speed, never a token."""

    drafter: Name = "auto"
    """`none`, `history` (copies from the prompt's completions), `phrases` (copies from all
    completions), `module:Class` (yours, without weights), `fresh` (a ridge drafter that learns in
    the run), or a directory: of a drafter, of a run that trained one, or published (vLLM's layout).
    `+` joins several. `auto` is the drafter of the run, else `fresh`, with `history+phrases`."""
    tuner: Literal["budget", "fixed", "off"] = "budget"
    """Policy for how much to draft, and when not to: `budget` (measured cost and calibrated
    acceptance), `fixed` (the next four fields), `off`."""
    depth: Annotated[int, Field(ge=1, le=32)] = 4
    """Fixed: number of tokens drafted ahead, one drafter pass each."""
    width: Annotated[int, Field(ge=1, le=8)] = 1
    """Fixed: number of alternatives per token; 1 drafts a chain."""
    size: Annotated[int, Field(ge=0, le=60)] = 0
    """Fixed: number of drafted tokens verified per request, the most likely ones; 0 is `depth`."""
    max_running: Amount = 32
    """Fixed: largest number of running requests at which to draft; 0 is unlimited."""
    coupled: bool = True
    """Whether the drafter draws with the policy's own noise; off only to compare."""


class SpotSection(Section):
    """Training of the drafter during the run."""

    train: Literal["spot", "never"] = "spot"
    """When an EAGLE drafter is trained. `spot`: by workers without requests, until the
    rollout ends; by a single worker after each rollout, for a tenth of its time. A ridge drafter
    learns from every completion. `never`: no drafter learns."""
    learning_rate: Positive = 1e-3
    """Learning rate of AdamW, for vectors and norms; for all weights if `matrix_rate` is 0."""
    matrix_rate: NotNegative | None = None
    """Learning rate of Muon, for the matrices; 0 uses AdamW for them, too; unset is 0.005."""
    batch_tokens: Annotated[int, Field(ge=16, le=MAX_INT32)] = 768
    """Tokens of one update; small, so that idle time has several and they can be measured."""
    buffer_mb: Count = 64
    """Most memory for training sequences, in MiB."""
    features_mb: Amount = 64
    """Most memory for features captured during the rollout, in MiB; 0 recomputes them."""


class ClusterSection(Section):
    """Worker processes."""

    workers: Processes = 1
    """Number of processes that generate and learn; more than one are Ray actors (extra
    `cluster`)."""
    min_workers: Annotated[int, Field(ge=0)] = 0
    """Number of workers that a run needs; the others take part once hosts have room. 0 is all."""
    gpus_per_worker: Annotated[float, Field(ge=1e-4, le=64)] | None = None
    """GPUs of a worker; 0.5 puts two on each. Unset is vLLM's tensor_parallel_size, or 1."""
    address: Text = ""
    """Address of a Ray cluster, as `ray.init` takes it; empty starts a local Ray."""
    worker_timeout_s: Seconds = 180.0
    """Seconds without progress after which a worker is replaced."""


class LoraSection(Section):
    """Adapters that learn beside frozen weights."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rank of the matrices of an adapter."""
    alpha: Positive = 32.0
    """Scale of the adapters, times the rank."""
    targets: Annotated[tuple[Name, ...], Field(min_length=1)] = ("all-linear",)
    """Modules with an adapter, by the ends of their names; `all-linear` is all but the head."""


class LearnerSection(OptimizerSection):
    """Updates of the policy."""

    model: Literal["auto", "own", "transformers"] = "auto"
    """Code of the model that learns: `own` (longtail's decoder; Llama, Mistral, Qwen2 and Qwen3),
    `transformers` (any causal language model that it has), or `auto`: `own` for its families,
    unless `lora` is set, which needs `transformers`."""
    lora: LoraSection | None = None
    """Adapters (LoRA by `peft`, extra `lora`) that learn beside frozen weights: {rank = 16, alpha =
    32, targets = ["all-linear"]}, each with this default; unset trains all weights."""
    loss: Name = Field(default="grpo", description=f"Policy-gradient loss: {choices(LOSSES)}.")
    advantage: Name | None = Field(
        default=None, description=f"Advantages: {choices(ADVANTAGES)}; unset, those of the loss."
    )
    mini_batches: Count = 1
    """Number of optimizer updates per step; 1 is strictly on-policy."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Ratio clipping below 1; unset is the loss's own (grpo 0.2, gspo 3e-4)."""
    clip_high: Positive | None = None
    """Ratio clipping above 1; unset is the loss's own (grpo 0.2, dapo 0.28)."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence from the initial policy; 0 keeps no reference model."""
    tis_cap: Annotated[float, Field(gt=1)] | None = None
    """Cap of the truncated importance weights min(learner/rollout, cap), which correct the gap
    between rollout and learner; unset logs the gap without correcting it."""
    streaming: bool | None = None
    """Whether idle workers learn from finished groups while others still generate; the
    update is the same. Unset is on where one worker can learn from a group by itself."""
    dynamic_sampling: bool | None = None
    """Whether to leave out groups with equal rewards, and to sample further prompts for them; unset
    is the loss's own (on for dapo)."""
    max_refills: Annotated[int, Field(ge=0, le=1000)] = 9
    """Dynamic sampling: most further rounds of a step until `rollout.prompts_per_step` groups have
    unequal rewards; 0 only leaves groups out. DAPO's max_num_gen_batches is one more."""
    overlong_buffer: Amount = 0
    """Number of tokens before `rollout.max_tokens` with DAPO's soft length penalty; 0 is off."""
    tokens_per_micro_batch: Count = 8192
    """Tokens of one forward and backward pass; a longer sequence gets a pass of its own."""
    gradient_checkpointing: bool = False
    """Whether the backward pass recomputes activations; on a CPU, those without free memory."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the master weights; float64 is the reference."""
    sums: Literal["auto", "exact", "float"] = "auto"
    """Sums of gradients: `exact` (8 bytes a weight) has the same bits for any number and order of
    workers, `float` takes half of that; `auto` is `exact` where the device has room."""
    sharding: Literal["none", "full"] = "none"
    """`full`: each worker holds one shard of master weights, gradients, moments and reference
    (FSDP2), and all weights in main memory. A lost worker ends the run, which can be resumed."""


class EvalSection(Section):
    """Held-out evaluation, before the first step and after the last."""

    samples: Samples = 2
    """Number of completions per held-out prompt, with the rollout's sampling parameters."""
    every: Amount = 0
    """Number of steps between further evaluations; 0 makes none."""


class RunSection(CommonRunSection):
    """The run as a whole."""

    dir: Name = "runs/default"
    """Directory of config, metrics, rollouts, checkpoints and the summary."""
    steps: Count = 100
    """Number of rollout-and-update steps, those before a resume included."""
    save_rollouts: bool = True
    """Whether every graded completion is appended to rollouts.jsonl, and its drafted tokens to
    drafts.jsonl."""


class RunConfig(Section):
    """The whole configuration of `longtail train`."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    environment: EnvironmentSection = EnvironmentSection()
    reward: Annotated[RewardSection, Field(validate_default=True)] = RewardSection()
    rollout: RolloutSection = RolloutSection()
    speculation: SpeculationSection = SpeculationSection()
    spot: SpotSection = SpotSection()
    cluster: ClusterSection = ClusterSection()
    learner: LearnerSection = LearnerSection()
    eval: EvalSection = EvalSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "RunConfig":
        problems = [
            *_reward_problems(self),
            *_cluster_problems(self),
            *_rollout_problems(self),
            *_learner_problems(self),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @field_validator("reward")
    @classmethod
    def _reward_of_source(cls, reward: RewardSection, info: Any) -> RewardSection:
        """Fill in the reward that belongs to environment or source, if none was named."""
        data, environment, own = info.data.get("data"), info.data.get("environment"), reward.name
        if data is not None and data.source.partition(":")[0] == REASONING_GYM:
            own = REASONING_GYM
        if environment is not None and environment.name is not None:
            own = ENVIRONMENT
        if own == reward.name or "name" in reward.model_fields_set:
            return reward
        return reward.model_copy(update={"name": own})

    def longest(self, prompt_len: int) -> int:
        """Return the most tokens of a prompt of this length with its completion."""
        own = self.environment
        return prompt_len + self.rollout.max_tokens + (own.max_observed if own.is_on else 0)

    @property
    def running(self) -> int:
        """Most completions that run on a worker at a time."""
        own = self.rollout
        shard = -(-own.prompts_per_step * own.group_size // self.cluster.workers)
        return min(own.max_running, shard)

    @property
    def is_sharded(self) -> bool:
        """Whether several workers hold one shard of the learner each."""
        return self.learner.sharding == "full" and self.cluster.workers > 1


def load(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of `longtail train`. Raises ConfigError with every problem found.

    Example: load(Path("run.toml"), ["--learner.loss", "dapo", "--run.steps=20"])
    """
    return files.resolve(RunConfig, path, overrides)


def _reward_problems(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.per == "group" and ":" not in reward.name:
        yield (
            f"reward.per = 'group': reward.name = {reward.name!r} grades each completion by "
            "itself; name a module:function, or leave it out"
        )


def _cluster_problems(config: RunConfig) -> Iterator[str]:
    least, most = config.cluster.min_workers, config.cluster.workers
    if least > most:
        yield f"cluster.min_workers = {least}: cluster.workers = {most} is fewer; raise it"
    if 0 < least < most and config.is_sharded:
        yield f"cluster.min_workers = {least}: learner.sharding = 'full' needs all; leave it out"


def _rollout_problems(config: RunConfig) -> Iterator[str]:
    rollout, data = config.rollout, config.data
    if config.reward.name == ENVIRONMENT and config.environment.name is None:
        yield f"reward.name = {ENVIRONMENT!r}: no environment gives it; set environment.name"
    longest = config.longest(data.max_prompt_len)
    sequences = rollout.prompts_per_step * rollout.group_size
    if sequences > _MOST_SEQUENCES:
        yield (
            f"rollout.prompts_per_step = {rollout.prompts_per_step}: with rollout.group_size = "
            f"{rollout.group_size} a step has {sequences} completions, and the most is "
            f"{_MOST_SEQUENCES}"
        )
    if 0 < rollout.kv_tokens < longest:
        yield (
            f"rollout.kv_tokens = {rollout.kv_tokens}: the longest request takes {longest} "
            f"(data.max_prompt_len {data.max_prompt_len} + rollout.max_tokens "
            f"{rollout.max_tokens}); use at least that, or 0"
        )
    if rollout.max_step_tokens < rollout.max_running:
        yield (
            f"rollout.max_step_tokens = {rollout.max_step_tokens}: each of rollout.max_running = "
            f"{rollout.max_running} requests takes a token of every step; use at least that"
        )
    generated = data.source.partition(":")[0] in (REASONING_GYM, SEEDS)
    if generated and data.heldout is None and data.heldout_size >= data.size:
        yield (
            f"data.heldout_size = {data.heldout_size}: data.size = {data.size} prompts include the "
            "held-out ones, and none would be left to train on"
        )


def _learner_problems(config: RunConfig) -> Iterator[str]:
    rollout, learner = config.rollout, config.learner
    sequences = rollout.prompts_per_step * rollout.group_size
    for field, known in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        name = getattr(learner, field)
        if name is not None and name not in known and not is_path(name):
            yield f"learner.{field} = {name!r}: it must be {choices(known)}{module_hint(name)}"
    if learner.mini_batches > sequences:
        yield (
            f"learner.mini_batches = {learner.mini_batches}: a step has only {sequences} "
            "completions (rollout.prompts_per_step x rollout.group_size)"
        )
    if learner.overlong_buffer >= rollout.max_tokens:
        yield (
            f"learner.overlong_buffer = {learner.overlong_buffer}: it must be less than "
            f"rollout.max_tokens = {rollout.max_tokens}"
        )
    if learner.lora is not None and learner.model == "own":
        yield "learner.model = 'own': learner.lora needs transformers' code; leave out one of them"
    if learner.lora is not None and learner.sharding == "full":
        yield "learner.sharding = 'full': learner.lora trains adapters, not sharded; leave one out"
    if learner.autocast is True and learner.dtype == "float64":
        yield "learner.autocast = true: learner.dtype = 'float64' is the exact reference; drop one"
