"""Loads a published checkpoint: safetensors, one file or a sharded index, every name, shape and dtype checked
first.

The safetensors library reads the files; nothing is unpickled, no code of the checkpoint runs, and no tensor
memory is taken before all headers agree with the shape.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executor.environment import check_memory
from executor.model.weights import Weights, build_weights, tensor_shapes, weight_bytes
from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.process.documents import open_regular, read_json
from policies.process.sentences import shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FILE_DTYPES = {2: "BF16", 4: "F32"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file, as its header has it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def load_checkpoint(folder: Path, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Weights:
    """The weights in `folder`, converted to `dtype` on `device`.

    Raises `InputError` in one sentence naming the file and the tensor when a file is missing, truncated or
    corrupt, or a tensor is missing, unexpected, of another shape or dtype than `shape` says, or not finite.
    Tensors are read one at a time.
    """
    stored = read_headers(folder)
    check_tensors(folder, stored, shape)
    check_memory(device, weight_bytes(shape, dtype), f"the checkpoint {folder}")
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in {item.path for item in stored.values()}}

        def fill(name: str, view: torch.Tensor) -> None:
            path = stored[name].path
            view.copy_(files[path].get_tensor(name))
            if not torch.isfinite(view).all():
                raise InputError(f"{path}: tensor {name} holds NaN or infinite values, expected numbers")

        return build_weights(shape, dtype, device, fill)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder` by name, from the headers alone."""
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        return read_header(folder / SINGLE_FILE)
    index = read_json(index_path, "an index of safetensors files")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise InputError(f"{index_path}: weight_map is missing or no object of file names")
    stored: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name:
            raise InputError(
                f"{index_path}: weight_map names {shown(file_name)}, expected a file of the same folder"
            )
        for name, item in read_header(folder / file_name).items():
            if weight_map.get(name) != file_name:
                raise InputError(
                    f"{item.path}: holds tensor {name}, the index places it in "
                    f"{weight_map.get(name, 'no file')}"
                )
            stored[name] = item
    for name, file_name in weight_map.items():
        if name not in stored:
            raise InputError(
                f"{folder / file_name}: tensor {name} is missing, the index says that it is here"
            )
    return stored


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; raises `InputError` unless they tile the rest of the file
    exactly."""
    with ExitStack() as stack:
        file = _open(path, stack)
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        return {
            name: StoredTensor(path, item.get_dtype(), tuple(item.get_shape()))
            for name, item in slices.items()
        }


def check_tensors(folder: Path, stored: dict[str, StoredTensor], shape: ModelShape) -> None:
    """Raise `InputError` unless `stored` holds exactly the tensors of `shape`, each of the right shape and
    dtype."""
    expected = tensor_shapes(shape)
    dtype = FILE_DTYPES[shape.dtype_bytes]
    for name, size in expected.items():
        if name not in stored:
            raise InputError(f"{folder}: tensor {name} is missing, expected {dtype} {list(size)}")
        item = stored[name]
        if item.shape != size:
            raise InputError(
                f"{item.path}: tensor {name} has shape {list(item.shape)}, expected {list(size)}"
            )
        if item.dtype != dtype:
            raise InputError(f"{item.path}: tensor {name} has dtype {item.dtype}, expected {dtype}")
    for name, item in stored.items():
        if name not in expected:
            raise InputError(f"{item.path}: unexpected tensor {name}, {shape.name} has none of that name")


def _open(path: Path, stack: ExitStack) -> Any:
    """The file opened by the library, closed with `stack`. Raises `InputError`."""
    from safetensors import SafetensorError, safe_open

    open_regular(path, "a safetensors file").close()
    try:
        return stack.enter_context(safe_open(path, "pt"))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: truncated, corrupt or no safetensors file ({error})") from None
