# SPDX-License-Identifier: Apache-2.0
"""Saved caches, both ways with mlx-lm itself: what one saves the other loads, bit by bit.

Needs mlx-lm, and the shared library: NYBBLE_LIBRARY names it, build/libnybble.so where that is not
set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
import mlx.core as mx  # noqa: E402  (after the skip)
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import cache as mlx_cache  # noqa: E402
from nybble_library import DTYPE_ID, Library  # noqa: E402

BATCH, HEADS, TOKENS = 2, 3, 5
KEY_DIM, VALUE_DIM = 128, 256
MX_DTYPE = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
WIDTHS = [(bits, group) for bits in (2, 4, 8) for group in (32, 64, 128)]
METADATA = {"model": "a model", "tokenizer_config": '{"a": "caf\u00e9 \\" {}"}', "x": ""}
PLAIN, AFFINE = 1, 2


class Format(ctypes.Structure):
    _fields_ = [("scheme", ctypes.c_int), ("bits", ctypes.c_int32),
                ("group_size", ctypes.c_int32), ("dtype", ctypes.c_int)]  # fmt: skip


class CacheOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("batch", ctypes.c_int64),
                ("kv_heads", ctypes.c_int64), ("key_dim", ctypes.c_int64),
                ("value_dim", ctypes.c_int64), ("key_format", Format), ("value_format", Format),
                ("rule", ctypes.c_int), ("reserved", ctypes.c_int32),
                ("initial_capacity_tokens", ctypes.c_int64), ("max_tokens", ctypes.c_int64),
                ("window_tokens", ctypes.c_int64), ("window_keep_tokens", ctypes.c_int64),
                ("first_tokens", ctypes.c_int64), ("last_tokens", ctypes.c_int64),
                ("part_dtype", ctypes.c_int), ("reserved2", ctypes.c_int32),
                ("page_tokens", ctypes.c_int64)]  # fmt: skip


class Input(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("stride", ctypes.c_int64 * 3)]


class Append(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("tokens", ctypes.c_int64), ("key", Input),
                ("value", Input), ("non_finite", ctypes.c_void_p),
                ("padding", ctypes.c_void_p)]  # fmt: skip


class Metadata(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char_p), ("value", ctypes.c_char_p)]


class RefusedError(Exception):
    """The sentence with which nybble refused."""


class Nybble(Library):
    """The part of libnybble that these tests call."""

    def __init__(self) -> None:
        super().__init__("scalar")
        self.c.nyb_cache_length.restype = ctypes.c_int64
        self.c.nyb_cache_file_metadata_count.restype = ctypes.c_int64
        for name in ("nyb_cache_length", "nyb_cache_destroy", "nyb_safetensors_close"):
            getattr(self.c, name).argtypes = [ctypes.c_void_p, ctypes.c_int64][
                : 1 + (name[-1] == "h")
            ]
        none = ctypes.c_void_p()
        self.expect_size(
            CacheOptions,
            lambda options: self.c.nyb_cache_create(self.context, options, ctypes.byref(none)),
        )

    def check(self, status: int) -> None:
        if status != 0:
            raise RefusedError(self.sentence())

    def create(self, options: CacheOptions) -> ctypes.c_void_p:
        options.struct_size = ctypes.sizeof(options)
        cache = ctypes.c_void_p()
        self.check(
            self.c.nyb_cache_create(self.context, ctypes.byref(options), ctypes.byref(cache))
        )
        return cache

    def append(self, cache: ctypes.c_void_p, key: mx.array, value: mx.array) -> None:
        def view(array: mx.array) -> tuple[Input, Any]:
            data = np.ascontiguousarray(np.array(array.astype(mx.float32)))
            strides = [stride // data.itemsize for stride in data.strides[:3]]
            given = Input(data.ctypes.data, DTYPE_ID["f32"], (ctypes.c_int64 * 3)(*strides))
            return given, data

        key_view, key_data = view(key)
        value_view, value_data = view(value)
        call = Append(ctypes.sizeof(Append), key.shape[2], key_view, value_view)
        self.check(self.c.nyb_cache_append(cache, ctypes.byref(call), None))
        del key_data, value_data

    def open(self, path: Path) -> ctypes.c_void_p:
        file = ctypes.c_void_p()
        self.check(
            self.c.nyb_safetensors_open(self.context, str(path).encode(), ctypes.byref(file))
        )
        return file

    def load(self, path: Path) -> tuple[list[ctypes.c_void_p], list[CacheOptions], dict[str, str]]:
        file = self.open(path)
        try:
            count = ctypes.c_int64()
            self.check(self.c.nyb_cache_file_layers(file, ctypes.byref(count)))
            all_options, layers = [], []
            for layer in range(count.value):
                options = CacheOptions(struct_size=ctypes.sizeof(CacheOptions))
                self.check(
                    self.c.nyb_cache_file_options(
                        file, ctypes.c_int64(layer), ctypes.byref(options)
                    )
                )
                all_options.append(options)
                layers.append(self.create(options))
            handles = (ctypes.c_void_p * len(layers))(*layers)
            self.check(self.c.nyb_cache_load(file, handles, count, None))
            metadata = {}
            for index in range(self.c.nyb_cache_file_metadata_count(file)):
                item = Metadata()
                self.check(
                    self.c.nyb_cache_file_metadata_at(
                        file, ctypes.c_int64(index), ctypes.byref(item)
                    )
                )
                metadata[item.key.decode()] = item.value.decode()
            return layers, all_options, metadata
        finally:
            self.c.nyb_safetensors_close(file)

    def save(self, path: Path, layers: list[ctypes.c_void_p], metadata: dict[str, str]) -> None:
        handles = (ctypes.c_void_p * len(layers))(*layers)
        items = (Metadata * max(1, len(metadata)))()
        for index, (key, value) in enumerate(metadata.items()):
            items[index] = Metadata(key.encode(), value.encode())
        self.check(
            self.c.nyb_cache_save(
                self.context, str(path).encode(), handles, ctypes.c_int64(len(layers)), items,
                ctypes.c_int64(len(metadata)), None,
            )
        )  # fmt: skip

    def destroy(self, layers: list[ctypes.c_void_p]) -> None:
        for layer in layers:
            self.c.nyb_cache_destroy(layer)


@pytest.fixture(scope="module")
def nybble() -> Iterator[Nybble]:
    library = Nybble()
    yield library
    library.close()


def random_rows(tokens: int, dim: int, dtype: str, seed: int) -> mx.array:
    numbers = np.random.default_rng(seed).normal(size=(BATCH, HEADS, tokens, dim))
    return mx.array(numbers.astype(np.float32)).astype(MX_DTYPE[dtype])


def fill(cache: Any, dtype: str, tokens: int = TOKENS, seed: int = 0) -> Any:
    cache.update_and_fetch(
        random_rows(tokens, KEY_DIM, dtype, seed), random_rows(tokens, VALUE_DIM, dtype, seed + 1)
    )
    return cache


def held(cache: Any) -> dict[str, Any]:
    """All that counts of a cache of mlx-lm: the arrays of the tokens that it holds."""
    return dict(tree_flatten(cache.keys_and_values()))


def expect_equal(loaded: Any, wanted: Any) -> None:
    assert type(loaded) is type(wanted)
    for name in ("offset", "bits", "group_size", "keep", "max_size"):
        assert getattr(loaded, name, None) == getattr(wanted, name, None), name
    got, expected = held(loaded), held(wanted)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype, name
        assert got[name].shape == array.shape, name
        same = got[name].view(mx.uint8) == array.view(mx.uint8)
        assert bool(mx.all(same)), name


def there_and_back(nybble: Nybble, path: Path, lengths: int = TOKENS) -> list[CacheOptions]:
    """Loads a file of mlx-lm's, saves it as back.safetensors beside it, checks it there."""
    wanted, wanted_metadata = mlx_cache.load_prompt_cache(str(path), return_metadata=True)
    layers, options, metadata = nybble.load(path)
    for layer in layers:
        for sequence in range(BATCH):
            assert nybble.c.nyb_cache_length(layer, sequence) == lengths
    back = path.with_name("back.safetensors")
    nybble.save(back, layers, metadata)
    nybble.destroy(layers)
    loaded, loaded_metadata = mlx_cache.load_prompt_cache(str(back), return_metadata=True)
    assert loaded_metadata == wanted_metadata
    assert len(loaded) == len(wanted)
    for got, expected in zip(loaded, wanted, strict=True):
        expect_equal(got, expected)
    return options


