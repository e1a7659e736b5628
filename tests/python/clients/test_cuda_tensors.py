# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors: everything but the kernels, over a fake driver (fake_gpu.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu import build, scenario


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fakes")
    build(folder)
    return folder


HEAD = """
import nybble, torch
from nybble import NybbleError, Status

def refused(call, words, status="POINTER"):
    try:
        call()
    except NybbleError as error:
        assert words in str(error) and error.status == Status[status], (str(error), error.status)
    else:
        raise AssertionError(f"not refused: {words}")

def f32(*shape, number=0):
    return on_gpu(torch.zeros(*shape), number)
"""


def run(fakes: Path, code: str) -> None:
    assert scenario(fakes, HEAD + code + "\nprint('done')").endswith("done\n")


def test_operations_run_on_pytorchs_stream(fakes: Path) -> None:
    run(
        fakes,
        """
rows = nybble.quantize(f32(2, 3, 5, 128), 4, 32)
assert gpu.taken() == ["quantize"] and rows.device == 0 and gpu.entered == [0]
assert type(rows.codes) is OnGpu and rows.codes.shape == (2, 3, 5, 16)
assert type(nybble.dequantize(rows)) is OnGpu and gpu.taken() == ["dequantize"]
gated = nybble.geglu(f32(4, 64, number=1), f32(4, 64, number=1))
assert gated.device.index == 1 and gpu.taken() == ["geglu"] and gpu.entered[-1] == 1
assert nybble.default_context(1).device == 1 and nybble.default_context(1).backend == "cuda"
assert repr(nybble.default_context(0)) == "nybble.Context(backend='cuda', device=0)"
assert nybble.default_context(0).counters().quantize == 1
flag = on_gpu(torch.zeros(1, dtype=torch.int32))
nybble.quantize(f32(5, 128), non_finite=flag)
assert gpu.taken() == ["quantize"]
""",
    )


def test_attention_over_a_cache(fakes: Path) -> None:
    run(
        fakes,
        """
cache = nybble.Cache(2, 2, 128, key=nybble.affine(4), device="cuda")
assert cache.device == 0 and gpu.allocated, "the cache's memory is PyTorch's"
assert set(gpu.allocated[1::2]) == {-1}, "no queued work writes to it any more"
before = sum(gpu.allocated)
cache.append(f32(2, 2, 300, 128), f32(2, 2, 300, 128))
assert gpu.taken() == ["append"] and cache.lengths == [300, 300]
assert sum(gpu.allocated) - before >= cache.usage().used_bytes
query = f32(2, 8, 1, 128)
out = nybble.attention(query, cache)
names = gpu.taken()
assert type(out) is OnGpu and names and names[0].startswith("attention"), names
assert nybble.attention(query, cache, out=f32(2, 8, 1, 128)) is not None
assert gpu.taken() == names
# The way in C, and through Python: no tensor on another device than the current one takes the first.
from unittest import mock
with mock.patch("nybble._attention._fill_query", side_effect=AssertionError):
    nybble.attention(query, cache, out=f32(2, 8, 1, 128))
gpu.taken()
torch.cuda.current_device = lambda: 1
with mock.patch("nybble._attention.attend", wraps=nybble._attention.attend) as attend:
    nybble.attention(query, cache, out=f32(2, 8, 1, 128))
assert attend.call_args.args[1] == -2 and gpu.entered[-1] == 0 and gpu.taken() == names
call = nybble.AttentionCall(query, cache, out=f32(2, 8, 1, 128))
cache.append(f32(2, 2, 1, 128), f32(2, 2, 1, 128))
call.run()
assert gpu.taken() == ["append", *names] and cache.lengths == [301, 301]
assert cache.trim(1) == 1 and gpu.taken() == ["trim"]
cache.reserve(1000)
cache.refresh()
assert cache.lengths == [0, 0], "as the device counts: nothing ran there"
assert nybble.default_context(0).counters().attention_fused == 5
""",
    )


def test_attention_over_arrays(fakes: Path) -> None:
    run(
        fakes,
        """
query = f32(2, 4, 1, 64)
key = f32(2, 2, 40, 64)
lengths = on_gpu(torch.tensor([40, 13], dtype=torch.int32))
nybble.attention(query, key, key, lengths=lengths)
assert gpu.taken()[0].startswith("attention")
nybble.attention(query, key, key, lengths=[40, 13])  # copied to the device
rows = nybble.quantize(key, 4)
gpu.taken()
out, lse = nybble.attention(query, rows, rows, return_lse=True)
assert gpu.taken()[0].startswith("attention")
merged = nybble.merge([out, out], [lse, lse])
names = gpu.taken()
assert len(names) == 1 and type(merged[0]) is OnGpu and type(merged[1]) is OnGpu, names
""",
    )


def test_no_cache_is_created_in_a_capture(fakes: Path) -> None:
    run(
        fakes,
        """
torch.cuda.is_current_stream_capturing = lambda: True
refused(lambda: nybble.Cache(1, 2, 64, device="cuda"), "being captured", "UNSUPPORTED")
nybble.Cache(1, 2, 64)  # the CPU knows no captures
torch.cuda.is_current_stream_capturing = lambda: False
nybble.Cache(1, 2, 64, device="cuda")
""",
    )


