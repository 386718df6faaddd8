# whence with its compiled kernels, and without a framework: compares and shows runs and dumps that lie in /work.
#
#     docker build -t whence .
#     docker run --rm -v "$PWD:/work" whence compare runs/ref runs/tgt
#
# With torch, to capture as well: docker build --build-arg EXTRA='[torch]' -t whence .
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN WHENCE_KERNELS=compiled pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG EXTRA=""
RUN --mount=from=build,source=/wheels,target=/wheels pip install --no-cache-dir "$(ls /wheels/whence-*.whl)$EXTRA" && useradd --create-home whence
USER whence
WORKDIR /work
ENTRYPOINT ["whence"]
CMD ["--help"]
