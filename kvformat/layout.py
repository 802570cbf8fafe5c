"""The layout: what every byte of a block means, the same on every rank and in the scheduler.

A layout is a tree of frozen structs. Constructing one checks everything that can be checked on
that node; :class:`Layout` checks what holds between nodes. A wrong layout raises
:class:`~kvformat.errors.LayoutError`.

Source: spec/kvformat.md section 3.
"""

from __future__ import annotations

import re
from math import prod
from typing import Final

import msgspec

from kvformat import registry
from kvformat.errors import LayoutError, Reason

SCHEMA: Final = f"kvformat/{registry.FORMAT_MAJOR}"

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_CONFIG_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-\[\]]{0,254}")
_DIGEST = re.compile(r"[0-9a-f]{0,128}")
_MAX_UINT32: Final = (1 << 32) - 1


def _check(condition: bool, reason: Reason, detail: str) -> None:
    if not condition:
        raise LayoutError(reason, detail)


def _check_integer(value: int, first: int, last: int, reason: Reason, what: str) -> None:
    # A float or a bool would pass the comparison and then stand in the manifest as it is.
    if type(value) is not int or not first <= value <= last:
        raise LayoutError(reason, f"{what} is {value!r}, not an integer in {first}..{last}")


def check_text(value: str, reason: Reason, what: str) -> None:
    """Refuse what is no text, text that can't be UTF-8 (a lone surrogate) or is over the limit."""
    _check(isinstance(value, str), reason, f"{what} is a {type(value).__name__}, not text")
    try:
        nbytes = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise LayoutError(reason, f"{what} is not valid Unicode: {error.reason}") from None
    limit = registry.MAX_TEXT_NBYTES
    _check(nbytes <= limit, reason, f"{what} has {nbytes} bytes of UTF-8, at most {limit} allowed")


