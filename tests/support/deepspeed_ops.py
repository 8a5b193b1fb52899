"""Build what DeepSpeed compiles when it first runs on a CPU: no script of the table waits for a compiler."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator

if __name__ == "__main__":
    get_accelerator().create_op_builder("ShareMemCommBuilder").load()
