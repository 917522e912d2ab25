# CPU: docker build -t cct . && docker run --rm -v "$PWD/runs:/app/runs" cct run compo
# CUDA: docker build -t cct-cuda --build-arg TORCH_INDEX=https://pypi.org/simple --build-arg EXTRAS=vllm,deepspeed,math,data .
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=math,data
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /cct/
COPY cct /cct/cct
COPY recipes /cct/recipes
RUN pip install --no-cache-dir torch==2.13.0 --index-url "$TORCH_INDEX" && pip install --no-cache-dir "/cct[$EXTRAS]"
WORKDIR /app
ENTRYPOINT ["cct"]
CMD ["--help"]
