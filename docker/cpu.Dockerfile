# longtail on CPUs: docker build -f docker/cpu.Dockerfile -t longtail .
#                  docker run --rm -v "$PWD:/work" longtail train run.toml
FROM python:3.12-slim AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN LONGTAIL_WHEEL_KERNELS=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    "$(ls /wheels/longtail-*.whl)[cluster,data,serve,plots]"
RUN useradd --create-home longtail && install -d -o longtail /work
USER longtail
WORKDIR /work
EXPOSE 8000 8001
ENTRYPOINT ["longtail"]
CMD ["doctor"]
