"""The engine in ten lines: two samples of one prompt. No seed's completion depends on the drafter.

python examples/engine.py
"""

from longtail import Engine, SamplingParams

engine = Engine("smollm2")  # or a directory, a run, a hub id, a .gguf file
chat = [{"role": "user", "content": "Add 6 + 8 + 2"}]
params = SamplingParams(temperature=0.8, max_tokens=300)
for completion in engine.generate([chat], params, n=2, seed=1):
    print(f"{len(completion.tokens)} tokens, {completion.finish_reason}: {completion.text}")
