"""The engine in ten lines: two samples of one prompt. A seed's texts do not depend on the drafter.

python examples/engine.py
"""

from longtail import Engine, SamplingParams

engine = Engine("tiny-reasoner")  # or a directory, a run, a hub id, a .gguf file, "smollm2"
chat = [{"role": "user", "content": "How many steps does 6 take to reach 1?"}]
params = SamplingParams(temperature=0.8, max_tokens=300)
for completion in engine.generate([chat], params, n=2, seed=1):
    print(f"{len(completion.tokens)} tokens, {completion.finish_reason}: {completion.text}")
