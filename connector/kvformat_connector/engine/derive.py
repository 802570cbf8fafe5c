"""An engine's configuration, turned into the layout that its scheduler and all its workers share.

Each process describes the layers that it knows, which is a pipeline stage's; the stages are then
joined. Cuts come last, from the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import msgspec

from kvformat.diff import diff
from kvformat.errors import ConfigError, HandshakeError, Reason
from kvformat.fingerprint import parse_manifest
from kvformat.layout import Component, Group, Identity, Layer, Layout, ShardGrid
from kvformat_connector.config import Options
from kvformat_connector.engine.hashing import hash_recipe
from kvformat_connector.engine.npu import is_npu, npu_packing
from kvformat_connector.engine.ranks import Ranks, first_rank_cut, layer_index, ranks_of
from kvformat_connector.engine.refusal import refuse
from kvformat_connector.engine.specs import describe_group, is_packed, spec_of
from kvformat_connector.identity import given_identity, model_name, weights_identity
from kvformat_connector.messages import LayoutNotice
from kvformat_connector.namespaces import DRAFT_WEIGHTS
from kvformat_connector.resolved import config_values

_CONTEXT_PARALLEL: Final = ("prefill_context_parallel_size", "decode_context_parallel_size")

#: Groups by index, None where the stage has no layer of one.
StageGroups = tuple[Group | None, ...]


def derive_layout(
    vllm_config: Any,
    kv_cache_config: Any,
    options: Options,
    stages: Sequence[StageGroups] | None = None,
) -> Layout:
    """The layout of an engine, from a ``VllmConfig`` and a ``KVCacheConfig``.

    The scheduler and every worker call it with their own copies and must get the same.

    Args:
        stages: what :func:`describe_stage` gave on every pipeline stage, in order; None where
            there is one stage.

    Raises ``ConfigError``: ``config_unsupported`` for what can't be described,
    ``config_missing`` where the weights can't be identified.
    """
    if stages is None:
        stages = [describe_stage(vllm_config, kv_cache_config)]
    groups = _joined(stages)
    stage_sizes = [[_num_layers(group) for group in stage] for stage in stages]
    config = vllm_config.model_config
    return Layout(
        identity=Identity(
            tenant=options.tenant,
            model=model_name(config.model, options.model_name),
            weights=_weights(vllm_config, config, options),
            config={
                **config_values(vllm_config),
                "kv_packing": _packing_of_groups(vllm_config, kv_cache_config),
                **_draft_identity(vllm_config, options),
            },
        ),
        hash=hash_recipe(vllm_config.cache_config, kv_cache_config),
        groups=groups,
        objects=_objects(groups),
        grid=ShardGrid(
            head_shards=_head_shards(groups, ranks_of(vllm_config.parallel_config), options),
            layer_starts=_layer_starts(groups, stage_sizes, config, options),
        ),
    )


def describe_stage(
    vllm_config: Any, kv_cache_config: Any, known: Sequence[Group] = ()
) -> StageGroups:
    """The groups of this process's pipeline stage, with the components of ``known`` groups.

    Raises ``ConfigError`` like the layout.
    """
    _refuse_context_parallel(vllm_config.parallel_config)
    ranks = ranks_of(vllm_config.parallel_config)
    device = _device()
    return tuple(
        describe_group(vllm_config, group, ranks, device, told)
        for group, told in zip_longest(kv_cache_config.kv_cache_groups, known)
        if group is not None
    )


def stage_ranks(vllm_config: Any, kv_cache_config: Any) -> Ranks:
    """This worker's place, with the names of its stage's layers."""
    names = frozenset(
        name for group in kv_cache_config.kv_cache_groups for name in group.layer_names
    )
    return ranks_of(vllm_config.parallel_config, names)


def gather_stages(ranks: Ranks, own: StageGroups) -> list[StageGroups]:
    """Every stage's groups, in order. All workers of a pipeline must call it at the same time."""
    if ranks.num_stages == 1:
        return [own]
    import torch.distributed
    from vllm.distributed.parallel_state import get_pp_group

    said: list[bytes] = [b""] * ranks.num_stages
    torch.distributed.all_gather_object(
        said, msgspec.json.encode(own), group=get_pp_group().cpu_group
    )
    return [msgspec.json.decode(data, type=StageGroups) for data in said]


