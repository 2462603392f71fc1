# The cpu server. Build: docker build -t oarlock .   Run: docker run -p 8000:8000 -v models:/models oarlock MODEL
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# torch in a layer of its own: it changes least and weighs most.
ARG TORCH=torch==2.13.0
RUN pip install "$TORCH" "setuptools>=77" wheel ninja numpy
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY backends/cpu backends/cpu
COPY plugins/ui plugins/ui
RUN pip install --no-build-isolation . ./backends/cpu ./plugins/ui

FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home oarlock && mkdir /models && chown oarlock /models
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH HF_HOME=/models
USER oarlock
EXPOSE 8000
# Engine and API are separate processes; SIGTERM drains, so leave the grace that `docker stop -t` gives it.
ENTRYPOINT ["oarlock", "serve"]
CMD ["--help"]
