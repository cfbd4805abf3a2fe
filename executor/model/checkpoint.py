"""Loads a published checkpoint: safetensors, one file or a sharded index, every name, shape and dtype checked
first.

The header of a safetensors file is 8 bytes of length and that much JSON; after it the raw tensors. This reads
exactly that with the standard library: nothing is unpickled, no code of the checkpoint runs, and no tensor
memory is taken before all headers agree with the shape.
"""

import json
import math
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from executor.environment import check_memory
from executor.model.weights import Weights, build_weights, tensor_shapes, weight_bytes
from policies.core.errors import InputError
from policies.core.models.shape import ModelShape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
FILE_DTYPES = {2: ("BF16", torch.bfloat16), 4: ("F32", torch.float32)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `[start, end)` in bytes of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def load_checkpoint(folder: Path, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Weights:
    """The weights in `folder`, converted to `dtype` on `device`.

    Raises `InputError` in one sentence naming the file and the tensor when a file is missing, truncated or
    corrupt, or a tensor is missing, unexpected, or of another shape or dtype than `shape` says. Tensors are
    read one at a time.
    """
    stored = read_headers(folder)
    check_tensors(folder, stored, shape)
    check_memory(device, weight_bytes(shape, dtype), f"the checkpoint {folder}")
    files: dict[Path, BufferedReader] = {}

    def fill(name: str, view: torch.Tensor) -> None:
        item = stored[name]
        if item.path not in files:
            files[item.path] = item.path.open("rb")
        view.copy_(_read_tensor(files[item.path], name, item, FILE_DTYPES[shape.dtype_bytes][1]))

    try:
        return build_weights(shape, dtype, device, fill)
    finally:
        for file in files.values():
            file.close()


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder` by name, from the headers alone."""
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        return read_header(folder / SINGLE_FILE)
    index = _parse(index_path, index_path.read_bytes())
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise InputError(f"{index_path}: weight_map is missing or no object of file names")
    stored: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name:
            raise InputError(
                f"{index_path}: weight_map names {file_name!r}, expected a file of the same folder"
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
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise InputError(
                    f"{path}: truncated or no safetensors file: {file_bytes} bytes cannot hold its header"
                )
            header = _parse(path, file.read(header_bytes))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    data_start = 8 + header_bytes
    stored = {
        name: _entry(path, name, entry, data_start)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    position = data_start
    for name, item in sorted(stored.items(), key=lambda pair: (pair[1].start, pair[1].end)):
        if item.start != position:
            raise InputError(
                f"{path}: corrupt header: tensor {name} starts at byte {item.start}, expected {position}"
            )
        position = item.end
    if position != file_bytes:
        raise InputError(f"{path}: truncated or corrupt: {file_bytes} bytes, its header describes {position}")
    return stored


def check_tensors(folder: Path, stored: dict[str, StoredTensor], shape: ModelShape) -> None:
    """Raise `InputError` unless `stored` holds exactly the tensors of `shape`, each of the right shape and
    dtype."""
    expected = tensor_shapes(shape)
    dtype = FILE_DTYPES[shape.dtype_bytes][0]
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


def _entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, size, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        well_formed = all(
            type(number) is int and number >= 0 for number in (*size, start, end)
        ) and isinstance(dtype, str)
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise InputError(f"{path}: corrupt header: tensor {name} lacks a valid dtype, shape or data_offsets")
    item_bytes = {file_dtype: width for width, (file_dtype, _) in FILE_DTYPES.items()}.get(dtype)
    if item_bytes is not None and end - start != math.prod(size) * item_bytes:
        raise InputError(
            f"{path}: corrupt header: tensor {name} has {end - start} bytes for {dtype} {list(size)}"
        )
    return StoredTensor(path, dtype, size, data_start + start, data_start + end)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{path}: corrupt: its header is not valid JSON") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: corrupt: its header is no JSON object")
    return values


def _read_tensor(file: BufferedReader, name: str, item: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(item.shape, dtype=dtype)
    file.seek(item.start)
    if file.readinto(memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)) != item.end - item.start:
        raise InputError(f"{item.path}: truncated while reading tensor {name}")
    return tensor
