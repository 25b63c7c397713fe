# The gateway: REST in front, gRPC behind, no torch. `spire key`, `spire certs` and `spire perf-model` are in it too.
#   docker build -f deploy/gateway.Dockerfile -t spire-gateway:0.1.0 .
# By digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
RUN python3 -m venv /opt/spire
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY spire spire
COPY gateway gateway
# A pip.conf of your own, for a mirror: --secret id=pip,src=pip.conf
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/spire/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[gateway,certs]' \
    && /opt/spire/bin/pip uninstall --yes pip

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/spire /opt/spire
# The user has no entry in /etc/passwd, and the root is read-only where compose and Kubernetes run it.
ENV PATH=/opt/spire/bin:$PATH HOME=/tmp USER=spire PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["python", "-m"]
CMD ["gateway"]
