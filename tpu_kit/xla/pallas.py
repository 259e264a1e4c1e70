"""Adds JAX's Pallas kernels to programs traced by torch_xla or TorchTPU; any process can lower them for TPU.

It uses private interfaces: the backward pass of JAX's splash kernel, the format of kernels, and torch_xla's conversion
of a JAX computation.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tpu_kit.config.mesh import Mesh, Spec
from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.machine.compatibility import find_pairing, installed_version
from tpu_kit.torch_tpu import kernels
from tpu_kit.xla.sharding import PER_HEAD, query_shards, sharded_kernel, spec_of_keys
from tpu_kit.xla.splash_blocks import block_tokens, is_fused

# Static arguments of the kernel's backward pass, in order.
_STATIC = (
    "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function",
    "attn_logits_soft_cap", "interpret",
)  # fmt: skip
# Replicas on XLA:CPU are threads. Two lowerings of a function have different ids. The replicas' programs would then
# differ, and their collectives would deadlock.
_LOWERING = threading.Lock()


class SplashSettings(NamedTuple):
    """Static settings of the splash kernel.

    Attributes:
        window: number of keys that a query sees, its own included; None for all earlier keys.
        softcap: c in c * tanh(scores / c), or None.
        interpret: whether Pallas' interpreter runs the kernel on a CPU, for tests.
        spec: on a mesh, the sharding of queries (B, heads, S, D); also of keys and values, except for `PER_TOKEN`.
        trains: whether the kernel also writes log-sum-exps for a backward pass.
        ahead: maximum number of later tokens that a query sees; the numbers of the queries are among the tensors.
        causal: if False, queries see all keys of their segment.
    """

    window: int | None = None
    softcap: float | None = None
    interpret: bool = False
    spec: Spec = PER_HEAD
    trains: bool = True
    ahead: int = 0
    causal: bool = True


def splash_forward(settings: SplashSettings, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Runs the splash kernel on query, key, value, segment ids and, if there are any, prefix ids and sinks.

    With `settings.ahead`, numbers of later tokens replace prefix ids. For shapes see `splash_attention.splash_kernel`.

    Returns:
        The output and, if `settings.trains`, log-sum-exps (B, heads, S) fp32 for the backward pass.
    """
    return _call(_forward, settings, *tensors)


def splash_backward(settings: SplashSettings, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Runs the backward pass on the results of `splash_forward`, the output's gradient, and the inputs except sinks.

    Returns:
        The gradients of query, key and value.
    """
    return _call(_backward, settings, *tensors)


def _kernel(heads: int, length: int, head_dim: int, settings: SplashSettings, fused: bool = True) -> Any:
    """Makes JAX's kernel object for a shape, with its mask in blocks and a fused or unfused backward pass.

    `heads` are query heads, `length` is a whole row's. Raises AssertionError if the row is not made of whole blocks.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shards = query_shards(settings.spec)
    block = block_tokens(length if shards == 1 else length // (2 * shards), head_dim)
    assert length % block == 0 and block % 128 == 0, f"a row of {length} tokens is not made of blocks of {block}"
    sizes = kernels.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, use_fused_bwd_kernel=fused,
        block_q_dq=None if fused else block, block_kv_dq=None if fused else block,
    )  # fmt: skip
    shape = (length, length)
    if settings.ahead:
        mask = _looking_ahead()(shape, settings.window or length, settings.ahead)
    elif not settings.causal:
        mask = masks.FullMask(shape)
    else:
        mask = causal_masks()[settings.window is not None](shape, settings.window)
    if shards > 1:
        mask.q_sequence = _balanced_order(length, shards)
    return kernels.make_splash_mha(
        mask=masks.MultiHeadMask((mask,) * heads), block_sizes=sizes, head_shards=1, q_seq_shards=shards,
        save_residuals=settings.trains, attn_logits_soft_cap=settings.softcap, interpret=settings.interpret,
    )  # fmt: skip


def _balanced_order(length: int, shards: int) -> Any:
    """Returns the tokens of a row by shard, (S,) int32: shard i of n has blocks i and 2 n - 1 - i of 2 n blocks.

    With a causal mask, all shards then see the same number of keys. This is the order of Llama 3's context parallelism
    (arXiv:2407.21783, section 3.3.2).
    """
    import numpy as np

    blocks = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    return np.stack([blocks[:shards], blocks[: shards - 1 : -1]], 1).reshape(-1)


def _balanced(array: Any, axis: int, shards: int, *, back: bool = False) -> Any:
    """Exchanges this device's tokens, along `axis`, for its tokens in `_balanced_order`, or with `back` the reverse.

    Returns `array` itself for one shard. A device has two blocks, with an even and an odd number, before and after.
    """
    import jax
    import jax.numpy as jnp

    if shards == 1:
        return array
    device, first, second = jax.lax.axis_index("context"), *jnp.split(array, 2, axis)
    targets = [number if number < shards else 2 * shards - 1 - number for number in range(2 * shards)]
    moves = [[(start, target) for start, target in enumerate(targets[odd::2])] for odd in (0, 1)]

    def swapped(one: Any, other: Any) -> tuple[Any, Any]:  # unless the number of the first balanced block is even
        return jnp.where(device % 2 == 0, one, other), jnp.where(device % 2 == 0, other, one)

    if back:
        (first, second), moves = swapped(first, second), [[move[::-1] for move in each] for each in moves]
    even, odd = jax.lax.ppermute(first, "context", moves[0]), jax.lax.ppermute(second, "context", moves[1])
    return jnp.concatenate([even, odd] if back else swapped(even, odd), axis)


def _own_part(array: Any, axis: int, shards: int) -> Any:
    """Returns this device's 1 / `shards` along `axis` of an array that all devices hold."""
    import jax

    size = array.shape[axis] // shards
    return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index("context") * size, size, axis)


