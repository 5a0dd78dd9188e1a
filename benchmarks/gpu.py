"""What a GPU is measured by, in the order of its worth; each part has a limit, nothing is fetched.

    python benchmarks/gpu.py --model DIR [--large DIR] [--reasoner DIR] [-- --section.key=VALUE ...]

    engines   plain, by longtail's generator, with the learned drafter: tokens/s at 1, 8, 32 texts
    loop      three training steps without a drafter, and with the learned one
    large     as engines, of a model of the same texts and the cost of a 6B
    pair      a step without and with longtail, two workers on the GPU
    learner   one step beside its products: the share of the GPU's rate
    exact     texts that differ from plain decoding's, batch-invariant, with Triton's attention
    reasoner  as engines, of a reasoning model on worded problems

Run it with the python of an environment that has longtail and vLLM. Each part's output goes to
OUT/PART.txt whatever happens to it; the last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_QUICK = "compilation_config = {mode = 0, cudagraph_mode = 'FULL_DECODE_ONLY'}"
"""vLLM without inductor, which alone takes a minute to start."""
_TRITON = f"attention_backend = 'TRITON_ATTN', {_QUICK}"
_LONGTAIL = ("-m", "longtail.cli.main")
_HERE = Path(__file__).resolve().parent
_FAILED = 15
"""Lines of a failed part that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Commands, one after another, and the most seconds of all.

    Example: Part(limit_s=60, commands=[["-m", "longtail.cli.main", "doctor"]])
    """

    limit_s: int
    commands: Sequence[Sequence[str]]
    """Words after the interpreter's name."""
    environment: dict[str, str] = field(default_factory=dict)


def vllm(more: str, kv_gb: float = 3.0) -> str:
    """Return arguments of vLLM; engines side by side must not measure each other's memory."""
    return f"--rollout.vllm={{kv_cache_memory_bytes = {int(kv_gb * 1e9)}, {more}}}"


def engines(recipe: Sequence[str], batches: str, arguments: str, limit_s: int, **more: str) -> Part:
    """Return the part that compares engines on a recipe; `more` is its environment."""
    python = ["--python", sys.executable, "--dtype", "bfloat16", "--repeats", "2"]
    script = str(_HERE / "vllm_engine.py")
    command = [script, *recipe, *python, "--batches", batches, arguments]
    return Part(limit_s=limit_s, commands=[command], environment=more)


def parts(options: argparse.Namespace) -> dict[str, Part]:
    """Return the parts whose models were given, in order."""
    longest = "--rollout.max_tokens=640"
    sums = ["quickstart", f"--model.path={options.model}", longest]
    large = ["quickstart", f"--model.path={options.large}", longest]
    loop = [*_LONGTAIL, "train", *sums, "--run.steps=3", "--run.device=cuda", vllm(_QUICK)]
    pair = [*_LONGTAIL, "bench", "e2e", *sums, "--steps", "3"]
    pair += ["--run.device=cuda", "--cluster.workers=2", "--cluster.gpus_per_worker=0.5"]
    shares = f"gpu_memory_utilization = 0.1, {_QUICK}"  # of two workers of each of two arms
    pair.append(vllm(shares))
    learner = [str(_HERE / "learner.py"), *sums, "--contestants", "transformers"]
    learner += [
        "--mean-tokens",
        "256",
        "--learner.tokens_per_micro_batch=4096",
        "--rollout.prompts_per_step=8",
    ]
    learner += ["--rollout.group_size=8"]
    places = {name: f"--run.dir={options.out}/runs/{name}" for name in ("none", "fresh")}
    loops = [[*loop, f"--speculation.drafter={name}", place] for name, place in places.items()]
    reasoner = ["gsm", f"--model.path={options.reasoner}"]
    found = {
        "engines": engines(sums, "1,8,32", vllm(_QUICK), 150),
        "loop": Part(limit_s=120, commands=loops),
        "large": options.large and engines(large, "1,8,32", vllm(_QUICK, 4.0), 150),
        "pair": Part(limit_s=180, commands=[pair]),
        "learner": Part(limit_s=60, commands=[learner]),
        "exact": engines(sums, "1,32", vllm(_TRITON), 120, VLLM_BATCH_INVARIANT="1"),
        "reasoner": options.reasoner and engines(reasoner, "1,8,32", vllm(_QUICK), 150),
    }
    chosen = options.only.split(",") if options.only else found
    return {name: part for name, part in found.items() if part and name in chosen}


def run(part: Part, log: Path, overrides: Sequence[str], limit_s: float) -> tuple[int, float]:
    """Run a part's commands until one fails or its time is over; return status and seconds."""
    began, code = time.monotonic(), 0
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", **part.environment}
    with log.open("w") as out:
        for words in part.commands:
            left = limit_s - (time.monotonic() - began)
            given = {each.partition("=")[0] for each in overrides}
            kept = [each for each in words if each.partition("=")[0] not in given]
            command = [sys.executable, *kept, *overrides]
            print("$", " ".join(command), file=out, flush=True)
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(max(left, 1.0))
            except subprocess.TimeoutExpired:
                code = 124
            finally:
                stop(process)
            if code:
                break
    return code, time.monotonic() - began


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a command and the engines that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    """Measure all parts that the time allows."""
    words, overrides = list(sys.argv[1:]), []
    if "--" in words:
        words, overrides = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="policy of the quickstart")
    parser.add_argument("--large", type=Path, help="the same function in a large shape")
    parser.add_argument("--reasoner", type=Path, help="a reasoning model")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--only", default="", help="parts, divided by commas")
    parser.add_argument("--minutes", type=float, default=8.0)
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    end, found = time.monotonic() + 60 * options.minutes, {}
    for name, part in parts(options).items():
        limit_s = min(part.limit_s, end - time.monotonic())
        if limit_s < 20:
            print(f"{name:<10} left out: no time", flush=True)
            continue
        log = options.out / f"{name}.txt"
        code, seconds = run(part, log, overrides, limit_s)
        lines = log.read_text(errors="replace").splitlines()
        print(f"{name:<10} {'ok' if code == 0 else f'failed ({code})'} in {seconds:.0f} s: {log}")
        if code:
            print("\n".join(lines[-_FAILED:]), flush=True)
        found[name] = {"code": code, "seconds": round(seconds, 1)}
        if lines and lines[-1].startswith("{"):
            found[name]["result"] = json.loads(lines[-1])
    print(json.dumps({"bench": "gpu", "parts": found}))
    return 1 if any(each["code"] for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
