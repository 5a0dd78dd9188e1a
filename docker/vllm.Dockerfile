# vLLM's server that learns its own drafter: docker build -f docker/vllm.Dockerfile -t longtail-vllm .
#     docker run --rm --gpus all -p 8000:8000 longtail-vllm --model Qwen/Qwen3-8B
FROM vllm/vllm-openai:v0.32.0
COPY . /source
# vLLM's image has PyTorch, transformers and the rest: only what is missing is installed.
RUN pip install --no-cache-dir --no-deps /source \
    && pip install --no-cache-dir "tomli-w>=1.1" "jaxtyping>=0.3" \
    "rich>=13.9" "accelerate>=1.10" "gguf>=0.17" \
    && rm -rf /source
ENV LONGTAIL_VLLM=learned
