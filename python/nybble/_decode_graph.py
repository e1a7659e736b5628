# SPDX-License-Identifier: Apache-2.0
"""A transformers model's decode step over a NybbleCache as a CUDA graph, compiled where that is asked
for, and generate() with it."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from ._arrays import HOST
from ._errors import NybbleError, refuse
from ._nybble import lib

if TYPE_CHECKING:
    from .transformers import NybbleCache, NybbleLayer

# ---- One decode step --------------------------------------------------------------------------


def _capture(step: Callable[[], None], device: str) -> Callable[[], None]:
    """Record what step() queues on the device, without running it; what queues it is returned."""
    if device == "cpu":
        raise refuse(
            "the cache is on the CPU; a graph is captured on a CUDA device", lib.NYB_ERROR_POINTER
        )
    with torch.cuda.device(device), _undone_where_it_fails():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), _refusing_to_wait():
            step()
    replay: Callable[[], None] = graph.replay
    return replay


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """What waits for the GPU raises before it does: waiting itself would end the capture."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not all that waits is found
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _undone_where_it_fails() -> Iterator[None]:
    """A capture that a CUDA error ends leaves its stream the current one, and the generator of random
    numbers as if it were being captured still: no number could be drawn any more."""
    stream = torch.cuda.current_stream()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(state)
        raise


def _places(cache: NybbleCache) -> tuple[Any, ...]:
    """Where all layers' tokens go."""
    stored = (layer._stored for layer in cache._layers())  # waits for nothing
    return tuple(None if x is None else x._place() for x in stored)


def _room(layers: Iterable[NybbleLayer]) -> int:
    """How many tokens more there is room for."""
    rooms = []
    for layer in layers:
        capacity = 0 if layer._stored is None else layer._stored.usage().capacity_tokens
        if layer.sliding_window is None or capacity < layer.sliding_window:  # else it rotates
            rooms.append(capacity - layer.cumulative_length)
    return min(rooms, default=1 << 31)


def _weights(model: Any) -> tuple[Any, ...]:
    """Which model this is, and where its weights are: to() and the like move them."""
    first = next(model.parameters(), None)
    return weakref.ref(model), None if first is None else first.data_ptr()


