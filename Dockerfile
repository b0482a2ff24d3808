# Three images from one file: docker build --target registry|router|worker .
# Layers of dependencies come before layers of code, so that a change of code rebuilds in seconds. Only the worker's
# image has torch. No BuildKit needed. See docs/deployment.md.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# --- dependencies, one virtual environment per service -----------------------------------------------------------------
# What each needs is read off first, so that only a change of that changes what follows, not any change of pyproject.toml.
FROM ${PYTHON_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml docker/requirements.py ./
RUN set -e; for extra in common registry router worker; do python3 requirements.py "$extra" > "$extra.txt"; done

FROM ${PYTHON_IMAGE} AS dependencies
# More options for pip, e.g. another index; wheels in docker/wheels are preferred where their versions fit.
ARG PIP_ARGS=""
WORKDIR /build
COPY constraints.txt ./
COPY docker/wheels/ wheels/
COPY --from=requirements /requirements/common.txt ./
# Wheels only: nothing is compiled, so no compiler is needed here either. PIP_ARGS is split into words on purpose.
# hadolint ignore=SC2086
RUN python3 -m venv --without-pip /opt/loraplex \
    && python3 -m pip --python /opt/loraplex/bin/python install --no-cache-dir --only-binary :all: \
        --constraint constraints.txt --find-links wheels ${PIP_ARGS} --requirement common.txt

FROM dependencies AS registry-dependencies
COPY --from=requirements /requirements/registry.txt ./
# hadolint ignore=SC2086
RUN python3 -m pip --python /opt/loraplex/bin/python install --no-cache-dir --only-binary :all: \
        --constraint constraints.txt --find-links wheels ${PIP_ARGS} --requirement registry.txt

FROM dependencies AS router-dependencies
COPY --from=requirements /requirements/router.txt ./
# hadolint ignore=SC2086
RUN python3 -m pip --python /opt/loraplex/bin/python install --no-cache-dir --only-binary :all: \
        --constraint constraints.txt --find-links wheels ${PIP_ARGS} --requirement router.txt

# --- what the images share ---------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="Loraplex" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin loraplex \
    && install --directory --owner 10001 --group 10001 /state /cache /kernels
ENV PATH=/opt/loraplex/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
WORKDIR /app
COPY docker/probe.py docker/register.sh docker/fetch_base.py docker/

# --- registry ----------------------------------------------------------------------------------------------------------
FROM runtime AS registry
COPY --from=registry-dependencies /opt/loraplex /opt/loraplex
COPY loraplex loraplex
COPY common common
COPY registry registry
RUN python -m compileall -q .
USER 10001:10001
ENV LORAPLEX_REGISTRY_HOST=0.0.0.0 \
    LORAPLEX_REGISTRY_STATE_DIR=/state
EXPOSE 50051 9051
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "/app/docker/probe.py", "http://127.0.0.1:9051/readyz"]
ENTRYPOINT ["python", "-m", "registry"]

# --- router ------------------------------------------------------------------------------------------------------------
FROM runtime AS router
COPY --from=router-dependencies /opt/loraplex /opt/loraplex
COPY loraplex loraplex
COPY common common
COPY router router
RUN python -m compileall -q .
USER 10001:10001
ENV LORAPLEX_ROUTER_HOST=0.0.0.0
EXPOSE 50050 8080
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "/app/docker/probe.py", "http://127.0.0.1:8080/readyz"]
ENTRYPOINT ["python", "-m", "router"]

# --- worker: last, because the classic builder builds every stage above its target, and torch is large -----------------
FROM dependencies AS worker-dependencies
# torch comes first and alone, pinned, so that nothing else chooses another build of it.
# hadolint ignore=SC2086
RUN python3 -m pip --python /opt/loraplex/bin/python install --no-cache-dir --only-binary :all: \
        --constraint constraints.txt --find-links wheels ${PIP_ARGS} torch
COPY --from=requirements /requirements/worker.txt ./
# hadolint ignore=SC2086
RUN python3 -m pip --python /opt/loraplex/bin/python install --no-cache-dir --only-binary :all: \
        --constraint constraints.txt --find-links wheels ${PIP_ARGS} --requirement worker.txt

FROM runtime AS worker
COPY --from=worker-dependencies /opt/loraplex /opt/loraplex
COPY loraplex loraplex
COPY common common
COPY worker worker
RUN python -m compileall -q .
USER 10001:10001
ENV LORAPLEX_WORKER_HOST=0.0.0.0 \
    LORAPLEX_WORKER_BASE_DIR=/models/base \
    LORAPLEX_WORKER_CACHE_DIR=/cache \
    NUMBA_CACHE_DIR=/kernels
EXPOSE 50052 9052
# A large base model takes minutes to load.
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "/app/docker/probe.py", "http://127.0.0.1:9052/readyz"]
ENTRYPOINT ["python", "-m", "worker"]