@pytest.mark.parametrize("dtype", MX_DTYPE)
@pytest.mark.parametrize(("bits", "group_size"), WIDTHS)
def test_quantized_files_of_mlx_lm(
    nybble: Nybble, tmp_path: Path, bits: int, group_size: int, dtype: str
) -> None:
    layers = [
        fill(mlx_cache.QuantizedKVCache(group_size, bits), dtype, seed=seed) for seed in range(3)
    ]
    fill(layers[0], dtype, tokens=1, seed=9)
    layers[0].trim(1)  # what was trimmed is in the file, and does not count
    path = tmp_path / "saved.safetensors"
    mlx_cache.save_prompt_cache(str(path), layers, METADATA)
    for layer, options in enumerate(there_and_back(nybble, path)):
        assert (options.batch, options.kv_heads) == (BATCH, HEADS), layer
        assert (options.key_dim, options.value_dim) == (KEY_DIM, VALUE_DIM)
        for stored in (options.key_format, options.value_format):
            assert stored.scheme == AFFINE
            assert (stored.bits, stored.group_size) == (bits, group_size)
            assert stored.dtype == DTYPE_ID[dtype]


@pytest.mark.parametrize("dtype", MX_DTYPE)
def test_plain_files_of_mlx_lm(nybble: Nybble, tmp_path: Path, dtype: str) -> None:
    layers = [fill(mlx_cache.KVCache(), dtype, tokens=300, seed=seed) for seed in range(2)]
    path = tmp_path / "saved.safetensors"
    mlx_cache.save_prompt_cache(str(path), layers)
    for options in there_and_back(nybble, path, lengths=300):
        for stored in (options.key_format, options.value_format):
            assert (stored.scheme, stored.dtype) == (PLAIN, DTYPE_ID[dtype])


