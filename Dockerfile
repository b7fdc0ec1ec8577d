# syntax=docker/dockerfile:1
# One image for the advisor and for the demo's engine side. PyTorch comes in the build that the package index gives for
# the platform; pass PIP_EXTRA_INDEX_URL or PIP_CONSTRAINT as build arguments for another.
FROM python:3.11-slim AS build
WORKDIR /src
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY constraints.txt ./
RUN python -m venv /opt/kvadvisor
COPY pyproject.toml README.md LICENSE ./
COPY advisor advisor
COPY event_plane event_plane
COPY kernels kernels
COPY kvbm_core kvbm_core
COPY storage_agent storage_agent
ENV NUMBA_CACHE_DIR=/opt/kvadvisor/numba
RUN PIP_CONSTRAINT=/src/constraints.txt /opt/kvadvisor/bin/pip install --quiet . && /opt/kvadvisor/bin/kvadvisor warm

FROM python:3.11-slim
RUN useradd --uid 1000 --create-home --home-dir /var/lib/kvadvisor kvadvisor
COPY --from=build /opt/kvadvisor /opt/kvadvisor
ENV PATH=/opt/kvadvisor/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/opt/kvadvisor/numba
USER kvadvisor
WORKDIR /var/lib/kvadvisor
VOLUME /var/lib/kvadvisor
EXPOSE 8470
# /healthz needs no login.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8470/healthz', timeout=2)"]
ENTRYPOINT ["kvadvisor"]
CMD ["serve", "--config", "/etc/kvadvisor/advisor.toml"]