def require_same_layout(layout: Layout, notices: Mapping[Any, LayoutNotice]) -> None:
    """Refuse to start with workers whose layout is not the scheduler's.

    Raises ``HandshakeError`` that names each differing field with both values.
    """
    for notice in notices.values():
        theirs = parse_manifest(notice.manifest)
        if theirs != layout:
            named = "; ".join(str(difference) for difference in diff(layout, theirs))
            raise HandshakeError(
                Reason.HANDSHAKE_REFUSED,
                f"worker of rank {notice.rank} has another KV layout than the scheduler "
                f"(scheduler, worker): {named}",
            )


def adopt_layout(
    vllm_config: Any,
    kv_cache_config: Any,
    options: Options,
    notices: Mapping[Any, LayoutNotice],
) -> Layout:
    """The layout of an engine, for the scheduler, which is told of the first pipeline stage's
    layers only, and of one spec for a whole group: the workers' own, where all of them have one
    and it agrees with what the scheduler knows.

    Raises ``HandshakeError`` like :func:`require_same_layout`, or where there are no workers.
    """
    if not notices:
        raise HandshakeError(Reason.HANDSHAKE_REFUSED, "no worker told its KV layout")
    theirs = parse_manifest(next(iter(notices.values())).manifest)
    require_same_layout(theirs, notices)
    first_stage = describe_stage(vllm_config, kv_cache_config, theirs.groups)
    rest = tuple(
        None
        if len(group.layers) == _num_layers(known)
        else msgspec.structs.replace(group, layers=group.layers[_num_layers(known) :])
        for known, group in zip(first_stage, theirs.groups, strict=False)
    )
    ours = derive_layout(vllm_config, kv_cache_config, options, [first_stage, rest])
    # Where the stages end is the workers' knowledge; everything else must be the same.
    starts = theirs.grid.layer_starts
    ours = msgspec.structs.replace(
        ours, grid=msgspec.structs.replace(ours.grid, layer_starts=starts)
    )
    require_same_layout(ours, notices)
    return ours


def _refuse_context_parallel(parallel_config: Any) -> None:
    for name in _CONTEXT_PARALLEL:
        if (size := getattr(parallel_config, name, 1)) != 1:
            refuse(name, size, "this engine's split of a block's tokens isn't described")


def _joined(stages: Sequence[StageGroups]) -> tuple[Group, ...]:
    """The groups of the whole model: each stage's layers after those of the stages before."""
    groups = []
    for index, parts in enumerate(zip(*stages, strict=True)):
        present = [part for part in parts if part is not None]
        if not present:
            refuse("kv_cache_groups", f"group {index} without a layer", "every group has some")
        layers: list[Layer] = [layer for part in present for layer in part.layers]
        groups.append(msgspec.structs.replace(present[0], layers=tuple(layers)))
    return tuple(groups)


def _objects(groups: Sequence[Group]) -> tuple[tuple[int, ...], ...]:
    """Groups whose blocks live and die together share an object: those of one kind and window.

    An engine splits such layers into several groups only to have groups of one size.
    """
    alike: dict[tuple[str, int, int], list[int]] = {}
    for index, group in enumerate(groups):
        alike.setdefault((group.kind, group.block_size, group.window), []).append(index)
    return tuple(tuple(indices) for indices in alike.values())


def _num_layers(group: Group | None) -> int:
    return 0 if group is None else len(group.layers)


def _head_shards(groups: Sequence[Group], ranks: Ranks, options: Options) -> int:
    """A shard for each rank that has heads of its own, since an object has one writer; more where
    the operator asks for more."""
    num_heads = {part.num_heads for part in _components(groups)}
    num_shards = max(options.head_shards, min(ranks.tensor_size, max(num_heads)))
    for num in sorted(num_heads):
        if (rank := first_rank_cut(num, num_shards, ranks)) is not None:
            size = ranks.tensor_size
            raise ConfigError(
                Reason.CONFIG_VALUE,
                f"option 'head_shards' has the value {options.head_shards}, but of {num} KV heads "
                f"in {num_shards} shards one has heads of rank {rank} and of the next, "
                f"tensor_parallel_size is {size} and an object has one writer; expected a multiple "
                f"of {size}",
            )
    return num_shards