def in_order(cache: Any) -> list[mx.array]:
    """A rotating cache's rows from the oldest on."""
    return [cache._temporal_order(rows) for rows in (cache.keys, cache.values)]


def expect_same_ring(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    for name in ("offset", "keep", "max_size"):
        assert getattr(got, name) == getattr(wanted, name), name
    for rows, expected in zip(in_order(got), in_order(wanted), strict=True):
        assert rows.dtype == expected.dtype
        assert rows.shape == expected.shape
        assert bool(mx.all(rows.view(mx.uint8) == expected.view(mx.uint8)))


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("appends", [[2], [5, 1], [5, 1, 1, 1], [5, *[1] * 9], [20], [20, 1], [3, 9],
                                     [5, *[1] * 6, 4], [*[1] * 8], [*[1] * 13]])  # fmt: skip
def test_rotating_files_of_mlx_lm(
    nybble: Nybble, tmp_path: Path, appends: list[int], keep: int, older: bool
) -> None:
    cache = mlx_cache.RotatingKVCache(max_size=8, keep=keep)
    for seed, tokens in enumerate(appends):
        fill(cache, "bf16", tokens=tokens, seed=seed)
    path = tmp_path / "saved.safetensors"
    if older:
        numbers = (cache.keep, cache.max_size, cache.offset, cache._idx)
        save_as_before(path, [cache], [tuple(map(str, numbers))])
    else:
        mlx_cache.save_prompt_cache(str(path), [cache], METADATA)
    (layer,), (options,), metadata = nybble.load(path)
    assert (options.window_tokens, options.window_keep_tokens) == (8, keep)
    assert nybble.c.nyb_cache_length(layer, 0) == sum(appends)
    back = tmp_path / "back.safetensors"
    nybble.save(back, [layer], metadata)
    (loaded,) = mlx_cache.load_prompt_cache(str(back))
    expect_same_ring(loaded, cache)
    for seed, tokens in enumerate([1, 1, 4, 1]):  # both go on alike, and nybble's with them
        keys, values = (
            random_rows(tokens, KEY_DIM, "bf16", seed),
            random_rows(tokens, VALUE_DIM, "bf16", seed + 50),
        )
        for each in (loaded, cache):
            each.update_and_fetch(keys, values)
        expect_same_ring(loaded, cache)
        nybble.append(layer, keys, values)
        nybble.save(back, [layer], metadata)
        expect_same_ring(mlx_cache.load_prompt_cache(str(back))[0], cache)
    nybble.destroy([layer])


def test_rotating_numbers_that_contradict_each_other(nybble: Nybble, tmp_path: Path) -> None:
    cache = mlx_cache.RotatingKVCache(max_size=8, keep=2)
    fill(cache, "f16", tokens=6)
    for offset, index in ((5, 6), (7, 5), (6, 7), (-1, -1), (3, 6), (9, 4)):
        cache.offset, cache._idx = offset, index
        path = tmp_path / "saved.safetensors"
        mlx_cache.save_prompt_cache(str(path), [cache])
        with pytest.raises(RefusedError, match="which contradict each other"):
            nybble.load(path)
    cache.offset, cache._idx, cache.keep = 6, 6, 8
    mlx_cache.save_prompt_cache(str(path), [cache])
    with pytest.raises(RefusedError, match="at most 8 tokens cannot keep its 8 first ones"):
        nybble.load(path)


def test_layers_of_several_kinds_in_one_file(nybble: Nybble, tmp_path: Path) -> None:
    layers = [mlx_cache.QuantizedKVCache(64, bits) for bits in (8, 4, 2)]
    layers = [fill(cache, "bf16", seed=seed) for seed, cache in enumerate(layers)]
    layers += [fill(mlx_cache.KVCache(), "f16") for _ in range(9)]  # two digits in the numbers
    path = tmp_path / "saved.safetensors"
    mlx_cache.save_prompt_cache(str(path), layers, METADATA)
    options = there_and_back(nybble, path)
    assert [each.key_format.bits for each in options] == [8, 4, 2] + [0] * 9


def format_of(bits: int, group_size: int, dtype: str) -> Format:
    return Format(AFFINE if bits else PLAIN, bits, group_size, DTYPE_ID[dtype])


@pytest.mark.parametrize("dtype", MX_DTYPE)
@pytest.mark.parametrize(("bits", "group_size"), [*WIDTHS, (3, 64), (6, 32), (0, 0)])
def test_files_of_nybble(
    nybble: Nybble, tmp_path: Path, bits: int, group_size: int, dtype: str
) -> None:
    """What nybble quantized and saved is in mlx-lm what MLX quantizes."""
    stored = format_of(bits, group_size, dtype)
    cache = nybble.create(
        CacheOptions(
            batch=BATCH, kv_heads=HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM,
            key_format=stored, value_format=stored,
        )
    )  # fmt: skip
    keys, values = random_rows(7, KEY_DIM, dtype, 1), random_rows(7, VALUE_DIM, dtype, 2)
    nybble.append(cache, keys, values)
    path = tmp_path / "nybble.safetensors"
    nybble.save(path, [cache], METADATA)
    nybble.destroy([cache])
    (loaded,), metadata = mlx_cache.load_prompt_cache(str(path), return_metadata=True)
    assert metadata == METADATA
    wanted = mlx_cache.KVCache()
    wanted.update_and_fetch(keys, values)
    expect_equal(loaded, wanted.to_quantized(group_size, bits) if bits else wanted)
    if bits in (0, 2, 4, 8):  # mlx-lm's own caches have no other widths
        fill(loaded, dtype, tokens=1, seed=8)
        assert loaded.offset == 8


def save_as_before(path: Path, layers: list[Any], fields: list[Any]) -> None:
    """mlx-lm's layout before 0.32: numbers are metadata, and come first."""
    arrays = dict(tree_flatten([cache.keys_and_values() for cache in layers]))
    classes = [type(cache).__name__ for cache in layers]
    info = dict(tree_flatten([fields, METADATA, classes]))
    mx.save_safetensors(str(path), arrays, info)


@pytest.mark.parametrize("oldest", [False, True])
def test_files_of_older_versions(nybble: Nybble, tmp_path: Path, oldest: bool) -> None:
    layers = [fill(mlx_cache.QuantizedKVCache(32, 4), "f16"), fill(mlx_cache.KVCache(), "bf16")]
    step = ("256",) if oldest else ()  # until 0.28
    before, now = tmp_path / "before.safetensors", tmp_path / "now.safetensors"
    save_as_before(before, layers, [(*step, str(TOKENS), "32", "4"), ""])
    mlx_cache.save_prompt_cache(str(now), layers, METADATA)
    loaded, _, metadata = nybble.load(before)
    assert metadata == METADATA
    nybble.save(tmp_path / "back.safetensors", loaded, metadata)
    nybble.destroy(loaded)
    for got, wanted in zip(
        mlx_cache.load_prompt_cache(str(tmp_path / "back.safetensors")), layers, strict=True
    ):
        expect_equal(got, wanted)


def test_an_older_file_whose_offset_is_wrong(nybble: Nybble, tmp_path: Path) -> None:
    path = tmp_path / "before.safetensors"
    save_as_before(path, [fill(mlx_cache.QuantizedKVCache(32, 4), "f16")], [("4", "32", "4")])
    with pytest.raises(RefusedError, match="layer 0: its offset is 4, but its tensors hold 5"):
        nybble.load(path)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (mlx_cache.ChunkedKVCache(64), "layer 1 is a ChunkedKVCache; nybble loads"),
        (mlx_cache.ConcatenateKVCache(), "layer 1 is a ConcatenateKVCache; nybble loads"),
    ],
)
def test_classes_that_nybble_lacks(nybble: Nybble, tmp_path: Path, cache: Any, words: str) -> None:
    path = tmp_path / "saved.safetensors"
    layers = [fill(mlx_cache.KVCache(), "f16"), fill(cache, "f16")]
    mlx_cache.save_prompt_cache(str(path), layers)
    with pytest.raises(RefusedError, match=words):
        nybble.load(path)


