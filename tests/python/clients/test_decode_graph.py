# SPDX-License-Identifier: Apache-2.0
"""generate() with captured decode steps, without a GPU: a graph that is replayed runs the step again,
from the same tensors. What a replay does to the cache's counts it does by itself."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_transformers import CONFIGS, WAYS, left_padded, prompt, tiny

import nybble.transformers as ours
from nybble import NybbleError, Status, _decode_graph
from nybble.transformers import NybbleCache, NybbleLayer

torch.set_num_threads(1)  # the models are tiny


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def graphs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(step: Any, device: str) -> Callable[[], None]:
        graph, cache = step.func.__self__, step.args[1]
        for layer in cache._layers():  # as recording does
            layer.cumulative_length += 1
        logits: list[torch.Tensor] = []

        def replay() -> None:
            cache.capturing = True  # the model's own forward
            step()
            cache.capturing = False
            logits.append(graph.logits)
            graph.logits = logits[0].copy_(graph.logits)  # the same memory every time

        return replay

    monkeypatch.setattr(_decode_graph, "_capture", capture)
    monkeypatch.setattr(NybbleLayer, "count_replay", lambda self: None)


def generated(model: Any, ids: torch.Tensor, room: int = 64, **options: Any) -> Any:
    cache = NybbleCache(model.config, 8)
    cache.reserve(room)
    torch.manual_seed(1)
    return cache, model.generate(ids, cache=cache, max_new_tokens=12, **options)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize(
    ("kind", "way"), [("llama", way) for way in WAYS] + [(kind, "greedy") for kind in CONFIGS][1:]
)
def test_generate(graphs_here: None, kind: str, way: str, padded: bool) -> None:
    """The tokens that the model has without."""
    ids, mask = left_padded() if padded else (prompt(3, 20), None)
    options = {"attention_mask": mask, **WAYS[way]}
    model = tiny(kind, "nybble")
    cache, expected = generated(model, ids, **options)
    graphs = ours.patch_decode(model)
    patched, found = generated(model, ids, **options)
    assert torch.equal(found, expected) and graphs.reason is None
    assert patched.get_seq_length() == cache.get_seq_length()
    steps = graphs.replayed + graphs.eager
    assert steps == 11
    if way.startswith("beams"):
        assert graphs.captured == 0  # reordering moves the tokens
    else:
        assert graphs.captured == 1 and graphs.eager == 1


class Compiler:
    """A backend of torch.compile that runs what it is given, and counts."""

    def __init__(self) -> None:
        self.compiled, self.fails_at = 0, 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.compiled += 1
        if self.compiled == self.fails_at:
            raise RuntimeError("no such compiler\nmore")
        return module.forward


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    monkeypatch.setattr(_decode_graph, "_compile", lambda f: torch.compile(f, backend=made))
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt-oss"])
def test_compiled(graphs_here: None, compiler: Compiler, kind: str) -> None:
    """Once for all layers, before a step is captured, and for every cache to come."""
    model = tiny(kind, "nybble", layers=6 if kind == "llama" else 3)
    given = [(prompt(3, 20), None), left_padded()]
    expected = [generated(model, ids, attention_mask=mask)[1] for ids, mask in given]
    if kind == "gemma3":
        ours.patch_mlp(model, "fused")
        expected = [generated(model, ids, attention_mask=mask)[1] for ids, mask in given]
    graphs = ours.patch_decode(model, compile=True)
    for (ids, mask), tokens in zip(given, expected):
        _, found = generated(model, ids, attention_mask=mask)
        assert torch.equal(found, tokens) and graphs.reason is None
        if kind == "llama":  # norm, keys and queries for layer 0 and all others, output, MLP
            assert compiler.compiled == 5
        before = compiler.compiled
    assert compiler.compiled == before > 0
    assert (graphs.captured, graphs.eager, graphs.replayed) == (2, 2, 20)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_compile_asked_for_later(graphs_here: None, compiler: Compiler) -> None:
    """A step is compiled before it is captured, also where the one before was not."""
    model = tiny("llama", "nybble")
    cache = NybbleCache(model.config, 8)
    cache.reserve(64)
    graphs = ours.patch_decode(model)
    for tokens in (20, 1):
        model(prompt(2, tokens), cache=cache)
    assert ours.patch_decode(model, compile=True) is graphs and compiler.compiled == 0
    model(prompt(2, 1), cache=cache)
    assert compiler.compiled == 5 and (graphs.captured, graphs.eager) == (0, 2)
    model(prompt(2, 1), cache=cache)
    assert compiler.compiled == 5 and (graphs.captured, graphs.replayed) == (1, 1)


@pytest.mark.parametrize("fails_at", [1, 4])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_compiling_that_fails(
    graphs_here: None, compiler: Compiler, kind: str, fails_at: int
) -> None:
    """Before a layer has stored the token and after: the step is computed as before, then captured."""
    model, ids = tiny(kind, "nybble"), prompt(2, 20)
    cache, expected = generated(model, ids, do_sample=False)
    compiler.fails_at = fails_at
    graphs = ours.patch_decode(model, compile=True)
    with pytest.warns(UserWarning, match="without compiled layers: compiling failed: Backend"):
        patched, found = generated(model, ids, do_sample=False)
    assert torch.equal(found, expected) and not graphs.compile
    assert patched.layers[0].stored.lengths == cache.layers[0].stored.lengths == [31, 31]
    assert (graphs.captured, graphs.eager, graphs.replayed) == (1, 1, 10)


def test_compiled_for_other_integers(graphs_here: None, compiler: Compiler) -> None:
    """Nothing is left to compile when a step is captured, whatever integers tokens are."""
    model, cache = patched_and_filled(compile=True)
    model(prompt(2, 1).int(), cache=cache)
    before = compiler.compiled
    model(prompt(2, 1).int(), cache=cache)
    assert compiler.compiled == before > 0 and model.decode_graphs.captured == 1


def test_errors_that_are_none_of_compiling(graphs_here: None, compiler: Compiler) -> None:
    """A step that fails without compiling, too, does not end compiling."""
    model, cache = patched_and_filled(compile=True)
    other = tiny("llama", "nybble")
    graphs = ours.patch_decode(other, compile=True)
    with pytest.raises(NybbleError, match="holds 20 tokens of another model"):
        other(prompt(2, 1), cache=cache)
    assert graphs.compile and graphs.reason is None and cache.get_seq_length() == 20
    model(prompt(2, 1), cache=cache)
    assert cache.layers[2].stored.lengths == [21, 21]


def test_nothing_to_compile(graphs_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = patched_and_filled(compile=True)
    monkeypatch.setattr(_decode_graph, "GradientCheckpointingLayer", torch.nn.Conv1d)
    with pytest.warns(UserWarning, match="LlamaForCausalLM has no decoder layers"):
        model(prompt(2, 1), cache=cache)
    model(prompt(2, 1), cache=cache)
    graphs = model.decode_graphs
    assert not graphs.compile and (graphs.captured, graphs.eager) == (1, 1)


def test_compiled_layers_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time: each leaves the layers as they were."""
    monkeypatch.setattr(_decode_graph, "_compile", lambda function: lambda *a, **o: function())
    model = tiny("llama", "nybble")
    entered = threading.Event()
    seen = []

    def second() -> None:
        with _decode_graph.compiled_layers(model):
            entered.set()
        seen.append([("forward" in vars(layer)) for layer in model.model.layers])

    thread = threading.Thread(target=second)
    with _decode_graph.compiled_layers(model):
        thread.start()
        assert not entered.wait(0.2)
    thread.join()
    assert seen == [[False] * 3]