class DecodeGraph:
    """A model's decode step over a NybbleCache, captured once and replayed: no time goes by on the
    host. The cache's lengths and the positions are on the device, and move along there.

        cache.reserve(ids.shape[1] + 256)
        model(ids, cache=cache)                     # the prompt, and one token, eagerly
        model(token, cache=cache)
        graph = DecodeGraph(model, cache)
        logits = graph.step(token)                  # [batch, 1, vocabulary], until the next step

    The cache may be used eagerly in between, or cropped; whatever moves its memory (growing,
    another batch) or changes the model wants another graph. Hooks of modules do not run.
    `patch_decode` lets generate() do all that; what is patched with `compile` is captured compiled.

    Args:
        model: on a CUDA device, with attn_implementation="nybble".
        cache: holds the prompt, and a token that was decoded eagerly (that compiles the kernels, and
            the layers of a model patched so), and has room for what is to come. Positions go on
            where each sequence ends: left padding does not count.

    Raises:
        NybbleError: POINTER where the cache is not on a CUDA device, or the model on another; LENGTH
            where the cache is empty, or full (from `step`); UNSUPPORTED where the model returns more
            than logits.
    """

    logits: torch.Tensor  # [batch, 1, vocabulary] of the last step

    def __init__(self, model: Any, cache: NybbleCache) -> None:
        self._layers = list(cache._layers())
        stored = [layer.stored for layer in self._layers]
        if not stored or None in stored or cache.get_seq_length() == 0:
            raise refuse("the cache is empty; it must hold a prompt", lib.NYB_ERROR_LENGTH)
        first = stored[0]
        assert first is not None
        device = "cpu" if first.device == HOST else f"cuda:{first.device}"
        elsewhere = {str(x.device) for x in model.parameters()} - {device}
        if elsewhere:
            raise refuse(
                f"the model is on {', '.join(sorted(elsewhere))} and the cache on {device}; both "
                "must be on one device",
                lib.NYB_ERROR_POINTER,
            )
        self._weights = _weights(model)
        self._places = _places(cache)
        length = max(layer.cumulative_length for layer in self._layers)
        self._limit = length + _room(self._layers)
        # Made as usual tensors, whatever mode this is: other modes write to them.
        with torch.inference_mode(False), torch.no_grad():
            self.token = torch.zeros(first.batch, 1, dtype=torch.long, device=device)
            self._position = torch.tensor(first.lengths, device=device).view(-1, 1)
            self._record(model, cache, device)

    def _run(self, model: Any, cache: NybbleCache) -> None:
        outputs = model(self.token, position_ids=self._position, cache=cache, use_cache=True)
        names = set(outputs) if hasattr(outputs, "logits") else {type(outputs).__name__}
        if not names <= {"logits", "cache"}:
            raise refuse(
                f"the model returns {', '.join(sorted(names))}; a graph keeps logits alone",
                lib.NYB_ERROR_UNSUPPORTED,
            )
        self._kind = type(outputs)
        self.logits = outputs.logits
        self._next = self.logits[:, -1:].argmax(-1)
        self._position.add_(1)

    def _record(self, model: Any, cache: NybbleCache, device: str) -> None:
        lengths = [layer.cumulative_length for layer in self._layers]
        cache.capturing = True
        try:
            self._replay_graph = _capture(functools.partial(self._run, model, cache), device)
        finally:
            cache.capturing = False
            # Nothing of that has run, wherever it ended.
            for layer, length in zip(self._layers, lengths):
                layer.forget_capture(length)

    def fits(self, model: Any, step: _Step) -> bool:
        """Whether this is that step of the model, over the cache as it is now."""
        return self._weights == _weights(model) and self._places == _places(step.cache)

    @property
    def room(self) -> int:
        """How many tokens more the cache has room for."""
        return self._limit - max(layer.cumulative_length for layer in self._layers)

    def _replay(self) -> None:
        if self.room <= 0:
            raise refuse("the cache is full; reserve more and capture again", lib.NYB_ERROR_LENGTH)
        self._replay_graph()
        for layer in self._layers:
            layer.count_replay()

    def step(self, token: torch.Tensor) -> torch.Tensor:
        """Decode [batch, 1] tokens; returns the logits, which the next step overwrites."""
        self.token.copy_(token)
        self._replay()
        return self.logits

    def greedy(self) -> torch.Tensor:
        """Decode what is in `token`, and put the likeliest next ones there: [batch, 1]."""
        self._replay()
        made: torch.Tensor = self.token.copy_(self._next)
        return made

    def finish(self) -> None:
        """Wait, and let the cache know how far it has come (which it asks for when it must)."""
        for layer in self._layers:
            layer.refresh()

    def outputs(self, step: _Step) -> Any:
        """What the model returns for this step."""
        step.place(self._position)
        logits = self.step(step.token).clone()
        return self._kind(logits=logits, cache=step.cache)


# ---- Compiled layers ------------------------------------------------------------------------------

# One code serves all layers: their numbers are no constants to compile for, and where kinds of layers
# or of models are many, there is room for all.
_TRACING = {"allow_unspec_int_on_nn_module": True, "recompile_limit": 64}
# Rounded to the dtype where eager rounds; a matrix times one token's row is a kernel of its own.
_GENERATING: dict[str, Any] = {"emulate_precision_casts": True, "coordinate_descent_tuning": True}


_one_thread = threading.RLock()  # the layers and torch.compile's settings are all threads'


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, options=_GENERATING)


@contextmanager
def compiled_layers(model: Any) -> Iterator[None]:
    """The model's decoder layers run as torch.compile makes them, in one thread at a time; what a NybbleCache does, and the
    attention over it, is called as it is."""
    from . import torch as _operators  # noqa: F401 (patch_mlp's calls become operators)

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise refuse(
            f"{type(model).__name__} has no decoder layers of transformers' to compile",
            lib.NYB_ERROR_UNSUPPORTED,
        )
    with _one_thread:
        before = [vars(layer).get("forward") for layer in layers]
        try:
            for layer in layers:
                vars(layer)["forward"] = _compile(layer.forward)
            with torch._dynamo.config.patch(_TRACING):
                yield
        finally:
            for layer, own in zip(layers, before):
                vars(layer).pop("forward", None)
                if own is not None:
                    vars(layer)["forward"] = own


# ---- generate() ---------------------------------------------------------------------------------


@dataclass
class _Step:
    """A call that decodes one token of each sequence over a NybbleCache."""

    token: torch.Tensor
    cache: NybbleCache
    positions: torch.Tensor | None

    def place(self, positions: torch.Tensor) -> None:
        """Fill [batch, 1] positions as models count, padding or not."""
        if self.positions is None:
            positions.fill_(self.cache.get_seq_length())
        else:
            positions.copy_(self.positions)


# What a call may say, that says nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (True,),
    "return_dict": (True,),
    "logits_to_keep": (0, 1),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
}


