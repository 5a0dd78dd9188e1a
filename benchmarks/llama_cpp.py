"""Tokens/s of longtail's engine and of llama.cpp's server: same model, threads and texts.

    pip install xllamacpp
    python benchmarks/llama_cpp.py runs/quickstart SmolLM2-135M-Instruct.Q4_1.gguf

llama.cpp computes with the GGUF file's weights in bfloat16, longtail with those of the run, a copy
that was trained further. llama.cpp ends no text by itself and writes as many tokens after each
prompt as longtail has. They take turns, which include the prompts.
"""

from script import pin, pinned

# isort: split

import argparse
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import xllamacpp

from longtail import Engine, SamplingParams
from longtail.bench.card import Spread, Table, print_card, ratios
from longtail.system.device import set_threads


def in_bfloat16(source: Path, path: Path) -> None:
    """Write a GGUF file anew, its matrices in bfloat16."""
    reader = gguf.GGUFReader(source)
    text = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    writer = gguf.GGUFWriter(path, text)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        inner = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kinds[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        halves = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy()
        writer.add_tensor(tensor.name, halves, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama(path: Path, running: int, threads: int) -> Any:
    """Start llama.cpp's server in this process, with as many slots as texts run."""
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.warmup = str(path), 0, True
    params.n_parallel, params.n_ctx, params.n_predict = running, running * 1024, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def written(server: Any, prompts: list[list[int]], lengths: list[int]) -> None:
    """Write a number of tokens after each prompt with the server, all at a time."""

    def ask(prompt: list[int], length: int) -> Any:
        asked = {"prompt": prompt, "n_predict": length, "ignore_eos": True, "temperature": 1.0}
        asked |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return server.handle_completions(asked)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts, lengths))
    found = [each["usage"]["completion_tokens"] for each in answers]
    assert found == lengths, (found, lengths)


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32])
    own = parser.parse_args()
    cpus = pin(own.threads)
    set_threads(own.threads)
    draws, results = random.Random(0), {}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "bf16.gguf"
        in_bfloat16(own.gguf, file)
        engines = {
            name: Engine(own.run, drafter=drafter, dtype="bfloat16", max_running=32)
            for name, drafter in (("plain", "none"), ("tuned", "auto"))
        }
        sampling = SamplingParams(max_tokens=own.tokens)
        for running in own.running:
            server = llama(file, running, own.threads)
            rates: dict[str, list[float]] = {"plain": [], "tuned": [], "llama.cpp": []}
            for turn in range(1 + own.repeats):
                sums = [[str(draws.randint(1, 9)) for _ in range(40)] for _ in range(running)]
                chats = [[{"role": "user", "content": f"Add {' + '.join(each)}"}] for each in sums]
                lengths: list[int] = []
                for name, engine in engines.items():
                    began = time.perf_counter()
                    done = engine.generate(chats, sampling, seed=turn)
                    seconds = time.perf_counter() - began
                    lengths = [len(each.tokens) for each in done]
                    rates[name].append(sum(lengths) / seconds)
                tokenizer = engines["plain"].tokenizer
                prompts = [list(tokenizer.chat(chat)) for chat in chats]
                began = time.perf_counter()
                written(server, prompts, lengths)
                rates["llama.cpp"].append(sum(lengths) / (time.perf_counter() - began))
            del server
            rates = {name: each[1:] for name, each in rates.items()}  # the first turn warms up
            results[running] = {
                name: {
                    "tokens_per_s": Spread.of(each).numbers(),
                    "over_llama_cpp": ratios(each, rates["llama.cpp"]).numbers(),
                }
                for name, each in rates.items()
            }
    rows = [
        (f"{running}, {name}", *(Spread(**spread) for spread in found.values()))
        for running, row in results.items()
        for name, found in row.items()
    ]
    title = f"{own.run}, {own.tokens} tokens, {own.threads} thread(s), {pinned(cpus)}"
    headings = ("running, contestant", "tokens/s", "over llama.cpp")
    card = {"bench": "llama_cpp", "threads": own.threads, "tokens": own.tokens}
    card |= {"xllamacpp": xllamacpp.__version__, "results": results}
    print_card([Table(title, headings, rows)], card)


if __name__ == "__main__":
    main()