def _components(groups: Sequence[Group]) -> set[Component]:
    return {part for group in groups for layer in group.layers for part in layer.components}


def _layer_starts(
    groups: Sequence[Group],
    stage_sizes: Sequence[Sequence[int]],
    model_config: Any,
    options: Options,
) -> tuple[tuple[int, ...], ...]:
    """First layer of each segment, by group: at the stages' ends, or at the operator's cuts."""
    segments = options.layer_segments
    if segments == 1:
        starts = []
        for index in range(len(groups)):
            sizes = [sizes[index] for sizes in stage_sizes]
            starts.append(tuple(sum(sizes[:stage]) for stage in range(len(sizes))))
        return tuple(starts)
    bounds = _segment_bounds(int(model_config.get_total_num_hidden_layers()), segments)
    cuts = tuple(_starts_at(group, bounds) for group in groups)
    for index, group_cuts in enumerate(cuts):
        sizes = [sizes[index] for sizes in stage_sizes]
        for stage in range(1, len(sizes)):
            first = sum(sizes[:stage])
            if 0 < first < len(groups[index].layers) and first not in group_cuts:
                refuse(
                    "option 'layer_segments'",
                    segments,
                    f"a pipeline stage starts at layer {first} of group {index}, inside of a "
                    f"segment (they start at {list(group_cuts)}); a stage writes whole segments",
                )
    return cuts


def _segment_bounds(num_layers: int, segments: int | list[int]) -> list[int]:
    """Model layer at which each segment starts."""
    if isinstance(segments, list):
        sizes = segments
        if sum(sizes) != num_layers:
            raise ConfigError(
                Reason.CONFIG_VALUE,
                f"option 'layer_segments' has the value {segments}, {sum(sizes)} layers in all; "
                f"the model has {num_layers}",
            )
        return [sum(sizes[:index]) for index in range(len(sizes))]
    if segments > num_layers:
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option 'layer_segments' has the value {segments}; the model has {num_layers} layers",
        )
    from vllm.distributed.utils import get_pp_indices

    # The engine's own way to deal layers to stages, so that one stage with n segments shares
    # objects with n stages.
    return [get_pp_indices(num_layers, index, segments)[0] for index in range(segments)]


def _starts_at(group: Group, bounds: Sequence[int]) -> tuple[int, ...]:
    # A draft's layers count from 0 again, or on from the model's: they stay in the last segment
    # that the layers before them reached.
    reached = []
    highest = 0
    for layer in group.layers:
        highest = max(highest, layer_index(layer.name))
        reached.append(highest)
    return tuple(sum(index < bound for index in reached) for bound in bounds)


def _weights(vllm_config: Any, config: Any, options: Options) -> str:
    load = vllm_config.load_config
    return weights_identity(
        config.model,
        given=given_identity(options),
        load_format=str(load.load_format),
        revision=config.revision,
        download_dir=load.download_dir,
    )


def _draft_identity(vllm_config: Any, options: Options) -> dict[str, str]:
    """The weights of a draft whose layers are in the cache, too."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is None:
        return {}
    return {DRAFT_WEIGHTS: _weights(vllm_config, draft, options)}


def _device() -> str:
    from vllm.platforms import current_platform

    if is_npu():
        return "npu"
    if not current_platform.is_cpu():
        name = current_platform.device_name
        refuse("device", name, "only the CPU backend and vllm-ascend's are described")
    return "cpu"


def _packing_of_groups(vllm_config: Any, kv_cache_config: Any) -> str:
    """Name of the order in which kernels keep a block's elements: part of the identity."""
    if _device() == "npu":
        return npu_packing(vllm_config)
    names = {
        _packing(vllm_config, spec)
        for group in kv_cache_config.kv_cache_groups
        for spec in [spec_of(group, name) for name in group.layer_names]
        if is_packed(spec)
    }
    return ",".join(sorted(names)) or "plain"


def _packing(vllm_config: Any, spec: Any) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    instructions = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    return f"cpu-{instructions}"