def _own_kernel(kernel: Any, shards: int) -> Any:
    """Returns a kernel with the mask blocks of this device's queries."""
    if shards == 1:
        return kernel

    def part(info: Any) -> Any:
        blocks = {name: getattr(info, name) for name in ("data_next", "mask_next", "block_mask")}
        blocks = {name: array if array is None else _own_part(array, 1, shards) for name, array in blocks.items()}
        return info._replace(q_sequence=_own_part(info.q_sequence, 0, shards), **blocks)

    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    return type(kernel)(*(info and part(info) for info in infos), **kernel.kwargs)


@functools.cache
def causal_masks() -> tuple[Any, Any]:
    """Returns subclasses of splash attention's causal masks, without and with a window, for faster tracing.

    The first class takes (shape, None), the second (shape, window), where a query sees `window` keys, its own included.
    On the host, JAX tests several times whether a block of queries sees any or all keys of a block. With 131,072 tokens
    it computes more than 1e10 booleans. For blocks that are entirely visible or hidden, these masks compute a single
    boolean.
    """
    import numpy as np
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class InBlocks(masks.Mask):
        window: int | None = None

        def __getitem__(self, where: tuple[slice, slice]) -> Any:
            queries, keys = where
            first, last = self.q_sequence[queries.start], self.q_sequence[queries.stop - 1]  # consecutive tokens
            least, most = first - keys.stop + 1, last - keys.start  # query - key
            if most < 0 or (self.window is not None and least >= self.window):
                return np.zeros((1, 1), dtype=bool)
            if least >= 0 and (self.window is None or most < self.window):
                return np.ones((1, 1), dtype=bool)
            return super().__getitem__(where)

    class Causal(InBlocks, masks.CausalMask):
        def __init__(self, shape: tuple[int, int], _: None) -> None:
            super().__init__(shape)

    class Windowed(InBlocks, masks.LocalMask):
        def __init__(self, shape: tuple[int, int], window: int) -> None:
            super().__init__(shape, (window - 1, 0), 0)
            self.window = window

    return Causal, Windowed


@functools.cache
def _looking_ahead() -> Any:
    """Returns a class of masks: a query sees the keys of a window before it and some keys after it.

    It takes the shape, the window and the largest number of later keys. Their actual number is data. The kernel passes
    `q_sequence` to the mask function instead of the queries' positions, so it can contain both: position * 2**bits +
    tokens ahead (`_with_places`). Hidden blocks are skipped.
    """
    import numpy as np
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class LookingAhead(masks._ComputableMask):
        def __init__(self, shape: tuple[int, int], window: int, most: int) -> None:
            self.key = (shape, window, most)
            bits = most.bit_length()

            def sees(query: Any, key: Any) -> Any:
                place = query >> bits
                return (key <= place + (query & ((1 << bits) - 1))) & (key > place - window)

            super().__init__(shape=shape, mask_function=sees)
            self.q_sequence = np.arange(shape[0], dtype=np.int32) << bits

        def __getitem__(self, where: Any) -> Any:
            """Returns which keys a query may see; a block that looks ahead is never all True."""
            (queries, keys), (_, window, most) = where, self.key
            query, key = np.arange(queries.start, queries.stop)[:, None], np.arange(keys.start, keys.stop)[None]
            seen = (key <= query + most) & (key > query - window)
            if seen.all() and not (key <= query).all():
                seen[0, -1] = False  # otherwise the kernel would not call the mask function
            return seen

        def __eq__(self, other: object) -> bool:
            return isinstance(other, LookingAhead) and self.key == other.key

        def __hash__(self) -> int:
            return hash(self.key)

    return LookingAhead


