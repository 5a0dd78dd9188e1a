"""Train on a parquet file with GSM8K's columns: `question`, and `answer`, which ends in `#### 72`.

    python examples/gsm8k_parquet.py [FILE.parquet] [MODEL] [RUN_DIR]

Without a file it writes a small one of additions, so that nothing is downloaded. GSM8K itself: FILE
is its train split. MODEL is smollm2 unless given.
"""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from longtail import RunConfig, train
from longtail.rl.data.sum_task import examples


def write_sample(path: Path, size: int = 64) -> Path:
    """Write additions with worked solutions, in the columns of GSM8K."""
    rows = examples(size, seed=0)
    columns = {
        "question": [row["prompt"] for row in rows],
        "answer": [f"{row['completion']}\n#### {row['answer']}" for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def main(file: str = "", model: str = "smollm2", run_dir: str = "runs/gsm8k", **run: Any) -> int:
    """Train for a few steps and return the exit code."""
    source = Path(file) if file else write_sample(Path(run_dir).with_suffix(".parquet"))
    config = RunConfig.model_validate(
        {
            "model": {"path": model},
            "data": {"source": str(source), "heldout_size": 8},
            "reward": {"name": "last_number"},  # the completion's last number is the answer's
            "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 256},
            "learner": {"learning_rate": 1e-5},
            "run": {"dir": run_dir, "steps": 4, **run},
        }
    )
    return train(config)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