class Component(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a layer, for one block, over all heads.

    ``axes`` and ``sizes`` give the order and shape of the object's bytes, outermost first. The
    axes ``head`` and ``token`` are the ones that a shard grid cuts; any other is kept whole. A
    component without one of them counts as one head, or one token.
    """

    name: str
    dtype: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    nbytes: int

    def __post_init__(self) -> None:
        what = f"component {self.name!r}"
        bad = Reason.LAYOUT_COMPONENT
        _check(_NAME.fullmatch(self.name) is not None, bad, f"{what}: name is not [a-z][a-z0-9_]*")
        bits = registry.DTYPE_BITS.get(self.dtype)
        if bits is None:
            raise LayoutError(
                Reason.LAYOUT_DTYPE,
                f"{what}: unknown dtype {self.dtype!r}; known: {', '.join(registry.DTYPE_BITS)}",
            )
        _check(
            0 < len(self.axes) == len(self.sizes) <= registry.MAX_AXES,
            bad,
            f"{what}: {len(self.axes)} axes, {len(self.sizes)} sizes; as many of one as of the "
            f"other, and 1 to {registry.MAX_AXES}",
        )
        _check(len(set(self.axes)) == len(self.axes), bad, f"{what}: an axis occurs twice")
        for axis, size in zip(self.axes, self.sizes, strict=True):
            _check(
                _NAME.fullmatch(axis) is not None, bad, f"{what}: axis name {axis!r} is not a name"
            )
            _check_integer(size, 1, registry.MAX_INTEGER, bad, f"{what}: size of axis {axis!r}")
        if bits < 8:
            # Two elements share a byte, so a cut or a stride through it would have no address.
            _check(
                self.axes[-1] not in (registry.HEAD_AXIS, registry.TOKEN_AXIS)
                and self.sizes[-1] * bits % 8 == 0,
                bad,
                f"{what}: dtype {self.dtype} needs an uncut last axis of whole bytes, "
                f"found {self.axes[-1]!r} of size {self.sizes[-1]}",
            )
        _check_integer(self.nbytes, 1, registry.MAX_OBJECT_NBYTES, bad, f"{what}: nbytes")
        expected = prod(self.sizes) * bits // 8
        _check(
            self.nbytes == expected,
            bad,
            f"{what}: {self.nbytes} bytes declared, dtype and sizes give {expected}",
        )

    @property
    def num_heads(self) -> int:
        """Size of the head axis; 1 without one."""
        return self._size(registry.HEAD_AXIS)

    @property
    def num_tokens(self) -> int:
        """Size of the token axis; 1 without one."""
        return self._size(registry.TOKEN_AXIS)

    @property
    def byte_sizes(self) -> tuple[int, ...]:
        """``sizes`` with the last axis in addressable units, for dtypes of less than a byte."""
        bits = registry.DTYPE_BITS[self.dtype]
        return self.sizes if bits >= 8 else (*self.sizes[:-1], self.sizes[-1] * bits // 8)

    @property
    def item_nbytes(self) -> int:
        """Bytes of one addressable unit: an element, or one byte for smaller dtypes."""
        return max(1, registry.DTYPE_BITS[self.dtype] // 8)

    def _size(self, axis: str) -> int:
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1


def component(name: str, dtype: str, **sizes: int) -> Component:
    """A component from its axes in byte order: ``component("k", "bfloat16", head=8, token=16, …)``.

    Raises ``LayoutError`` like :class:`Component`.
    """
    bits = registry.DTYPE_BITS.get(dtype, 0)
    return Component(
        name=name,
        dtype=dtype,
        axes=tuple(sizes),
        sizes=tuple(sizes.values()),
        nbytes=prod(sizes.values()) * bits // 8,
    )


class Layer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer of a group. ``name`` is the engine's; the address is (group, index in group)."""

    name: str
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        bad = Reason.LAYOUT_COMPONENT
        check_text(self.name, bad, "layer name")
        _check(
            0 < len(self.components) <= registry.MAX_COMPONENTS,
            bad,
            f"layer {self.name!r}: {len(self.components)} components, "
            f"1 to {registry.MAX_COMPONENTS} allowed",
        )
        names = [c.name for c in self.components]
        _check(len(set(names)) == len(names), bad, f"layer {self.name!r}: a component occurs twice")


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KV cache group: layers whose blocks live and die together.

    ``block_size`` and ``window`` are in tokens; ``window`` is 0 for kinds without one. The state
    of a ``recurrent_state`` block is the state after the block's last token.
    """

    kind: str
    block_size: int
    window: int = 0
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        bad = Reason.LAYOUT_GROUP
        _check(
            self.kind in registry.GROUP_KINDS,
            bad,
            f"unknown group kind {self.kind!r}; known: {', '.join(sorted(registry.GROUP_KINDS))}",
        )
        _check_integer(self.block_size, 1, _MAX_UINT32, bad, "block_size in tokens")
        first, last = (1, registry.MAX_INTEGER) if self.kind in registry.WINDOWED_KINDS else (0, 0)
        _check_integer(self.window, first, last, bad, f"window of a {self.kind} group")
        limit = registry.MAX_OBJECT_LAYERS
        _check(
            0 < len(self.layers) <= limit,
            Reason.LAYOUT_LIMIT if self.layers else bad,
            f"a group has 1 to {limit} layers, found {len(self.layers)}",
        )
        names = [layer.name for layer in self.layers]
        _check(len(set(names)) == len(names), bad, "a layer name occurs twice in a group")
        for component in {c for layer in self.layers for c in layer.components}:
            has_tokens = registry.TOKEN_AXIS in component.axes
            if self.kind == "recurrent_state":
                _check(
                    not has_tokens, bad, f"recurrent component {component.name!r} has a token axis"
                )
            elif has_tokens:
                _check(
                    self.block_size % component.num_tokens == 0,
                    bad,
                    f"component {component.name!r} has {component.num_tokens} tokens, which does "
                    f"not divide block_size {self.block_size}",
                )


class HashRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine hashes blocks. Processes whose hashes can't match share no namespace.

    ``seed`` is a lowercase hex digest of the seed, ``block_size`` the tokens of one hashed block,
    ``digest_nbytes`` the length of one hash.
    """

    algorithm: str
    seed: str
    block_size: int
    digest_nbytes: int

    def __post_init__(self) -> None:
        bad = Reason.LAYOUT_HASH
        _check(_NAME.fullmatch(self.algorithm) is not None, bad, f"algorithm {self.algorithm!r}")
        _check(
            _DIGEST.fullmatch(self.seed) is not None and len(self.seed) % 2 == 0,
            bad,
            f"seed {self.seed!r} is not lowercase hex of at most 64 bytes",
        )
        _check_integer(self.block_size, 1, _MAX_UINT32, bad, "hash block_size in tokens")
        _check_integer(self.digest_nbytes, 1, registry.MAX_HASH_NBYTES, bad, "digest_nbytes")


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose KV it is: everything outside the shapes that changes its bytes.

    ``weights`` tells two checkpoints of one name apart (a revision or a content digest) and is
    never empty. ``adapter`` is the identity of a LoRA adapter, empty for none. ``config`` holds
    every other value that changes KV bytes, by name, so that a difference can be named.
    """

    tenant: str
    model: str
    weights: str
    adapter: str = ""
    config: dict[str, bool | int | str]

    def __post_init__(self) -> None:
        bad = Reason.LAYOUT_IDENTITY
        for name in ("tenant", "model", "weights", "adapter"):
            check_text(getattr(self, name), bad, name)
        _check(self.weights != "", bad, "weights is empty: give a revision or a content digest")
        for name, value in self.config.items():
            _check(
                _CONFIG_NAME.fullmatch(name) is not None,
                bad,
                f"config name {name!r} is not of letters, digits and _ . - [ ]",
            )
            if isinstance(value, str):
                check_text(value, bad, f"config {name!r}")
            elif isinstance(value, int):
                _check(
                    abs(value) <= registry.MAX_INTEGER,
                    bad,
                    f"config {name!r} is {value}, integers stay below 2^53",
                )
            else:
                raise LayoutError(
                    bad,
                    f"config {name!r} is a {type(value).__name__}; only text, integers, booleans "
                    "(write a float as text)",
                )


class ShardGrid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a block's box is cut into objects.

    ``layer_starts[group][j]`` is the first layer, by index in the group, of layer shard ``j``;
    every group has as many. Heads are cut evenly into ``head_shards``; tokens are dealt to
    ``context_shards`` in runs of ``context_interleave``.
    """

    head_shards: int = 1
    context_shards: int = 1
    context_interleave: int = 1
    layer_starts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        bad = Reason.LAYOUT_GRID
        for name in ("head_shards", "context_shards"):
            _check_integer(getattr(self, name), 1, registry.MAX_SHARDS, bad, name)
        _check_integer(self.context_interleave, 1, _MAX_UINT32, bad, "context_interleave")
        _check(
            self.context_shards > 1 or self.context_interleave == 1,
            bad,
            "context_interleave is 1 where context_shards is 1 (one cut must have one spelling)",
        )
        _check(
            len({len(starts) for starts in self.layer_starts}) == 1,
            bad,
            "every group needs the same number of layer shards",
        )
        for starts in self.layer_starts:
            for start in starts:
                _check_integer(start, 0, registry.MAX_OBJECT_LAYERS, bad, "a layer start")
            _check(
                0 < len(starts) <= registry.MAX_SHARDS
                and starts[0] == 0
                and list(starts) == sorted(starts),
                bad,
                f"layer_starts {list(starts)} does not start at 0 and rise",
            )
        num_shards = self.layer_shards * self.head_shards * self.context_shards
        _check(
            num_shards <= registry.MAX_GRID_SHARDS,
            Reason.LAYOUT_LIMIT,
            f"{self.layer_shards} layer, {self.head_shards} head and {self.context_shards} context "
            f"shards are {num_shards} in all, at most {registry.MAX_GRID_SHARDS} allowed",
        )

    @property
    def layer_shards(self) -> int:
        """Number of layer shards."""
        return len(self.layer_starts[0])


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole description. ``objects`` lists which groups share an object: a partition."""

    schema: str = SCHEMA
    identity: Identity
    hash: HashRecipe
    groups: tuple[Group, ...]
    objects: tuple[tuple[int, ...], ...]
    grid: ShardGrid

    def __post_init__(self) -> None:
        _check(
            self.schema == SCHEMA,
            Reason.LAYOUT_SCHEMA,
            f"schema is {self.schema!r}, this library knows {SCHEMA!r}",
        )
        num_groups = len(self.groups)
        _check(
            0 < num_groups <= registry.MAX_GROUPS,
            Reason.LAYOUT_LIMIT if num_groups else Reason.LAYOUT_GROUP,
            f"a layout has 1 to {registry.MAX_GROUPS} groups, found {num_groups}",
        )
        for index, group in enumerate(self.groups):
            _check(
                group.block_size % self.hash.block_size == 0,
                Reason.LAYOUT_GROUP,
                f"group {index}: block_size {group.block_size} is not a multiple of the hash "
                f"block_size {self.hash.block_size}",
            )
        self._check_objects()
        _check(
            len(self.grid.layer_starts) == num_groups,
            Reason.LAYOUT_GRID,
            f"layer_starts has {len(self.grid.layer_starts)} entries for {num_groups} groups",
        )
        for index, starts in enumerate(self.grid.layer_starts):
            _check(
                starts[-1] <= len(self.groups[index].layers),
                Reason.LAYOUT_GRID,
                f"group {index}: a layer shard starts at {starts[-1]}, past its "
                f"{len(self.groups[index].layers)} layers",
            )

    def _check_objects(self) -> None:
        bad = Reason.LAYOUT_OBJECTS
        members = sorted(index for groups in self.objects for index in groups)
        for index in members:
            _check_integer(index, 0, registry.MAX_GROUPS - 1, bad, "a group index in objects")
        _check(
            members == list(range(len(self.groups))),
            bad,
            f"objects {[list(groups) for groups in self.objects]} is not a partition of the "
            f"{len(self.groups)} groups",
        )
        firsts = [groups[0] if groups else -1 for groups in self.objects]
        _check(
            -1 not in firsts and firsts == sorted(firsts),
            bad,
            "objects are not ordered by their first group (one partition must have one spelling)",
        )
        for groups in self.objects:
            _check(list(groups) == sorted(groups), bad, f"object {list(groups)} is not ascending")
            sizes = {self.groups[index].block_size for index in groups}
            _check(len(sizes) == 1, bad, f"object {list(groups)} joins block sizes {sorted(sizes)}")
            num_layers = sum(len(self.groups[index].layers) for index in groups)
            _check(
                num_layers <= registry.MAX_OBJECT_LAYERS,
                Reason.LAYOUT_LIMIT,
                f"object {list(groups)} has {num_layers} layers, at most "
                f"{registry.MAX_OBJECT_LAYERS}",
            )
            nbytes = sum(
                c.nbytes for index in groups for layer in self.groups[index].layers
                for c in layer.components
            )  # fmt: skip
            _check(
                nbytes <= registry.MAX_OBJECT_NBYTES,
                Reason.LAYOUT_LIMIT,
                f"object {list(groups)} has {nbytes} bytes, at most {registry.MAX_OBJECT_NBYTES}",
            )