def test_an_empty_cache_of_mlx_lm(nybble: Nybble, tmp_path: Path) -> None:
    path = tmp_path / "saved.safetensors"
    mlx_cache.save_prompt_cache(str(path), [mlx_cache.KVCache()])
    with pytest.raises(RefusedError, match=r'the tensor "0\.0" \(keys\) has the shape \[0\]'):
        nybble.load(path)


def test_what_only_nybble_holds_is_refused_by_mlx_lm(nybble: Nybble, tmp_path: Path) -> None:
    cache = nybble.create(
        CacheOptions(
            batch=BATCH, kv_heads=HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM,
            key_format=format_of(8, 64, "bf16"), value_format=format_of(4, 64, "bf16"),
        )
    )  # fmt: skip
    nybble.append(cache, random_rows(7, KEY_DIM, "bf16", 1), random_rows(7, VALUE_DIM, "bf16", 2))
    path = tmp_path / "nybble.safetensors"
    nybble.save(path, [cache], METADATA)
    nybble.destroy([cache])
    with pytest.raises(KeyError, match="NybbleCache"):
        mlx_cache.load_prompt_cache(str(path))
    (loaded,), (options,), metadata = nybble.load(path)
    assert (options.key_format.bits, options.value_format.bits) == (8, 4)
    assert metadata == METADATA
    assert nybble.c.nyb_cache_length(loaded, 1) == 7
    nybble.destroy([loaded])
