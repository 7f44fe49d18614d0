# tunix on GPUs with an NVIDIA driver 580 and newer. CUDA 13 comes in packages of PyPI; the host gives the driver alone.
#   docker build -f containers/cuda13.Dockerfile -t tunix:cuda13 .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -v "$PWD:/work" tunix:cuda13 model=gemma3_270m
FROM python:3.12-slim
WORKDIR /tunix
COPY requirements/cuda13.txt requirements/
RUN pip install --no-cache-dir -r requirements/cuda13.txt
COPY pyproject.toml README.md LICENSE run_training.py ./
COPY conf conf
COPY tunix tunix
RUN pip install --no-cache-dir --no-deps .
WORKDIR /work
ENTRYPOINT ["tunix"]
