"""Routes for RL trainers: pauses, updates of weights and drafters, and what their clients ask.

Paths and bodies are those of vLLM's routes for RL, so that clients of those routes work here. The
weights come from a directory, not over NCCL.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from longtail.errors import ConfigError, NonFiniteError
from longtail.serve.protocol import (
    APIError,
    DrafterRequest,
    TransferRequest,
    WeightUpdateRequest,
    parse_body,
)
from longtail.serve.service import PauseMode, Service
from longtail.serve.updates import ModelUpdates
from longtail.types import PolicyWeights

Result = TypeVar("Result")


def add_information_routes(app: FastAPI, service: Service, name: str) -> None:
    """Add the routes that change nothing."""

    @app.get("/get_world_size")
    async def get_world_size() -> JSONResponse:
        return JSONResponse({"world_size": 1})

    @app.get("/is_paused")
    async def is_paused() -> JSONResponse:
        return JSONResponse({"is_paused": service.is_paused})

    @app.get("/weight_info")
    async def weight_info() -> JSONResponse:
        return JSONResponse({"weight_version": str(service.policy_version)})

    @app.get("/server_info")
    async def server_info(config_format: str = "text") -> JSONResponse:
        config = _server_config(service, name)
        shown = config if config_format == "json" else str(config)
        return JSONResponse({"vllm_config": shown, "vllm_env": {}, "system_env": {}})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> JSONResponse:
        # Keys and values are shared by requests in progress only, so nothing old can be reused.
        return JSONResponse({"success": True})


def _server_config(service: Service, name: str) -> dict[str, Any]:
    """Return the part of vLLM's configuration that clients read."""
    return {
        "model_config": {
            "model": name,
            "dtype": str(service.dtype),
            "max_model_len": service.limits.max_len,
            "logprobs_mode": "processed_logprobs",
        },
        "parallel_config": {
            "world_size": 1,
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
        },
        "lora_config": None,
        "weight_transfer_config": None,
    }


def add_control_routes(app: FastAPI, service: Service, updates: ModelUpdates) -> None:
    """Add the routes that pause the service and change its weights and drafters."""
    lock = asyncio.Lock()

    @app.post("/pause")
    async def pause(mode: str = PauseMode.ABORT) -> JSONResponse:
        if mode not in list(PauseMode):
            modes = ", ".join(PauseMode)
            raise APIError(400, f"mode = {mode[:60]!a}: give one of {modes}", param="mode")
        await service.pause(PauseMode(mode))
        return JSONResponse({"status": "paused"})

    @app.post("/resume")
    async def resume() -> JSONResponse:
        await service.resume()
        return JSONResponse({"status": "resumed"})

    @app.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(http: HttpRequest) -> JSONResponse:
        info = parse_body(TransferRequest, await http.body()).init_info
        if info.get("backend") != "directory":
            raise APIError(
                400,
                'init_info: give {"backend": "directory"}; this server reads weights from a '
                "directory, and opens no NCCL group",
                param="init_info",
            )
        return JSONResponse({"message": "Weight transfer initialized"})

    @app.post("/start_weight_update")
    async def start_weight_update() -> JSONResponse:
        return JSONResponse({"message": "Weight update started"})

    @app.post("/update_weights")
    async def update_weights(http: HttpRequest) -> JSONResponse:
        update = parse_body(WeightUpdateRequest, await http.body()).update_info
        async with lock:
            tensors = await _checked(updates.read_weights, update, "update_info")
            version = service.policy_version + 1 if update.version is None else update.version
            await service.update_weights(PolicyWeights(version=version, tensors=tensors))
        return JSONResponse({"message": "Weights updated", "policy_version": version})

    @app.post("/finish_weight_update")
    async def finish_weight_update() -> JSONResponse:
        return JSONResponse({"message": "Weight update finished"})

    @app.post("/update_drafter")
    async def update_drafter(http: HttpRequest) -> JSONResponse:
        names = parse_body(DrafterRequest, await http.body()).drafter
        async with lock:
            opened = await _checked(updates.open_drafter, names, "drafter")
            await service.speculate(opened.speculation)
            updates.drafter = opened.name
        return JSONResponse({"message": "Drafter updated", "drafter": names})


async def _checked(read: Callable[[Any], Result], given: object, param: str) -> Result:
    """Read files in a thread of their own; what is wrong with them is the caller's error."""
    try:
        return await asyncio.to_thread(read, given)
    except (ConfigError, NonFiniteError) as error:
        raise APIError(400, str(error), param=param) from error
