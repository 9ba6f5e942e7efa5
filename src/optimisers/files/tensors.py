"""Named arrays and a document in a safetensors file: written so that a crash leaves the old file whole, read by mapping it."""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from optimisers.backends.arrays import dtype_name, numpy_dtype
from optimisers.backends.conversion import to_numpy
from optimisers.errors import DtypeError, StateError
from optimisers.files.replacing import replacing

__all__ = ["DTYPES", "Contents", "read", "write"]

_KEY, _SUM = "optimisers", "optimisers.checksum"
_METADATA = "__metadata__"
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""The dtypes of safetensors, and NumPy's names for them."""
_PAIRS = {"complex128": "float64"}
"""Dtypes that safetensors lacks, kept as pairs of another: an axis of length 2 at the end."""


DTYPES = frozenset(_NAMES.values()) | _PAIRS.keys()
"""What a file can hold."""


class Contents(NamedTuple):
    """What is in a file: arrays by name, and the document, or `None` in a file of another tool."""

    arrays: Mapping[str, np.ndarray]
    document: Any


# Writing --------------------------------------------------------------------------------------------------------------


def write(file: "str | os.PathLike[str]", arrays: Mapping[str, Any], document: Mapping[str, Any] | None) -> None:
    """Write arrays of any library, and a document of plain data, with checksums of both; without a document, as other tools do.

    The file is written under another name in the same folder, flushed to the disk and renamed, so the old one is there until the
    new one is whole.

    **Raises** `DtypeError` for an array that safetensors cannot hold, naming it; `StateError` for a name that it keeps for itself;
    `OSError` as writing does.
    """
    from safetensors import TensorSpec, serialize_file

    if _METADATA in arrays:
        raise StateError(f"{_METADATA} is a name that safetensors keeps for itself; rename the array")
    kept: list[np.ndarray] = []  # alive while their memory is written
    specs, table = {}, {}
    for name, array in arrays.items():
        flat, dtype = _as_bytes(name, array)
        kept.append(flat)
        shape = tuple(array.shape)
        table[name] = [dtype, list(shape), _checksum(flat)]
        pairs = dtype in _PAIRS
        specs[name] = TensorSpec(
            dtype=_PAIRS.get(dtype, dtype),
            shape=(*shape, 2) if pairs else shape,
            data_ptr=flat.__array_interface__["data"][0],
            data_len=flat.nbytes,
        )
    metadata = {"format": "pt"}  # which Transformers asks for
    if document is not None:
        text = json.dumps({**document, "tensors": table})
        metadata = {_KEY: text, _SUM: _checksum(np.frombuffer(text.encode(), np.uint8))}
    elif any(each[0] in _PAIRS for each in table.values()):
        raise DtypeError(f"{next(name for name, each in table.items() if each[0] in _PAIRS)}: safetensors has no complex128")
    with replacing(file) as name:
        try:
            serialize_file(specs, name, metadata)
        except Exception as error:
            if isinstance(error, OSError) or type(error).__name__ != "SafetensorError":
                raise
            raise OSError(f"{file}: cannot be written: {error}") from error


def _as_bytes(name: str, array: Any) -> tuple[np.ndarray, str]:
    """The contiguous memory of an array as NumPy sees it, and the name of its dtype."""
    dtype = dtype_name(array)
    if dtype not in DTYPES:
        raise DtypeError(f"{name}: safetensors has no {dtype}; convert it before saving")
    flat = np.asarray(to_numpy(array), order="C")
    if flat.dtype.byteorder == ">":
        flat = flat.astype(flat.dtype.newbyteorder("<"))
    return flat, dtype


def _checksum(array: np.ndarray) -> str:
    import xxhash

    flat = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    return xxhash.xxh3_128_hexdigest(flat.data)


# Reading --------------------------------------------------------------------------------------------------------------


def read(file: "str | os.PathLike[str]", *, verify: bool = True) -> Contents:
    """Map a file into memory. Its arrays are views, which are read when they are looked at, and can be written without touching it.

    **Raises** `StateError` for what is no safetensors file, or whose contents are not those that were written; `OSError` for
    one that cannot be read.
    """
    header, start = _header(file)
    metadata = header.pop(_METADATA, None) or {}
    whole = np.asarray(np.memmap(file, np.uint8, mode="c"))
    arrays = {name: _view(file, name, entry, whole[start:]) for name, entry in header.items()}
    if _KEY not in metadata and _SUM not in metadata:
        return Contents(arrays, None)
    text = metadata.get(_KEY, "")
    if metadata.get(_SUM) != _checksum(np.frombuffer(text.encode(), np.uint8)):
        raise StateError(f"{file}: the document in it is damaged: its checksum is another one")
    try:
        document = json.loads(text)
        table = document.pop("tensors")
        arrays = dict(_as_written(file, arrays, table))
    except StateError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise StateError(f"{file}: the document in it describes no arrays ({type(error).__name__}: {error})") from error
    if verify:
        for name, (_, _, expected) in table.items():
            if _checksum(arrays[name]) != expected:
                raise StateError(f"{file}: {name} is damaged: its checksum is another one")
    return Contents(arrays, document)


def _header(file: "str | os.PathLike[str]") -> tuple[dict[str, Any], int]:
    """The header of a file, which safetensors has checked, and where the data begin."""
    from safetensors import SafetensorError, safe_open

    try:
        with open(file, "rb") as opened, safe_open(file, framework="np"):
            size = struct.unpack("<Q", opened.read(8))[0]
            return json.loads(opened.read(size)), 8 + size
    except SafetensorError as error:
        hint = "; files of PyTorch are for `optimisers convert`" if str(file).endswith((".pt", ".pth", ".bin", ".ckpt")) else ""
        raise StateError(f"{file} is no safetensors file, or is damaged: {error}{hint}") from None
    except (ValueError, struct.error, RecursionError) as error:
        raise StateError(f"{file}: its header cannot be read: {error}") from None


def _view(file: Any, name: str, entry: Mapping[str, Any], data: np.ndarray) -> np.ndarray:
    kind = _NAMES.get(entry["dtype"])
    if kind is None:
        raise StateError(f"{file}: {name} is of dtype {entry['dtype']}, which cannot be read here")
    low, high = entry["data_offsets"]
    return data[low:high].view(numpy_dtype(kind)).reshape(entry["shape"])


def _as_written(file: Any, arrays: Mapping[str, np.ndarray], table: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays with the dtypes and shapes that they were written with.

    **Raises** `StateError` when they are not those that the document speaks of.
    """
    for name in sorted(arrays.keys() ^ table.keys()):
        raise StateError(
            f"{file}: {name} is {'missing' if name in table else 'not spoken of in the document'}; the file is damaged"
        )
    for name, (dtype, shape, _) in table.items():
        array = arrays[name]
        if dtype in _PAIRS and dtype_name(array) == _PAIRS[dtype] and array.shape == (*shape, 2):
            array = array.view(numpy_dtype(dtype)).reshape(shape)
        if (dtype_name(array), list(array.shape)) != (dtype, shape):
            raise StateError(
                f"{file}: {name} is {array.dtype.name}{list(array.shape)}, and was written as {dtype}{shape}; the file is damaged"
            )
        yield name, array
