# The verifier and the draft service, which differ in the command. Models are not in it: mount them at /models.
#   docker build -f deploy/model.Dockerfile -t spire-model:0.1.0-cpu .
#   docker build -f deploy/model.Dockerfile -t spire-model:0.1.0-cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# CUDA's libraries come with torch, the driver from the host (nvidia-container-toolkit).
# By digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
RUN python3 -m venv /opt/spire
WORKDIR /src
COPY constraints.txt ./
# torch has a layer of its own: it is most of the image, and changes least. Empty: from PyPI.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# A pip.conf of your own, for a mirror: --secret id=pip,src=pip.conf
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/spire/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
# Kernels for a CPU are compiled. Where no compiler can be had, torch's own serve.
# hadolint ignore=DL3008,DL3009
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends gcc libc6-dev \
    || echo "no C compiler: kernels will be torch's own"
COPY pyproject.toml README.md LICENSE ./
COPY spire spire
COPY verifier_service verifier_service
COPY draft_service draft_service
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/spire/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[model]' \
    && /opt/spire/bin/pip uninstall --yes pip

FROM ${PYTHON_IMAGE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# A GPU's kernels are compiled when a service starts. Where no compiler can be had, torch's own serve.
# hadolint ignore=DL3008,DL3009
RUN case "$TORCH_INDEX" in */cpu) ;; *) \
        apt-get update -qq && apt-get install -qq -y --no-install-recommends gcc libc6-dev \
        || echo "no C compiler: kernels will be torch's own" ;; \
    esac
COPY --from=build /opt/spire /opt/spire
# The user has no entry in /etc/passwd, and the root is read-only where compose and Kubernetes run it.
ENV PATH=/opt/spire/bin:$PATH HOME=/tmp USER=spire PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051 50052
ENTRYPOINT ["python", "-m"]
CMD ["verifier_service"]