def left_padding(mask: torch.Tensor) -> torch.Tensor | None:
    """Where each sequence begins, int32 [batch]; None where the mask [batch, tokens] hides more than
    padding on the left."""
    seen = mask.bool()
    starts = (seen.cumsum(-1) == 0).sum(-1)
    if not bool((seen.sum(-1) + starts == seen.shape[-1]).all()):
        return None
    return starts.to(torch.int32)


# A step that is captured in vain takes as long as an eager one: of so many it is not noticed.
STEPS_WITHOUT_MEMORY = 32


class DecodeGraphs:
    """What `patch_decode` does for a model, and has done.

    captured, replayed: graphs, and steps by them. eager: steps of one token over a NybbleCache
    that were computed as before, the first ones of each cache among them. compile: whether what is
    captured is compiled. reason: why the last one for which no graph will do, or no compiler, had
    none; None where there was no such step.
    """

    def __init__(self, model: Any) -> None:
        self.captured = self.replayed = self.eager = 0
        self.compile = False
        self.reason: str | None = None
        self._refused: dict[torch.device, str] = {}
        self._pause = 0  # eager steps until a capture that found no memory is tried again
        self._own = vars(model).get("forward")  # where another patch was before

    def forward(self, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        original = self._own or MethodType(type(model).forward, model)
        cache: Any = options.get("cache")
        token: Any = arguments[0] if arguments else options.get("input_ids")
        if not _is_step(token, cache) or len(arguments) > 1:
            is_captured = self.compile and getattr(cache, "capturing", False)
            with compiled_layers(model) if is_captured else nullcontext():
                return original(*arguments, **options)
        step = self._understand(model, token, cache, options)
        graph = None if step is None else self._graph(model, step)
        if step is not None and graph is not None:
            made = graph.outputs(step)
            self.replayed += 1
            return made
        self.eager += 1
        failure = None
        if step is not None and self.compile:
            made, failure = self._compiled(model, original, step)
            if failure is None:
                return made
        made = original(*arguments, **options)
        if failure is not None:  # of compiling: the step itself is none that fails
            self.compile = False
            self._explain("compiled layers", _reason_of("compiling", failure))
        if not self.compile:
            cache.warm = (_weights(model), _places(cache), False)
        return made

    def _compiled(
        self, model: Any, original: Callable[..., Any], step: _Step
    ) -> tuple[Any, Exception | None]:
        """The step as it will be captured, so that all is compiled then; or what made it fail."""
        cache = step.cache
        lengths = [layer.cumulative_length for layer in cache._layers()]
        try:
            with compiled_layers(model), torch.inference_mode(False), torch.no_grad():
                token = step.token.to(torch.long, copy=True)  # as in a graph
                positions = torch.empty_like(token)
                step.place(positions)
                made = original(token, position_ids=positions, cache=cache, use_cache=True)
            cache.warm = (_weights(model), _places(cache), True)
        except Exception as error:
            for layer, length in zip(cache._layers(), lengths):
                layer.take_back(length)
            return None, error
        return made, None

    def _understand(
        self, model: Any, token: torch.Tensor, cache: NybbleCache, options: dict[str, Any]
    ) -> _Step | None:
        """What a call asks for; None, and the reason, where a graph will not do."""
        given = {name: value for name, value in options.items() if value is not None}
        mask, positions = given.pop("attention_mask", None), given.pop("position_ids", None)
        reason = self._refused.get(token.device)
        if reason is None:
            reason = _reason_against(model, token, given, positions)
        if reason is None and mask is not None:
            # What the cache left out when it came; the token itself is none of it.
            is_rows = mask.dim() == 2 and mask.shape[1] == cache.get_seq_length() + 1
            starts = left_padding(mask) if is_rows else None
            if starts is None or bool((starts == mask.shape[1]).any()):
                reason = "attention_mask hides more than padding on the left"
        if reason is None:
            return _Step(token, cache, positions)
        self._explain("a CUDA graph", reason)
        return None

    def _explain(self, what: str, reason: str) -> None:
        if reason != self.reason:
            warnings.warn(f"nybble decodes without {what}: {reason}", stacklevel=2)
        self.reason = reason

    def _graph(self, model: Any, step: _Step) -> DecodeGraph | None:
        """The graph for this step; None where an eager one comes first, or no graph will do."""
        cache = step.cache
        if cache.graph is not None and cache.graph.fits(model, step):
            return cache.graph if cache.graph.room > 0 else None  # an eager step lets it grow
        cache.graph = None  # its memory is free for the next
        # The eager step before, over the same memory, compiled the kernels (and the layers).
        warm = (_weights(model), _places(cache), self.compile)
        if cache.warm != warm or _room(cache._layers()) <= 0:
            return None
        if self._pause > 0:
            self._pause -= 1
            return None
        try:
            cache.graph = DecodeGraph(model, cache)
            self.captured += 1
        except Exception as error:
            reason = _reason_of("capturing", error)
            if _is_out_of_memory(error):  # which others may give back
                self._pause = STEPS_WITHOUT_MEMORY
            else:
                self._refused[step.token.device] = reason
            self._explain("a CUDA graph", reason)
        return cache.graph


def _reason_of(what: str, error: Exception) -> str:
    said = str(error).strip().split("\n")[0]
    return (
        said if isinstance(error, NybbleError) else f"{what} failed: {type(error).__name__}: {said}"
    )


def _is_out_of_memory(error: Exception) -> bool:
    """The allocators have exceptions of their own; what CUDA says itself is a RuntimeError."""
    if isinstance(error, NybbleError):
        return error.status == lib.NYB_ERROR_OUT_OF_MEMORY
    known = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
    said = str(error)
    return known or "out of memory" in said or "ALLOC_FAILED" in said  # cuBLAS and cuDNN


def _is_step(token: Any, cache: Any) -> bool:
    """Whether this decodes a token of each sequence in a NybbleCache, and is not being captured."""
    from .transformers import NybbleCache

    if not isinstance(cache, NybbleCache) or not isinstance(token, torch.Tensor):
        return False
    return (
        not cache.capturing
        and cache.get_seq_length() > 0
        and token.shape == (cache.batch_size, 1)
        and not torch.compiler.is_compiling()
    )


def _reason_against(
    model: Any, token: torch.Tensor, given: dict[str, Any], positions: torch.Tensor | None
) -> str | None:
    """Why a graph would not do what this call says."""
    odd = [
        name
        for name, value in given.items()
        if name not in ("input_ids", "cache")
        and not any(value is neutral for neutral in _NEUTRAL.get(name, ()))
    ]
    if odd:
        return f"the call has {', '.join(odd)}"
    if positions is not None and positions.shape != token.shape:
        return f"position_ids are {tuple(positions.shape)}; tokens are {tuple(token.shape)}"
    if model.training:
        return "the model is in training mode"
    if torch.is_grad_enabled():
        return "gradients are enabled; decode within torch.no_grad()"
    if torch.is_autocast_enabled(token.device.type):
        return "autocast is enabled"
    return None


def patch_decode(model: Any, compile: bool | None = None) -> DecodeGraphs:
    """Let a model on a CUDA device replay its decode steps over a NybbleCache as a CUDA graph.

        graphs = nybble.transformers.patch_decode(model)
        model.generate(**inputs, cache=NybbleCache(model.config, 4))
        print(graphs.captured, graphs.replayed, graphs.reason)

    In generate() and in calls of one's own, whatever chooses the tokens: a step of one token for
    each sequence has the logits that it had. The first step over a cache is computed as before, the
    second captures; so it goes again where the cache has moved (it grew: `NybbleCache.reserve`
    makes room before). Where a graph will not do, the step is computed as before; a warning and
    `reason` say why; a capture that found no memory is tried again some steps later. What changes
    the model (other weights, hooks, other patches) comes first.

    Args:
        compile: the layers as torch.compile makes them, which takes seconds for a model's first step
            (and again for another batch) and time off every other: a norm, a rotation or an
            activation is one kernel and no longer ten. Logits differ in last bits where sums are
            added up in another order. None: as it was, at first not.

    Returns:
        What counts the steps; the same when it is called again, with that `compile`, if it is not
        None, for graphs to come.
    """
    found: DecodeGraphs | None = vars(model).get("decode_graphs")
    if found is not None:
        if compile is not None:
            found.compile = compile
        return found
    graphs = DecodeGraphs(model)
    graphs.compile = bool(compile)

    @functools.wraps(type(model).forward)  # generate() reads its signature
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        # Of the model that is called: a copy of a patched one has its own.
        return vars(self)["decode_graphs"].forward(self, arguments, options)

    vars(model).update(decode_graphs=graphs, forward=MethodType(forward, model))
    return graphs


def unpatch_decode(model: Any) -> bool:
    """Undo `patch_decode`; returns whether there was something to undo."""
    graphs = vars(model).pop("decode_graphs", None)
    if graphs is None:
        return False
    del vars(model)["forward"]
    if graphs._own is not None:
        vars(model)["forward"] = graphs._own
    return True