def _with_places(kernel: Any, ahead: Any, most: int) -> Any:
    """Returns a kernel whose mask reads `ahead` (S,): how many later tokens each query sees, at most `most`."""
    import jax.numpy as jnp

    places = (jnp.arange(ahead.shape[0], dtype=jnp.int32) << most.bit_length()) + ahead
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    return type(kernel)(*(info and info._replace(q_sequence=places) for info in infos), **kernel.kwargs)


def _seen(shards: int, segment_ids: Any, *prefix_ids: Any) -> list[Any]:
    """Returns the segment ids of each run of the kernel: documents see themselves, and in a second run their prefixes.

    The second run is made only if there are prefix ids: a query with -p sees the keys with p. Keys have the ids of the
    whole row, queries the ids of this device's share of the tokens, 1 / `shards`.
    """
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    prefixes = [SegmentIds(jnp.where(ids < 0, -ids, -1), jnp.where(ids > 0, ids, -2)) for ids in prefix_ids]
    found = [SegmentIds(segment_ids, segment_ids), *prefixes]
    if shards == 1:
        return found
    own = _own_part(jnp.asarray(_balanced_order(segment_ids.shape[-1], shards)), 0, shards)
    return [SegmentIds(jnp.take(each.q, own, -1), each.kv) for each in found]


def _forward(settings: SplashSettings, query: Any, key: Any, value: Any, *others: Any) -> tuple[Any, ...]:
    """Computes the result of `splash_forward` in JAX: (output, log-sum-exps) if `settings.trains`, else (output,)."""
    import jax
    import jax.numpy as jnp

    ids = [each for each in others if each.ndim == 2]
    saving = settings._replace(trains=settings.trains or len(ids) > 1)
    shards = query_shards(settings.spec)
    kernel = _own_kernel(_kernel(query.shape[1], key.shape[2], query.shape[3], saving), shards)
    query = _balanced(query, 2, shards)
    if settings.ahead:
        segments, ahead = ids

        def look(query: Any, key: Any, value: Any, segments: Any, ahead: Any) -> Any:
            return _with_places(kernel, ahead, settings.ahead)(query, key, value, *_seen(1, segments))

        found = jax.vmap(look)(query, key, value, segments, ahead)
        return (found[0], found[1][0]) if settings.trains else (found,)
    sinks = functools.partial(kernel, sinks=others[-1]) if len(others) > len(ids) else kernel
    runs = [
        jax.vmap(kernel if turn else sinks)(query, key, value, seen) for turn, seen in enumerate(_seen(shards, *ids))
    ]
    if not saving.trains:
        return (_balanced(runs[0], 2, shards, back=True),)
    output, (log_sums,) = runs[0]
    for more, (sums,) in runs[1:]:
        joined = jnp.logaddexp(log_sums, sums)
        parts = ((output, log_sums), (more, sums))
        output = sum(jnp.exp(its - joined)[..., None] * each.astype(jnp.float32) for each, its in parts)
        output, log_sums = output.astype(query.dtype), joined
    output, log_sums = (_balanced(each, 2, shards, back=True) for each in (output, log_sums))
    return (output, log_sums) if settings.trains else (output,)


def _backward(settings: SplashSettings, output: Any, log_sums: Any, upstream: Any, *inputs: Any) -> Any:
    """Computes the gradients of query, key and value in JAX; `jax.vjp` would run the forward kernel again.

    `inputs` are query, key, value and ids. A run of the kernel needs its own scores and the log-sum-exps over all runs;
    the gradients of the runs are summed.
    """
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    query, key, value, *ids = inputs
    shards, (rows, heads, _, head_dim), length = query_shards(settings.spec), query.shape, key.shape[2]
    fused = is_fused(rows, heads / shards, length, head_dim, query.dtype.itemsize, settings.window)
    kernel = _own_kernel(_kernel(heads, length, head_dim, settings, fused), shards)

    def row(
        query: Any, key: Any, value: Any, output: Any, log_sums: Any, upstream: Any, seen: Any, ahead: Any
    ) -> tuple[Any, ...]:
        its = kernel if ahead is None else _with_places(kernel, ahead, settings.ahead)
        saved = (query, key, value, seen, None, output, log_sums, its.dq_mask_info, its.dkv_mask_info)
        gradients = kernels._splash_attention_bwd(*(kernel.kwargs[name] for name in _STATIC), saved, upstream)
        return tuple(gradients[3:6])

    ids, ahead = (ids[:1], ids[1]) if settings.ahead else (ids, None)
    query, output, log_sums, upstream = (_balanced(each, 2, shards) for each in (query, output, log_sums, upstream))
    arrays = (query, key, value, output, log_sums, upstream)
    runs = [jax.vmap(row)(*arrays, seen, ahead) for seen in _seen(shards, *ids)]
    to_query, *others = (functools.reduce(operator.add, each) for each in zip(*runs, strict=True))
    if shards > 1:
        others = [jax.lax.psum(each, "context") for each in others]
    return (_balanced(to_query, 2, shards, back=True), *others)


