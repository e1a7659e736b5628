# SPDX-License-Identifier: Apache-2.0
"""nybble's safetensors files against those of the safetensors package and of MLX, both ways.

Needs numpy and safetensors, and mlx for MLX's part; and the shared library: NYBBLE_LIBRARY names it,
build/libnybble.so where that is not set.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")
import safetensors.numpy  # noqa: E402, F811  (after the skip)

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(os.environ.get("NYBBLE_LIBRARY", ROOT / "build" / "libnybble.so"))
NAMES = (
    "plain",
    "a.b.0",
    "caf\u00e9 \u6f22 \U0001f984",
    'quote " back \\ slash /',
    "tab\t\x01",
    "",
)
DTYPES = {  # of numpy, and the file's word
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16,
    "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
SHAPES = ((), (1,), (3,), (2, 3), (0,), (4, 0, 2), (1, 2, 1, 3, 1, 2, 1, 2))

Read = dict[str, tuple[str, tuple[int, ...], bytes]]  # name: dtype, shape, data


class Tensor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("dtype", ctypes.c_char_p), ("rank", ctypes.c_int64),
                ("shape", ctypes.c_int64 * 8), ("data", ctypes.c_void_p),
                ("data_bytes", ctypes.c_int64)]  # fmt: skip


class Metadata(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char_p), ("value", ctypes.c_char_p)]


class RefusedError(Exception):
    """The sentence with which nybble refused."""


class Library:
    """The part of libnybble that these tests call."""

    def __init__(self) -> None:
        if not LIBRARY.exists():
            pytest.fail(f"{LIBRARY} does not exist; build it or set NYBBLE_LIBRARY")
        self.c = ctypes.CDLL(str(LIBRARY))
        self.c.nyb_last_error.restype = ctypes.c_char_p
        for count in (self.c.nyb_safetensors_count, self.c.nyb_safetensors_metadata_count):
            count.restype = ctypes.c_int64
        self.context = ctypes.c_void_p()
        self.check(self.c.nyb_context_create(None, ctypes.byref(self.context)))

    def close(self) -> None:
        self.c.nyb_context_destroy(self.context)

    def check(self, status: int) -> None:
        if status != 0:
            raise RefusedError(self.c.nyb_last_error().decode())

    def read(self, path: Path) -> tuple[Read, dict[str, str]]:
        file = ctypes.c_void_p()
        self.check(self.c.nyb_safetensors_open(self.context, os.fsencode(path), ctypes.byref(file)))
        try:
            tensors: Read = {}
            for index in range(self.c.nyb_safetensors_count(file)):
                t = Tensor()
                self.check(self.c.nyb_safetensors_at(file, ctypes.c_int64(index), ctypes.byref(t)))
                data = ctypes.string_at(t.data, t.data_bytes) if t.data_bytes else b""
                tensors[t.name.decode()] = (t.dtype.decode(), tuple(t.shape[: t.rank]), data)
            metadata = {}
            for index in range(self.c.nyb_safetensors_metadata_count(file)):
                m = Metadata()
                self.check(
                    self.c.nyb_safetensors_metadata_at(file, ctypes.c_int64(index), ctypes.byref(m))
                )
                metadata[m.key.decode()] = m.value.decode()
            return tensors, metadata
        finally:
            self.c.nyb_safetensors_close(file)

    def write(self, path: Path, tensors: Read, metadata: dict[str, str]) -> None:
        rows = (Tensor * max(1, len(tensors)))()
        for row, (name, (dtype, shape, data)) in zip(rows, tensors.items(), strict=False):
            row.name, row.dtype, row.rank = name.encode(), dtype.encode(), len(shape)
            row.shape[: len(shape)] = shape
            row.data = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p)
            row.data_bytes = len(data)
        pairs = (Metadata * max(1, len(metadata)))()
        for pair, (key, value) in zip(pairs, metadata.items(), strict=False):
            pair.key, pair.value = key.encode(), value.encode()
        self.check(
            self.c.nyb_safetensors_write(
                self.context,
                os.fsencode(path),
                rows,
                ctypes.c_int64(len(tensors)),
                pairs,
                ctypes.c_int64(len(metadata)),
            )  # fmt: skip
        )


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    made = Library()
    yield made
    made.close()


def random_arrays() -> dict[str, Any]:
    """One array for each dtype, with names and shapes that are awkward."""
    generator = np.random.default_rng(1)
    arrays = {}
    for i, (word, dtype) in enumerate(DTYPES.items()):
        shape = SHAPES[i % len(SHAPES)]
        count = int(np.prod(shape, dtype=np.int64))
        name = f"{word} {NAMES[i % len(NAMES)]}"
        values = generator.integers(0, 2 if word == "BOOL" else 120, count)
        arrays[name] = values.astype(dtype).reshape(shape)
    return arrays


def as_read(arrays: dict[str, Any]) -> Read:
    words = {np.dtype(dtype): word for word, dtype in DTYPES.items()}
    return {name: (words[a.dtype], a.shape, a.tobytes()) for name, a in arrays.items()}


def test_nybble_reads_what_safetensors_writes(library: Library, tmp_path: Path) -> None:
    arrays = random_arrays()
    metadata = {"format": "np", **{f"key {name}": f"value {name}" for name in NAMES}}
    path = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata)
    assert library.read(path) == (as_read(arrays), metadata)


def test_safetensors_reads_what_nybble_writes(library: Library, tmp_path: Path) -> None:
    arrays = random_arrays()
    metadata = {f"key {name}": f"value {name}" for name in NAMES}
    path = tmp_path / "ours.safetensors"
    library.write(path, as_read(arrays), metadata)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == metadata
        assert set(file.keys()) == set(arrays)
        for name, array in arrays.items():
            found = file.get_tensor(name)
            assert found.dtype == array.dtype
            assert found.shape == array.shape
            assert found.tobytes() == array.tobytes()


def test_every_dtype_word_is_one_of_theirs(library: Library, tmp_path: Path) -> None:
    """numpy has no BF16 or F8; the package checks their sizes all the same when it opens a file."""
    for word, size in {"BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}.items():
        path = tmp_path / f"{word}.safetensors"
        library.write(path, {"x": (word, (3,), bytes(3 * size))}, {})
        with safetensors.safe_open(path, framework="numpy") as file:
            assert file.get_slice("x").get_dtype() == word
            assert file.get_slice("x").get_shape() == [3]


def test_files_of_mlx(library: Library, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'mlx[cpu]'")
    words = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32,
             "I64": mx.int64, "U8": mx.uint8, "BOOL": mx.bool_}  # fmt: skip
    arrays = {
        f"{word} {name}": (mx.arange(6) % 2).reshape(2, 3).astype(dtype)
        for word, dtype in words.items()
        for name in NAMES[:4]
    }
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    mx.save_safetensors(str(theirs), arrays, {"k \u00e9": 'v "'})
    tensors, metadata = library.read(theirs)
    assert metadata["k \u00e9"] == 'v "'
    assert set(tensors) == set(arrays)
    library.write(ours, tensors, metadata)
    assert library.read(ours) == (tensors, metadata)
    again, again_metadata = mx.load(str(ours), return_metadata=True)
    assert again_metadata == metadata
    assert set(again) == set(arrays)
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype
        assert mx.array_equal(again[name], array)
        assert tensors[name][:2] == (name.split(" ")[0], (2, 3))


def changed(header: bytes, generator: random.Random) -> bytes:
    """A header with a few of its parts cut, doubled or replaced."""
    parts = list(header)
    pieces = (
        b'"',
        b",",
        b"0",
        b"9",
        b"-",
        b"{",
        b"}",
        b"[",
        b"]",
        b"\\u0041",
        b" ",
        b"\xc3",
        b"1e1",
    )
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(parts))
        length = generator.randint(0, 3)
        parts[at : at + length] = list(generator.choice(pieces))
    return bytes(parts)


def test_nothing_is_accepted_that_safetensors_refuses(library: Library, tmp_path: Path) -> None:
    generator = random.Random(2)
    header = json.dumps(
        {
            "__metadata__": {"k": "v"},
            "x": {"dtype": "F16", "shape": [1, 2], "data_offsets": [0, 4]},
            "y": {"dtype": "U8", "shape": [5], "data_offsets": [4, 9]},
            "z": {"dtype": "I64", "shape": [0], "data_offsets": [9, 9]},
        }
    ).encode()
    path = tmp_path / "changed.safetensors"
    accepted = refused = 0
    for _ in range(3000):
        text = changed(header, generator)
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(9))
        try:
            tensors, metadata = library.read(path)
        except RefusedError:
            refused += 1
            continue
        accepted += 1
        with safetensors.safe_open(path, framework="numpy") as file:
            assert set(file.keys()) == set(tensors), text
            assert (file.metadata() or {}) == metadata, text
            for name, (_, shape, data) in tensors.items():
                found = file.get_tensor(name)
                assert (found.shape, found.tobytes()) == (shape, data), text
    assert accepted > 20
    assert refused > 1000
