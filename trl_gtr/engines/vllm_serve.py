"""Starts a vLLM server that takes weights from a run: `python -m trl_gtr.engines.vllm_serve --model …`.

All options are vLLM's own. The server starts without weights, since the run sends them. Its environment needs vLLM and
this package, but none of this package's dependencies (`pip install --no-deps trl-gtr`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from .vllm_worker import WORKER_EXTENSION

_MODULE = "vllm.entrypoints.openai.api_server"
# A seeded request whose prompt is split ends with an error on a CPU.
_ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill")
_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # has the routes that take weights


def server_command(options: Sequence[str]) -> list[str]:
    """The command line of a server that a run can use, with the user's options last."""
    return [
        *(sys.executable, "-m", _MODULE),
        *("--worker-extension-cls", WORKER_EXTENSION),
        "--enable-scale-out",  # the route that takes and returns token ids
        *("--load-format", "dummy"),
        *("--generation-config", "vllm"),
        *("--host", "127.0.0.1"),  # the routes that take weights are for this machine, unless the user says otherwise
        *("--logprobs-mode", "processed_logprobs"),
        *([] if torch.cuda.is_available() else _ON_CPU),
        *options,
    ]


def main() -> None:
    command = server_command(sys.argv[1:])
    os.execve(command[0], command, os.environ | _ENVIRONMENT)


if __name__ == "__main__":
    main()