def _call(function: Any, settings: SplashSettings, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Adds `_forward` or `_backward` to the tensors' program: TorchTPU's, or with `call` torch_xla's."""
    if tensors[0].device.type == "tpu":
        count = 3 if function is _backward else 1 + settings.trains
        return kernels.call(functools.partial(function, settings), tensors, count)
    spec, of_keys = settings.spec, spec_of_keys(settings.spec)
    known: dict[int, Spec] = {1: (spec[1],), 2: (spec[0], None), 3: spec[:3]}  # sinks; ids; log-sum-exps
    if function is _forward:
        outputs: tuple[Spec, ...] = (spec, spec[:3]) if settings.trains else (spec,)
        inputs = (spec, of_keys, of_keys, *(known[tensor.ndim] for tensor in tensors[3:]))
    else:
        outputs = (spec, of_keys, of_keys)
        inputs = (spec, spec[:3], spec, spec, of_keys, of_keys, *(known[tensor.ndim] for tensor in tensors[6:]))
    platform = "cpu" if settings.interpret else "tpu"
    return call(functools.partial(function, settings), tensors, inputs, outputs, platform)


def call(
    function: functools.partial[Any],
    tensors: Sequence[torch.Tensor],
    inputs: tuple[Spec, ...],
    outputs: tuple[Spec, ...],
    platform: str,
) -> list[torch.Tensor]:
    """Adds a JAX function to the lazy graph of torch_xla's tensors and returns its results, tensors of the graph.

    torch_xla's own function for this needs a mesh.

    Args:
        function: a partial of a module's function, with hashable static settings as the only bound argument. It takes
            and returns JAX arrays; the result is a tuple.
        tensors: the other arguments, on XLA.
        inputs: a spec for each tensor. On a mesh, every device runs the function on its shards; else without effect.
        outputs: a spec for each result, like `inputs`.
        platform: the platform for which the function is lowered: "tpu" or "cpu".
    """  # fmt: skip
    import torch_xla
    from torch_xla._internal.jax_workarounds import requires_jax

    shapes = tuple((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)
    static = (function.func, function.args, shapes, inputs, outputs, platform, active_mesh())
    name = f"xla::{function.func.__name__.strip('_')}"
    with _LOWERING:
        computation = requires_jax(_lowered)(*static)
    return torch_xla._XLAC._xla_user_computation(name, list(tensors), computation)


@functools.cache
def _lowered(
    function: Any, settings: tuple[Any, ...], shapes: tuple[tuple[tuple[int, ...], str], ...], inputs: tuple[Spec, ...],
    outputs: tuple[Spec, ...], platform: str, _: Mesh,
) -> Any:  # fmt: skip
    import jax
    import jax.experimental.pallas.tpu  # the import registers the lowering rules for TPU
    from jax._src.interpreters.mlir import LoweringParameters
    from torch_xla.core.xla_builder import computation_from_module_proto

    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    run = sharded_kernel(functools.partial(function, *settings), inputs, outputs)
    traced = jax.jit(run, keep_unused=True).trace(*structs)
    # Without for_export, the compiler refuses the kernels: "Unsupported version: expected <= 7 but got 8".
    parameters = LoweringParameters(for_export=True)
    with _kernel_format():
        lowered = traced.lower(lowering_platforms=(platform,), _private_parameters=parameters)
    name = function.__name__.strip("_")
    return computation_from_module_proto(name, lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())


@contextlib.contextmanager
def _kernel_format() -> Iterator[None]:
    """Makes JAX write kernels in the format of the installed libtpu, if libtpu is older than JAX expects."""
    from jax._src import tpu_custom_call

    pairing, chosen = find_pairing(installed_version), tpu_custom_call.get_ir_version
    if pairing is not None and pairing.kernel_format is not None:
        tpu_custom_call.get_ir_version = lambda _: pairing.kernel_format
    try:
        yield
    finally:
        tpu_custom_call.get_ir_version = chosen
