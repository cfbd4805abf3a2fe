"""What must be true of the process before a device is used, and which device a run gets.

Owns the cuBLAS environment that makes a row's product independent of the rows beside it (measured: with these
two values all five products of Ouro are bit-identical for 1 to 1500 rows, without them the K = 5632 one is
not). Knows no model.
"""

import os
from importlib.util import find_spec

import torch

from policies.core.errors import InputError

CUBLAS_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
DEVICE_NAMES = ("cuda", "cpu")
SMALL_MODEL_BYTES = 64 * 2**20
"""Below this a second thread costs a CPU more than it saves: its products are too short to share."""


def prepare_environment() -> tuple[str, ...]:
    """Set the cuBLAS environment and the precision switches; return one sentence for every value that had to
    be replaced.

    cuBLAS reads the variables when CUDA starts, so a replacement after that would be silently ignored: that
    raises `InputError`.
    """
    replaced = []
    for key, wanted in CUBLAS_ENVIRONMENT.items():
        found = os.environ.get(key)
        if found == wanted:
            continue
        if torch.cuda.is_initialized():
            raise InputError(
                f"{key} must be {wanted} before CUDA starts, it is {found}: set it in the environment and "
                "start again"
            )
        if found is not None:
            replaced.append(
                f"{key} was {found} and is now {wanted}: with {found} a row's bits would depend on its batch"
            )
        os.environ[key] = wanted
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    return tuple(replaced)


def choose_threads(device: torch.device, model_bytes: int) -> tuple[str, ...]:
    """On a CPU, run a small model in one thread unless `OMP_NUM_THREADS` says otherwise; return the sentence
    that says how many threads run."""
    if device.type != "cpu":
        return ()
    if "OMP_NUM_THREADS" not in os.environ and model_bytes < SMALL_MODEL_BYTES:
        torch.set_num_threads(1)
    return (f"CPU threads: {torch.get_num_threads()}; OMP_NUM_THREADS sets another number",)


def resolve_device(name: str, needed_bytes: int = 0) -> torch.device:
    """The torch device called `name` ("cuda" or "cpu"), able to hold `needed_bytes` more.

    Raises `InputError` saying what was needed, what was found and what to do when CUDA, Triton or memory is
    missing.
    """
    if name not in DEVICE_NAMES:
        raise InputError(f"--device: expected one of {', '.join(DEVICE_NAMES)}, found {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise InputError(
            f"--device cuda: needs a CUDA GPU and its driver, torch {torch.__version__} ({build}) sees none: "
            "use --device cpu or a machine with a GPU"
        )
    if find_spec("triton") is None:
        raise InputError(
            "--device cuda: needs the Python package triton, it is not installed: pip install triton"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    check_memory(device, needed_bytes, "the run")
    return device


def check_memory(device: torch.device, needed_bytes: int, purpose: str) -> None:
    """Raise `InputError` unless a CUDA `device` has `needed_bytes` free for `purpose`. A CPU is not asked."""
    if device.type != "cuda":
        return
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if needed_bytes > free_bytes:
        raise InputError(
            f"--device cuda: {purpose} needs {needed_bytes / 2**30:.2f} GiB, "
            f"{torch.cuda.get_device_name(device)} has {free_bytes / 2**30:.2f} of {total_bytes / 2**30:.2f} "
            "GiB free: free some, choose a smaller model or lower cache.num_blocks"
        )
