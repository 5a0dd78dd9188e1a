"""Abilities of longtail in the vLLM of an environment; run by path in its interpreter.

    python -I probe.py FOLDER_OF_LONGTAIL        one JSON object on standard output

    {"vllm": "0.32.0", "longtail": "", "registered": true, "platform": "cpu", "v1": "", ...}

A value "" means that it works; another one says why it does not.
"""

import json
import os
import sys
from importlib import import_module, metadata
from typing import Any

_GROUP = "vllm.general_plugins"


def main(folder: str) -> None:
    """Print the facts; output of vLLM itself goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print(json.dumps(facts(folder)), file=replies, flush=True)


def facts(folder: str) -> dict[str, Any]:
    """Return what works, in order, until something that the rest needs does not."""
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    try:
        vllm = import_module("vllm")
    except Exception as error:  # noqa: BLE001  (whatever breaks it is the finding)
        return found | {"vllm": None, "reason": f"{type(error).__name__}: {error}"}
    found |= {"vllm": vllm.__version__, "registered": _is_registered()}
    found["platform"] = str(import_module("vllm.platforms").current_platform.device_type)
    found["triton"] = bool(import_module("vllm.triton_utils").HAS_TRITON)
    if folder not in sys.path:
        sys.path.append(folder)  # behind the packages of this environment
    for name in ("v1", "v2", "adopt", "transfer", "metrics"):
        found[name] = _reason(name)
    if found["platform"] == "cpu" and not found["v1"]:
        found["defects"] = _defects()
    return found


def _is_registered() -> bool:
    return any(each.name == "longtail" for each in metadata.entry_points(group=_GROUP))


def _reason(name: str) -> str:
    """Return why a part of longtail does not fit this vLLM."""
    try:
        module = import_module(f"longtail.integrations.vllm.{name}")
        settings = import_module("longtail.integrations.vllm.settings")
        if name in ("v1", "v2"):
            module.patches(settings.VllmSettings(), None)
        elif name == "transfer":
            module.check_calls()
        else:
            module.patches()
    except Exception as error:  # noqa: BLE001  (an import that fails is a reason)
        is_own = type(error).__name__ == "ConfigError"
        return str(error) if is_own else f"{type(error).__name__}: {error}"
    return ""


def _defects() -> list[str]:
    """Return the defects of vLLM's CPU speculation that this version still has."""
    import_module("vllm.platforms").current_platform.register_triton_kernel_overrides()
    cpu = import_module("longtail.integrations.vllm.v1_cpu")
    rejection = import_module("vllm.v1.sample.rejection_sampler")
    sampler = import_module("vllm.v1.sample.ops.topk_topp_sampler")
    found = []
    if cpu.loses_expanded(rejection.expand_batch_to_tokens):
        found.append("temperatures of verified rows are lost")
    if cpu.fails_without_rows(sampler.apply_top_k_top_p):
        found.append("top-k of no rows raises")
    return found


if __name__ == "__main__":
    main(sys.argv[1])
