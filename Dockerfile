# docker build -t farspan .                           PyTorch for CPUs
# docker build -t farspan --build-arg TORCH=cu130 .   for NVIDIA GPUs; TORCH=none leaves PyTorch out
# docs/install.md has the lines that run it.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH=cpu
ARG EXTRAS=mcp,pdf
COPY . /clone
RUN TORCH="$TORCH" EXTRAS="$EXTRAS" /clone/docker/install.sh /opt/farspan

FROM python:${PYTHON}-slim
COPY --from=build /opt/farspan /opt/farspan
RUN useradd --uid 1000 --home-dir /work --create-home farspan
# The cache lies in the folder that is mounted, for whatever user runs it. PyTorch needs a name of the user.
ENV PATH=/opt/farspan/bin:$PATH HOME=/work USER=farspan \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER farspan
WORKDIR /work
ENTRYPOINT ["farspan"]
CMD ["--help"]