def test_arrays_on_different_devices_are_refused(fakes: Path) -> None:
    run(
        fakes,
        """
host, one = torch.zeros(1, 2, 4, 64), f32(1, 2, 4, 64, number=1)
here = f32(1, 2, 4, 64)
refused(lambda: nybble.attention(host, here, here), "query is on the CPU and key on cuda:0")
refused(lambda: nybble.attention(here, here, one), "query is on cuda:0 and value on cuda:1")
refused(lambda: nybble.attention(here, here, here, out=host), "query is on cuda:0 and out on the CPU")
refused(lambda: nybble.attention(here, here, here, mask=torch.ones(4, 4)), "mask is on the CPU")
refused(lambda: nybble.geglu(here, host), "gate is on cuda:0 and up on the CPU")
cache = nybble.Cache(1, 2, 64)
refused(lambda: cache.append(here, here), "key is on cuda:0 and the cache on the CPU")
refused(lambda: nybble.attention(here, cache), "query is on cuda:0 and the cache on the CPU")
refused(
    lambda: nybble.attention(here, cache, out=f32(1, 2, 4, 64)),
    "query is on cuda:0 and the cache on the CPU",
)
cache = nybble.Cache(1, 2, 64, device="cuda:1")
refused(lambda: cache.append(here, here), "key is on cuda:0 and the cache on cuda:1")
refused(lambda: nybble.attention(host, cache), "query is on the CPU and the cache on cuda:1")
refused(lambda: nybble.attention(host, cache, out=here), "query is on the CPU and out on cuda:0")
refused(
    lambda: nybble.attention(here, cache, out=f32(1, 2, 4, 64)),
    "query is on cuda:0 and the cache on cuda:1",
)
refused(
    lambda: nybble.quantize(here, context=nybble.Context(threads=1)),
    "array is on cuda:0 and the context computes on the CPU",
)
refused(
    lambda: nybble.quantize(host, context=nybble.Context(backend="cuda", device=1)),
    "array is on the CPU and the context computes on cuda:1",
)
refused(lambda: cache.keys("numpy"), "of a cache on cuda:1 it must be 'torch'", "ENUM")
refused(lambda: nybble.Cache(1, 1, 64, device="tpu"), "device is 'tpu'", "VALUE")
refused(
    lambda: nybble.quantize(host, non_finite=torch.zeros(1, dtype=torch.int32)),
    "non_finite is int32 (1,) for arrays on device -1", "VALUE",
)
rows = nybble.quantize(here)
refused(
    lambda: nybble.Quantized(rows.codes, torch.zeros(1, 2, 4, 1), rows.biases, bits=4),
    "are on devices [0, -1, 0]",
)
""",
    )


def test_transformers_cache(fakes: Path) -> None:
    """The layer's part: update, attention, crop, reserve, on whichever device has the first keys."""
    run(
        fakes,
        """
from transformers import LlamaConfig
import nybble.transformers as ours
config = LlamaConfig(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
config._attn_implementation = "nybble"
cache = ours.NybbleCache(config, 8, value_bits=4)
cache.reserve(640)
module = torch.nn.Module().eval()
for tokens in (300, 1):
    keys, values = f32(2, 2, tokens, 64, number=1), f32(2, 2, tokens, 64, number=1)
    packed = cache.layers[0].update(keys, values)
    assert packed[0].shape == (2, 2, 300 if tokens > 1 else 301, 64)
    out, _ = ours.attention_forward(module, f32(2, 4, tokens, 64, number=1), *packed, None)
    assert out.shape == (2, tokens, 4, 64) and out.device.index == 1
    names = gpu.taken()
    assert names[0] == "append" and names[1].startswith("attention"), names
stored = cache.layers[0].stored
assert stored.device == 1 and stored.usage().capacity_tokens >= 640
assert stored.usage().reallocations == 0
cache.crop(-1)
assert cache.get_seq_length() == 300 and gpu.taken() == ["trim"]
refused(lambda: cache.layers[0].update(f32(2, 2, 1, 64), f32(2, 2, 1, 64)), "keys is on cuda:0")
""",
    )


def test_windows_and_padding(fakes: Path) -> None:
    """As on the CPU, a layer with a window rotates, and padding is not stored."""
    run(
        fakes,
        """
import nybble.transformers as ours
from unittest import mock
layer = ours.NybbleLayer(4, sliding_window=8)
module = torch.nn.Module().eval()
starts = on_gpu(torch.tensor([0, 3], dtype=torch.int32).view(2, 1, 1, 1))
reads = []
OnGpu.tolist = lambda self: (reads.append(self), torch.Tensor.tolist(self))[1]
for tokens, mask in ((20, starts), (1, starts), (1, None)):
    packed = layer.update(f32(2, 2, tokens, 64), f32(2, 2, tokens, 64))
    with mock.patch("nybble.transformers.attention", wraps=nybble.attention) as attention, \\
         mock.patch.object(layer.stored, "append", wraps=layer.stored.append) as append:
        ours.attention_forward(module, f32(2, 4, tokens, 64), *packed, mask, sliding_window=8)
    assert not {"window_tokens", "starts"} & set(attention.call_args.kwargs)
    assert append.call_args.kwargs["padding"] == ([0, 3] if tokens > 1 else None)
    assert len(reads) == 1, "a step waits for nothing"
    names = gpu.taken()
    assert "append_placed" in names and names[-1].startswith("attention"), names
assert layer.stored.lengths == [22, 19] and layer.get_seq_length() == 22
assert layer.get_mask_sizes(1) == (8, 15) and layer.stored.usage().capacity_tokens < 64
layer.reorder_cache(torch.tensor([1, 1]))
assert layer.stored.lengths == [19, 19] and any("reorder" in name for name in gpu.taken())
""",
    )


def test_no_gpu() -> None:
    """Where there is no driver: the library's reason."""
    code = (
        "import nybble\n"
        "try:\n    nybble.Cache(1, 1, 64, device='cuda')\n"
        "except nybble.NybbleError as error:\n    print(error.status.name, error)\n"
    )
    environment = {**os.environ, "NYBBLE_LIBCUDA": "/nowhere/libcuda.so"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("UNSUPPORTED") and "/nowhere/libcuda.so" in done.stdout
