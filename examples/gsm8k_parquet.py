"""Train on a parquet file with GSM8K's columns: `question`, and `answer`, which ends in `#### 72`.

    python examples/gsm8k_parquet.py [FILE.parquet] [MODEL] [RUN_DIR]

Without a file it writes a small one of the tiny reasoner's own problems, so that nothing is
downloaded. GSM8K itself: FILE is its train split, MODEL one that knows arithmetic, as "smollm2".
"""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from longtail import RunConfig, train
from longtail.rl.data.tiny_task import problems, walk


def write_sample(path: Path, size: int = 64) -> Path:
    """Write problems of the tiny reasoner with worked solutions, in the columns of GSM8K."""
    rows = problems(size, seed=0, split="train")
    starts = [int(row["problem_id"].split("/")[1]) for row in rows]
    solutions = [" then ".join(map(str, walk(start))) for start in starts]
    columns = {
        "question": [row["prompt"][0]["content"] for row in rows],
        "answer": [
            f"{solution}\n#### {row['answer']}"
            for solution, row in zip(solutions, rows, strict=True)
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def main(
    file: str = "", model: str = "tiny-reasoner", run_dir: str = "runs/gsm8k", **run: Any
) -> int:
    """Train for a few steps and return the exit code."""
    source = Path(file) if file else write_sample(Path(run_dir).with_suffix(".parquet"))
    config = RunConfig.model_validate(
        {
            "model": {"path": model},
            "data": {"source": str(source), "heldout_size": 8},
            "reward": {"name": "last_number"},  # the completion's last number is the answer's
            "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 256},
            "learner": {"learning_rate": 3e-4 if model == "tiny-reasoner" else 1e-6},
            "run": {"dir": run_dir, "steps": 4, **run},
        }
    )
    return train(config)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
