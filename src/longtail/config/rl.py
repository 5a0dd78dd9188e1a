"""The whole configuration of `longtail train`: one frozen tree of pydantic models.

The class defaults are the vetted recipe; every key set in a TOML file or on the command line is
visibly the user's own. `load` reads, overlays, validates and never touches a model or a data file.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from longtail.config import files as configfile
from longtail.system.machine import MAX_INT32, MAX_THREADS

_MOST_SEQUENCES = 1_000_000
_MOST_GENERATED = 10_000_000

Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")]
Count = Annotated[int, Field(ge=1, le=MAX_INT32)]
Amount = Annotated[int, Field(ge=0, le=MAX_INT32)]
Generated = Annotated[int, Field(ge=1, le=_MOST_GENERATED)]
Threads = Annotated[int, Field(ge=0, le=MAX_THREADS)]
Processes = Annotated[int, Field(ge=1, le=MAX_THREADS)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16", "float64"]
Schedule = Literal["constant", "linear", "cosine"]
WriterName = Literal["tensorboard", "wandb"]
TrainingName = Literal["spot", "serial", "never"]
TunerName = Literal["budget", "beg-mab", "fixed", "off"]
LossName = Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp"]
_GROUP_LOSSES: tuple[LossName, ...] = ("grpo", "dr_grpo", "dapo", "gspo", "rloo")


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, docstrings under fields are help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelSection(Section):
    """The policy that is trained."""

    path: Name = "tiny-reasoner"
    """Hugging Face directory, or `tiny-reasoner`: the embedded model, warm-started here once."""


class DataSection(Section):
    """Where prompts come from."""

    source: Name = "tiny-reasoner"
    """`tiny-reasoner`, a .jsonl or .parquet file, `hf:NAME_OR_DIR[:SPLIT]`, or
    `reasoning_gym:TASK`."""
    heldout: Name | None = None
    """Source of held-out prompts, same forms; unset takes `heldout_size` rows off the end of
    `source`, or generates others for `tiny-reasoner`."""
    heldout_size: Amount = 64
    """Held-out prompts, for the evaluation before and after."""
    size: Generated = 2048
    """Prompts to generate, for generated sources; files give what they hold."""
    prompt_column: Name | None = None
    """Column with the prompt (text or chat messages); unset tries TRL's and verl's names."""
    answer_column: Name | None = None
    """Column with the reference answer; unset tries TRL's and verl's names."""
    max_prompt_len: Count = 512
    """Tokens, chat template applied; a longer prompt is an error unless `drop_long_prompts`."""
    drop_long_prompts: bool = False
    """Leave out prompts over `max_prompt_len`, with a count, instead of stopping."""
    drop_ungradable: bool = False
    """Leave out rows whose reference answer the reward cannot use, with a count."""
    shuffle: bool = True
    """Visit prompts in a new order each epoch, drawn from the run's seed."""


class RewardSection(Section):
    """How completions are graded."""

    name: Name = "tiny-reasoner"
    """`exact`, `reasoning_gym`, `math_verify`, `tiny-reasoner`, or `module:function` as in TRL."""
    timeout_s: Seconds = 10.0
    """A grader that takes longer over one completion is killed; its rollout is excluded."""
    workers: Processes = 1
    """Grader processes."""


