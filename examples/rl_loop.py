"""The whole loop of reinforcement learning in one file: copy it, and change what you like.

    python examples/rl_loop.py [STEPS] [RUN_DIR] [DRAFTER]

    prompts -> rollout -> rewards -> advantages -> learner -> published weights -> next step
                  a drafter learns from the completions beside it; none depends on it

SmolLM2-135M adds numbers. `longtail train` does the same with checkpoints, held-out prompts,
graders in processes of their own, several workers and pictures.
"""

import random
import re
import sys
from contextlib import closing

from longtail import (
    Completion,
    Prompt,
    Request,
    Rollout,
    RunConfig,
    SamplingParams,
    dr_grpo,
    load_tokenizer,
    noise_key,
    open_workers,
    pack_rollouts,
)

MODEL, PROMPTS, SAMPLES, MAX_TOKENS = "smollm2", 4, 8, 64


def make_sum(rng: random.Random) -> tuple[str, str]:
    """Draw a problem and its answer."""
    terms = [rng.randint(1, 9) for _ in range(rng.randint(2, 4))]
    return f"What is {' + '.join(map(str, terms))}?", str(sum(terms))


def reward(completion: Completion, answer: str) -> float:
    """Return a half for a text that ends, and a half for one whose last number is the answer."""
    numbers = re.findall(r"\d+", completion.text)
    ends = completion.finish_reason == "stop"
    return 0.5 * ends + 0.5 * (bool(numbers) and numbers[-1] == answer)


def main(steps: int = 12, run_dir: str = "runs/rl-loop", drafter: str = "auto") -> list[float]:
    """Train, print a line per step, and return the mean rewards."""
    config = RunConfig.model_validate(
        {
            "model": {"path": MODEL},
            "rollout": {"max_tokens": MAX_TOKENS},
            "learner": {"loss": "dr_grpo", "learning_rate": 3e-5},
            "speculation": {"drafter": drafter},
            "run": {"dir": run_dir, "steps": steps},
        }
    )
    tokenizer = load_tokenizer(MODEL)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=tokenizer.eos_ids)
    rng, means = random.Random(0), []
    with closing(open_workers(config, max_prompt_len=64)) as workers:
        workers.publish()
        for step in range(1, steps + 1):
            prompts = []
            for number in range(PROMPTS):
                question, answer = make_sum(rng)
                text = tokenizer.template.render([{"role": "user", "content": question}])
                prompts.append(
                    Prompt(
                        prompt_id=f"{step}/{number}",
                        tokens=tokenizer.encode(text),
                        text=text,
                        data={"answer": answer},
                    )
                )
            # A completion is a function of weights, prompt, sampling parameters and this key.
            requests = [
                Request(
                    request_id=f"{prompt.prompt_id}#{sample}",
                    prompt_tokens=prompt.tokens,
                    noise_key=noise_key(config.run.seed, prompt.prompt_id, sample),
                    sampling=sampling,
                    group_id=prompt.prompt_id,
                )
                for prompt in prompts
                for sample in range(SAMPLES)
            ]
            result = workers.rollout(step, requests)
            workers.train_drafter()

            rollouts = [
                Rollout(
                    prompt=prompts[place // SAMPLES],
                    completion=completion,
                    reward=reward(completion, prompts[place // SAMPLES].data["answer"]),
                )
                for place, completion in enumerate(result.completions)
            ]
            rewards = [each.reward for each in rollouts]
            groups = [rewards[i : i + SAMPLES] for i in range(0, len(rewards), SAMPLES)]
            advantages = [value for group in dr_grpo(groups) for value in group]

            batch = pack_rollouts(rollouts, advantages, sampling=sampling, budget=1024)
            report = workers.learn([batch])
            workers.publish()
            workers.offer_drafter()

            means.append(sum(rewards) / len(rewards))
            print(
                f"step {step}: reward {means[-1]:.3f}, loss {report.metrics['actor/loss']:+.4f}, "
                f"{result.report.num_generated} tokens in {result.seconds:.1f} s, "
                f"{result.report.num_accepted} of them drafted"
            )
    return means


if __name__ == "__main__":
    main(*(convert(given) for convert, given in zip((int, str, str), sys.argv[1:], strict=False)))
