"""Checkpoints from and to the tools themselves: DeepSpeed, torchtitan and FSDP2, on CPUs with gloo.

    python -m venv foreign && . foreign/bin/activate
    pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    pip install setuptools wheel ninja transformers
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed torchtitan
    python -m benchmark.foreign_tools

tests/checkpoint/foreign checks the same with files that tests write by the tools' rules. Here each tool writes and
reads its own files. A line says whether values and states have the same bits, and compares the losses of two more
steps. The first loss depends on values alone, the second on states too.
"""