class RolloutSection(Section):
    """Writing completions."""

    prompts_per_step: Count = 16
    """Prompts of one step; each is answered `group_size` times."""
    group_size: Count = 8
    """Completions of each prompt."""
    max_tokens: Count = 2048
    """Longest completion."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits; training needs more than 0 (greedy answers of a group are all alike)."""
    top_k: Amount = 0
    """Sample among the so many likeliest tokens; 0 keeps every token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that hold this probability; 1 keeps every token."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Leave out tokens below this share of the likeliest one's probability; 0 keeps every token."""
    stop: tuple[Name, ...] = ()
    """Strings that end a completion, beside the tokenizer's end-of-sequence token."""
    max_running: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Requests that generate at the same time."""
    max_step_tokens: Count = 512
    """Tokens of one engine step; longer prompts are prefilled in chunks."""
    kv_tokens: Amount = 0
    """Tokens the KV cache may hold; 0 is enough for `max_running` longest requests."""
    dtype: Dtype = "float32"
    """Of the weights and the KV cache while generating."""
    batch_invariant: bool = False
    """On a GPU, let no batch, hence no draft, change a bit; slower. Native kernels always do."""


class SpeculationSection(Section):
    """Drafting ahead of the policy while it writes: the clock changes, no token does."""

    drafter: Name = "auto"
    """`none`, `history` (suffixes of what was written), `tiny-reasoner` (the embedded model's own,
    taught here once), or a directory: of a drafter, of a run that trained one, of a published one
    (vLLM, SGLang, speculators), or of a small model with the same tokenizer. Several are joined:
    `DIR+history`. `auto` is the embedded model's own, or the run's, else `history`."""
    tuner: TunerName = "budget"
    """Who decides how much to draft, and when not to: `budget` (by measured cost and calibrated
    chances), `beg-mab` (TLT's bandit), `fixed` (as the next four say), `off`."""
    depth: Annotated[int, Field(ge=1, le=32)] = 4
    """Fixed: tokens drafted ahead; one pass of the drafter each."""
    width: Annotated[int, Field(ge=1, le=8)] = 1
    """Fixed: alternatives a token; 1 drafts a chain."""
    size: Annotated[int, Field(ge=0, le=60)] = 0
    """Fixed: drafted tokens of a request that are verified, the likeliest; 0 is `depth`."""
    max_running: Amount = 32
    """Fixed: draft only while at most so many requests run; 0 is always."""
    coupled: bool = True
    """Draft with the very noise that the policy draws with; off only to compare."""


class SpotSection(Section):
    """Training the drafter while the policy learns, on processors that would stand idle."""

    train: TrainingName = "spot"
    """`spot`: workers that are done with their share of a rollout, until the last one is; `serial`:
    after each rollout, for a tenth of its time; `never`. Only EAGLE drafters are trained."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """AdamW's, of vectors and norms; of all weights where `matrix_rate` is 0."""
    matrix_rate: Annotated[float, Field(ge=0)] = 0.005
    """Muon's learning rate of the matrices; 0 learns them by AdamW, too."""
    batch_tokens: Annotated[int, Field(ge=16, le=MAX_INT32)] = 768
    """Tokens of one update; small, since nobody waits for an update that is not done."""
    buffer_mb: Count = 64
    """Most memory for texts to learn from."""
    features_mb: Amount = 64
    """Most memory for the features of texts just written, to learn from; 0 computes them anew."""


class ClusterSection(Section):
    """The workers that write and learn."""

    workers: Processes = 1
    """Processes that write, learn and train; more than one are Ray actors (extra `cluster`)."""
    address: str = ""
    """Of a Ray cluster, as `ray.init` takes it; empty begins a Ray of its own on this machine."""
    hang_s: Seconds = 180.0
    """A worker that makes no step for so long is replaced."""


class LearnerSection(Section):
    """Updating the policy."""

    loss: LossName = "grpo"
    """Policy-gradient loss, with the advantages that belong to it."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak of AdamW's learning rate."""
    schedule: Schedule = "constant"
    """After warm-up; linear and cosine reach 0 at the last step."""
    warmup_steps: Amount = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled decay, of matrices only."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""
    mini_batches: Count = 1
    """Optimizer updates a step; 1 is strictly on-policy."""
    clip_low: Annotated[float, Field(gt=0)] | None = None
    """Ratio clipping below 1; unset takes the loss's own (0.2; gspo 3e-4)."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """Ratio clipping above 1; unset takes the loss's own (0.2; dapo 0.28; gspo 4e-4)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the initial policy; 0 keeps no reference model."""
    tis_cap: Annotated[float, Field(gt=1)] | None = None
    """Truncated importance correction for the rollout-against-learner gap: weights
    min(learner/rollout, cap); unset logs the gap and corrects nothing."""
    dynamic_sampling: bool | None = None
    """Leave out groups whose rewards are all equal; unset is on for dapo only."""
    overlong_buffer: Amount = 0
    """DAPO's soft penalty over the last so many tokens before `rollout.max_tokens`; 0 is off."""
    tokens_per_micro_batch: Count = 8192
    """Packing budget; a longer sequence gets a micro-batch of its own."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    autocast: bool = False
    """bfloat16 matrix products over float32 weights."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of the master weights; float64 is the reference."""
    moment_copies: Amount = 0
    """Workers that keep AdamW's moments of a parameter; 0: all. With 1, a lost one ends the run."""
    sharding: Literal["none", "full"] = "none"
    """`full`: several workers hold a shard each of master weights, gradients, moments and reference
    (FSDP2), and all weights in main memory. A lost worker ends the run; started again, it resumes
    from its newest checkpoint."""


class EvalSection(Section):
    """Held-out evaluation, before the first step and after the last."""

    samples: Count = 2
    """Completions of each held-out prompt, drawn with the rollout's own sampling."""
    every: Amount = 0
    """Also evaluate every so many steps; 0 is before and after only."""


class RunSection(Section):
    """The run as a whole."""

    dir: Name = "runs/default"
    """Resolved config, metrics, rollouts, checkpoints and the card go here."""
    steps: Count = 100
    """Rollout-and-update steps, those before a resume included."""
    seed: Seed = 0
    """Of everything drawn: prompt order, generated data, sampling noise, fresh weights."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`."""
    threads: Threads = 0
    """Compute threads of this process; 0 takes every core."""
    checkpoint_every: Count = 10
    """Steps between checkpoints; the last step always makes one."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that stay on disk."""
    resume: bool = True
    """Go on from the newest checkpoint in `dir` if there is one; off refuses a used directory."""
    save_rollouts: bool = True
    """Append every graded completion to rollouts.jsonl."""
    speculation_mb: Amount = 256
    """Most size of speculation.jsonl, which keeps what every engine step drafted: beyond it, the
    oldest rollouts are left out; 0 keeps all."""
    writers: tuple[WriterName, ...] = ()
    """Metric writers beside metrics.jsonl, each behind the extra of its name."""


class RunConfig(Section):
    """`longtail train` reads exactly this."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    speculation: SpeculationSection = SpeculationSection()
    spot: SpotSection = SpotSection()
    cluster: ClusterSection = ClusterSection()
    learner: LearnerSection = LearnerSection()
    eval: EvalSection = EvalSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "RunConfig":
        if problems := [*_rollout_problems(self), *_learner_problems(self)]:
            raise ValueError("\n".join(problems))
        return self

    @property
    def is_sharded(self) -> bool:
        """Tell whether several workers hold a shard of the learner each."""
        return self.learner.sharding == "full" and self.cluster.workers > 1


def load(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the configuration of `longtail train`; raises ConfigError with every problem found.

    Example: load(Path("run.toml"), ["--learner.loss", "dapo", "--run.steps=20"])
    """
    return configfile.resolve(RunConfig, path, overrides)


def dump(config: Section) -> str:
    """Return the whole configuration as TOML; `load` of it gives an equal one."""
    return configfile.render(config)


def _rollout_problems(config: RunConfig) -> Iterator[str]:
    rollout, data = config.rollout, config.data
    longest = data.max_prompt_len + rollout.max_tokens
    sequences = rollout.prompts_per_step * rollout.group_size
    if sequences > _MOST_SEQUENCES:
        yield (
            f"rollout.prompts_per_step = {rollout.prompts_per_step}: with rollout.group_size = "
            f"{rollout.group_size} a step has {sequences} completions, and the most is "
            f"{_MOST_SEQUENCES}"
        )
    if rollout.temperature == 0:
        yield "rollout.temperature = 0: greedy answers of a group are alike; give one above 0"
    if 0 < rollout.kv_tokens < longest:
        yield (
            f"rollout.kv_tokens = {rollout.kv_tokens}: one longest request takes {longest} "
            f"(data.max_prompt_len {data.max_prompt_len} + rollout.max_tokens "
            f"{rollout.max_tokens}); give at least that, or 0"
        )
    if rollout.max_step_tokens < rollout.max_running:
        yield (
            f"rollout.max_step_tokens = {rollout.max_step_tokens}: each of rollout.max_running = "
            f"{rollout.max_running} requests takes a token of every step; give at least that"
        )
    generated = data.source.startswith("reasoning_gym:")
    if generated and data.heldout is None and data.heldout_size >= data.size:
        yield (
            f"data.heldout_size = {data.heldout_size}: it is taken off the {data.size} prompts of "
            "data.size, and none would be left to train on"
        )


def _learner_problems(config: RunConfig) -> Iterator[str]:
    rollout, learner = config.rollout, config.learner
    sequences = rollout.prompts_per_step * rollout.group_size
    if rollout.group_size < 2 and (learner.loss in _GROUP_LOSSES or learner.dynamic_sampling):
        reason = "dynamic_sampling" if learner.dynamic_sampling else f"loss = {learner.loss!r}"
        yield (
            f"rollout.group_size = {rollout.group_size}: learner.{reason} compares the "
            "completions of one prompt; give at least 2"
        )
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
    if learner.autocast and learner.dtype == "float64":
        yield "learner.autocast = true: learner.dtype = 'float64' is the exact reference; drop one"
    if learner.moment_copies and learner.sharding == "full":
        yield (
            f"learner.moment_copies = {learner.moment_copies}: learner.sharding = 'full' keeps "
            "each moment once; drop one"
        )
