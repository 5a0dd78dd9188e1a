"""`longtail` on a pretended GPU: its tensors claim `cuda:0`; vLLM generates on the CPU.

python -m support.pretend_training WORDS

Ray believes in the GPU, too, and a process that it starts pretends from its first line on.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.pretend_cuda import load, pretended

_LIBRARY = "LONGTAIL_PRETENDED_GPU"
_IN_RAYS_PROCESSES = """
import os, sys
if "default_worker.py" in " ".join(sys.orig_argv):
    import ctypes
    ctypes.CDLL(os.environ["LONGTAIL_PRETENDED_GPU"])
    from support.pretend_training import pretend_in_actors
    pretend_in_actors()
"""


def pretend_in_actors() -> None:
    """Let the calls of Ray's actors pretend; their tensors travel as those of a GPU."""
    import ray
    import torch

    from longtail.cluster.workers.ray import actor

    def make(self: actor.Actor, *words: Any) -> Any:
        kind = type(torch.empty(0, device="cuda"))
        ray.util.register_serializer(
            kind, serializer=actor._as_array, deserializer=actor._as_tensor
        )
        return made(self, *words)

    made, call = actor.Actor.make, actor.Actor.call
    actor.Actor.make, actor.Actor.call = pretended()(make), pretended()(call)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        load(Path(folder))
        (Path(folder) / "sitecustomize.py").write_text(_IN_RAYS_PROCESSES)
        os.environ[_LIBRARY] = f"{folder}/pretend_cuda.so"
        os.environ["PYTHONPATH"] = f"{folder}:{os.environ['PYTHONPATH']}"
        os.environ |= {"RAY_OVERRIDE_RESOURCES": '{"GPU": 1}', "CUDA_VISIBLE_DEVICES": "0"}
        with pretended():
            from longtail.cli.main import main

            sys.exit(main())
