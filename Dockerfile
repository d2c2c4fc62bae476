# ProtoFed on a CPU; docs/how_to/docker.md shows how to build and run it, e.g.
#   docker run --rm -v "$PWD:/site" protofed data import orders.csv --as shop
FROM python:3.11-slim

WORKDIR /app
COPY requirements/lock.txt requirements/lock.txt
COPY scripts/torch.sh scripts/torch.sh
RUN TORCH=cpu PIP="python -m pip" sh scripts/torch.sh

COPY pyproject.toml README.md ./
COPY src src
RUN python -m pip install --no-cache-dir -c requirements/lock.txt '.[report]'

# Logs, runs and reports live in the folder that is mounted here.
WORKDIR /site
ENTRYPOINT ["protofed"]
CMD ["--help"]