def patched_and_filled(compile: bool = False) -> tuple[Any, NybbleCache]:
    model = tiny("llama", "nybble")
    ours.patch_decode(model, compile)
    cache = NybbleCache(model.config, 8)
    cache.reserve(64)
    model(prompt(2, 20), cache=cache)
    return model, cache


def test_weights_that_move(graphs_here: None) -> None:
    """A graph reads weights where they were: where they are elsewhere there is another."""
    model, cache = patched_and_filled()
    for _ in range(2):
        model(prompt(2, 1), cache=cache)
    made = model.bfloat16()(prompt(2, 1), cache=cache)
    graphs = model.decode_graphs
    assert made.logits.dtype == torch.bfloat16 and (graphs.captured, graphs.eager) == (1, 2)
    assert model(prompt(2, 1), cache=cache).logits.dtype == torch.bfloat16
    assert (graphs.captured, graphs.replayed) == (2, 2)


def test_reset_lets_graphs_go(graphs_here: None) -> None:
    model, cache = patched_and_filled()
    for _ in range(2):
        model(prompt(2, 1), cache=cache)
    assert cache.graph is not None
    cache.reset()
    assert cache.graph is None and cache.warm is None
    model(prompt(3, 20), cache=cache)
    for _ in range(2):
        model(prompt(3, 1), cache=cache)
    graphs = model.decode_graphs
    assert (graphs.captured, graphs.eager, graphs.replayed) == (2, 2, 2)


def test_end_of_sequence(graphs_here: None) -> None:
    """Sequences end where they end without."""
    model, ids = tiny("llama", "nybble"), prompt(3, 20)
    _, free = generated(model, ids, do_sample=False)
    ends = int(free[1, 20 + 5])
    _, expected = generated(model, ids, do_sample=False, eos_token_id=ends)
    assert bool((expected[1, 20:] == 0).any()), "padded behind its end"
    ours.patch_decode(model)
    _, found = generated(model, ids, do_sample=False, eos_token_id=ends)
    assert torch.equal(found, expected)


