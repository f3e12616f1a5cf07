# linexport serve on a CPU, as a user without rights: runs artifacts, so PyTorch is not in it.
#
#   docker build -t linexport .
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/model.artifact:/artifact:ro" \
#       -e LINEXPORT_TOKEN=... linexport
FROM python:3.13-slim AS build
# The compiler is not in the image: any version of the distribution will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python -m venv /opt/linexport \
    && /opt/linexport/bin/pip install --no-cache-dir --constraint constraints.txt \
        jinja2 numpy onnx onnxruntime prometheus-client pydantic starlette tokenizers typer uvicorn \
    && /opt/linexport/bin/pip install --no-cache-dir --no-deps .

FROM python:3.13-slim
RUN useradd --system --create-home --uid 10001 linexport
COPY --from=build /opt/linexport /opt/linexport
ENV PATH=/opt/linexport/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/linexport
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=5)"]
ENTRYPOINT ["linexport"]
CMD ["serve", "/artifact", "--host", "0.0.0.0", "--port", "8000"]