def test_cache_that_grows_is_captured_anew(graphs_here: None) -> None:
    model, ids = tiny("llama", "nybble"), prompt(2, 20)
    _, expected = generated(model, ids, do_sample=False)
    graphs = ours.patch_decode(model)
    cache, found = generated(model, ids, room=24, do_sample=False)
    assert torch.equal(found, expected) and graphs.reason is None
    assert cache.layers[0].stored.usage().reallocations == 1
    assert (graphs.captured, graphs.eager, graphs.replayed) == (2, 2, 9)


def test_assisted(graphs_here: None) -> None:
    """Steps of several tokens and crop in between."""
    model, assistant = tiny("llama", "nybble"), tiny("llama", "nybble", layers=1)
    ids = prompt(1, 20)
    _, expected = generated(model, ids, do_sample=False)
    ours.patch_decode(assistant)
    ours.patch_decode(model)
    _, found = generated(model, ids, do_sample=False, assistant_model=assistant)
    assert torch.equal(found, expected)


def test_calls_of_ones_own(graphs_here: None) -> None:
    """Positions given or not, logits that stay, crop and reuse, another mask."""
    plain, model = tiny("llama", "nybble"), tiny("llama", "nybble")
    graphs = ours.patch_decode(model)
    ids, mask = left_padded()
    caches = [NybbleCache(m.config, 8) for m in (plain, model)]
    for cache in caches:
        cache.reserve(64)
    kept = []
    for i, token in enumerate([ids, *prompt(3, 8).split(1, 1)]):
        length = 20 + i if i < 5 else 20 + i - 3
        options: dict[str, Any] = {"attention_mask": torch.ones(3, length, dtype=torch.long)}
        options["attention_mask"][:, :20] = mask
        if i % 2:
            options["position_ids"] = options["attention_mask"].cumsum(-1)[:, -token.shape[1] :] - 1
        if i == 5:
            for cache in caches:
                cache.crop(-3)
        expected, found = (
            m(token, cache=cache, **options).logits for m, cache in zip((plain, model), caches)
        )
        kept.append((expected, found))
    assert all(torch.equal(*both) for both in kept)
    assert graphs.captured == 1 and graphs.replayed == 7
    assert caches[1].get_seq_length() == caches[1].layers[2].cumulative_length == 25
    token = prompt(3, 1)
    expected, found = (m(token, cache=c).logits for m, c in zip((plain, model), caches))
    assert torch.equal(expected, found) and graphs.captured == 1 and graphs.reason is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hidden states": ({"output_hidden_states": True}, "the call has output_hidden_states"),
    "embeddings": ({"token_type_ids": torch.zeros(2, 1)}, "the call has token_type_ids"),
    "positions": ({"position_ids": torch.full((1, 1), 22)}, r"position_ids are \(1, 1\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_without_a_graph(graphs_here: None, name: str) -> None:
    """The step is computed as before, and says why."""
    options, words = REFUSED[name]
    plain, model = tiny("llama", "nybble"), tiny("llama", "nybble")
    graphs = ours.patch_decode(model)
    logits = []
    for one in (plain, model):
        cache = NybbleCache(one.config, 8)
        cache.reserve(64)
        one(prompt(2, 20), cache=cache)
        for i in range(4):
            given = options if i == 2 else {}
            if one is model and given:
                with pytest.warns(UserWarning, match=words):
                    made = one(prompt(2, 1), cache=cache, **given)
            else:
                made = one(prompt(2, 1), cache=cache, **given)
            logits.append(made.logits)
    assert all(torch.equal(a, b) for a, b in zip(logits[:4], logits[4:]))
    assert (graphs.captured, graphs.replayed, graphs.eager) == (1, 2, 2)


def test_modes_without_a_graph(graphs_here: None) -> None:
    model = tiny("llama", "nybble").requires_grad_(False)
    graphs = ours.patch_decode(model)
    cache = NybbleCache(model.config, 8)
    cache.reserve(64)
    model(prompt(2, 20), cache=cache)
    token, mask = prompt(2, 1), torch.ones(2, 21, dtype=torch.long)
    mask[:, 3] = 0
    model(token, cache=cache)
    cache.crop(-1)
    with pytest.warns(UserWarning, match="attention_mask hides more than padding"):
        model(token, cache=cache, attention_mask=mask)
    with torch.enable_grad(), pytest.warns(UserWarning, match="gradients are enabled"):
        model(token, cache=cache)
    with pytest.warns(UserWarning, match="in training mode"):
        model.train()(token, cache=cache)
    model.eval()
    with torch.autocast("cpu"), pytest.warns(UserWarning, match="autocast is enabled"):
        model(token, cache=cache)
    assert graphs.captured == graphs.replayed == 0 and graphs.eager == 5
    model(token, cache=cache)
    assert graphs.captured == graphs.replayed == 1


def test_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that no graph can hold is computed as before; it is tried once."""
    tried = []

    def capture(step: Any, device: str) -> Any:
        tried.append(device)
        layer = step.args[1].layers[0]
        layer.update(*(torch.zeros(2, 2, 1, 64) for _ in range(2)))
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(_decode_graph, "_capture", capture)
    model, ids = tiny("llama", "nybble"), prompt(2, 20)
    _, expected = generated(model, ids, do_sample=False)
    graphs = ours.patch_decode(model)
    with pytest.warns(UserWarning, match="without a CUDA graph: capturing failed: RuntimeError"):
        cache, found = generated(model, ids, do_sample=False)
    assert torch.equal(found, expected) and tried == ["cpu"]
    assert cache.layers[1].stored.lengths == [31, 31] and cache.get_seq_length() == 31
    assert graphs.reason == (
        "capturing failed: RuntimeError: operation not permitted when stream is capturing"
    )
    generated(model, ids, do_sample=False)
    assert tried == ["cpu"] and graphs.captured == graphs.replayed == 0


@pytest.mark.parametrize(
    "shortage",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        NybbleError("the allocator had no 4096 bytes", Status.OUT_OF_MEMORY),
        MemoryError("no memory for a handle"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_is_short_for_a_while(
    graphs_here: None, monkeypatch: pytest.MonkeyPatch, shortage: Exception
) -> None:
    """The steps are computed as before; later ones are captured, and not every one tries."""
    capture, tried = _decode_graph._capture, []

    def short_of_memory(step: Any, device: str) -> Any:
        tried.append(device)
        if len(tried) == 1:
            raise shortage
        return capture(step, device)

    monkeypatch.setattr(_decode_graph, "_capture", short_of_memory)
    monkeypatch.setattr(_decode_graph, "STEPS_WITHOUT_MEMORY", 4)
    model, ids = tiny("llama", "nybble"), prompt(2, 20)
    _, expected = generated(model, ids, do_sample=False)
    graphs = ours.patch_decode(model)
    with pytest.warns(
        UserWarning, match="without a CUDA graph: .*memory|ALLOC_FAILED|no 4096 bytes"
    ):
        _, found = generated(model, ids, do_sample=False)
    assert torch.equal(found, expected) and len(tried) == 2
    # One that warms up, the one that found none, four that do not try.
    assert (graphs.captured, graphs.eager, graphs.replayed) == (1, 6, 5)


def test_on_the_cpu() -> None:
    model, ids = tiny("llama", "nybble"), prompt(2, 20)
    _, expected = generated(model, ids, do_sample=False)
    graphs = ours.patch_decode(model)
    with pytest.warns(UserWarning, match="the cache is on the CPU; a graph is captured on a CUDA"):
        _, found = generated(model, ids, do_sample=False)
    assert torch.equal(found, expected) and graphs.replayed == 0 and graphs.eager == 11


def test_patch_and_unpatch(graphs_here: None) -> None:
    model, ids = tiny("llama", "nybble"), prompt(2, 20)
    graphs = ours.patch_decode(model)
    assert ours.patch_decode(model) is graphs and not graphs.compile
    assert ours.patch_decode(model, compile=True).compile
    assert ours.patch_decode(model).compile  # as it was
    assert not ours.patch_decode(model, compile=False).compile
    model.generate(ids, max_new_tokens=4)  # transformers' own cache
    assert graphs.eager == graphs.replayed == 0
    other = copy.deepcopy(model)
    generated(other, ids)
    assert graphs.replayed == 0 and other.decode_graphs.replayed == 10
    with pytest.raises(NybbleError, match="another model or batch"):
        cache, _ = generated(model, ids)
        model(prompt(3, 1), cache=cache)
    assert ours.unpatch_decode(model) and not ours.unpatch_decode(model)
    assert "forward" not in vars(model)
    generated(model, ids)


def test_room_of_a_graph(graphs_here: None) -> None:
    """The graph of one's own: what is full is refused, and a cropped cache has room again."""
    model, ids = tiny("llama", "nybble"), prompt(2, 20)
    cache = NybbleCache(model.config, 8)
    cache.reserve(24)
    model(ids, cache=cache)
    graph = ours.DecodeGraph(model, cache)
    assert graph.room == 4
    for left in (3, 2, 1, 0):
        logits = graph.step(prompt(2, 1))
        assert logits.shape == (2, 1, 200) and graph.room == left
    with pytest.raises(NybbleError, match="the cache is full"):
        graph.step(prompt(2, 1))
    cache.crop(-2)
    assert graph.room == 2 and torch.equal(graph.greedy(), graph.token)
