"""``kvformat describe``: what a key, a namespace, a manifest or an object file means."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click
import msgspec

from kvformat import registry, wire
from kvformat.cli.check import examine
from kvformat.cli.describe_document import (
    Description,
    ObjectSummary,
    object_document,
    show_description,
)
from kvformat.cli.header_document import bitmap_groups, header_document
from kvformat.cli.problems import Problem, exit_code
from kvformat.cli.program import Command, json_option
from kvformat.cli.render import open_console, print_json, print_problems
from kvformat.cli.sources import (
    FileBytes,
    StoreReader,
    find_layout,
    is_key_text,
    load_layout_file,
    open_reader,
    parse_namespace,
    read,
    read_file,
    require_namespace,
    stored_namespaces,
)
from kvformat.errors import (
    ConfigError,
    KeyFormatError,
    LayoutError,
    ManifestError,
    Reason,
    RemoteDataError,
)
from kvformat.fingerprint import (
    content_fingerprint,
    fingerprint,
    manifest,
    parse_layout,
)
from kvformat.identify import find_object_map
from kvformat.key import (
    BlockKey,
    ManifestKey,
    Namespace,
    format_key,
    layout_namespace,
    parse_key,
)
from kvformat.layout import Layout
from kvformat.objectmap import ObjectMap, group_bitmap, object_shards

#: A layout of more objects than this, or with more components in all of them together, is described
#: by its sizes alone: a manifest of a few bytes can claim very many.
MAX_LISTED_OBJECTS = 4096
MAX_LISTED_COMPONENTS = 1 << 18


@click.command(
    "describe", cls=Command, short_help="Explain a key, a namespace, a manifest or an object file."
)
@click.argument("target")
@click.option("--store", metavar="URI", help="Take the layout from the manifest in this store.")
@click.option("--layout", metavar="FILE", help="Take the layout from this manifest file.")
@click.option(
    "--manifest", "as_manifest", is_flag=True, help="Write the manifest itself, as for diff."
)
@json_option
def describe_command(
    target: str, store: str | None, layout: str | None, as_manifest: bool, as_json: bool
) -> int:
    """Explain TARGET: a key, a namespace, a manifest file, or a file that holds an object.

    A key alone tells its format version, tenant, model, layout fingerprint, groups, shard and
    block hash. With its layout (--store or --layout) every group, layer and component of the
    object is listed with its offset and size. What starts with kvformat1/ is a key or a
    namespace; write ./kvformat1/... for a file of that name.

    \b
    Examples:
      kvformat describe "$KEY"
      kvformat describe "$KEY" --store file:///var/cache/kv
      kvformat describe manifest.json
      kvformat describe NAMESPACE --store file:///var/cache/kv --manifest > manifest.json

    Exit status: 0 all is well, 1 TARGET or its manifest is wrong or missing, 2 wrong usage, or
    the store can't be reached.
    """
    if store is not None and layout is not None:
        raise click.UsageError("--store and --layout are two sources of one layout: give one")
    if as_manifest and as_json:
        raise click.UsageError("--manifest and --json are two documents: ask for one")
    describe = _describe_key if is_key_text(target) else _describe_file
    given = None if layout is None else load_layout_file(layout)
    if store is None:
        document = describe(target, given, None)
    else:
        with open_reader(store) as reader:
            document = describe(target, given, reader)
    if as_manifest:
        return _print_manifest(document)
    if as_json:
        print_json(document)
    else:
        show_description(open_console(), document, has_source=bool(store or layout))
    return exit_code(document.problems)


def _print_manifest(document: Description) -> int:
    """The canonical bytes, whose SHA-256 is the fingerprint; on a terminal for people."""
    print_problems(open_console(stderr=True), document.problems)
    if document.layout is None:
        if not document.problems:
            raise click.UsageError("the manifest needs a source: --store URI or --layout FILE")
    elif sys.stdout.isatty():
        print_json(document.layout)
    else:
        click.echo(manifest(msgspec.convert(document.layout, Layout)), nl=False)
    return exit_code(document.problems)


def _describe_key(target: str, layout: Layout | None, reader: StoreReader | None) -> Description:
    namespace = parse_namespace(target)
    is_namespace = target.count("/") == 3 or target.endswith("/")
    key = ManifestKey(namespace) if is_namespace else parse_key(target)
    problems: list[Problem] = []
    if layout is not None:
        try:
            require_namespace(layout, namespace, "the layout file")
        except RemoteDataError as error:
            layout, problems = None, [Problem.from_error(error)]
    elif reader is not None:
        layout, problems = find_layout(reader, key)
    if isinstance(key, ManifestKey):
        kind = "namespace" if is_namespace else "manifest_key"
        return _of_namespace(kind, target, namespace, layout, problems)
    document = _of_namespace("object_key", target, namespace, None, problems)
    document.groups = bitmap_groups(key.group_bitmap)
    document.shard = key.shard
    document.block_hash = key.block_hash.hex()
    if layout is not None:
        _add_layout(document, layout)
        _add_object(document, key, layout)
    return document


def _describe_file(target: str, layout: Layout | None, reader: StoreReader | None) -> Description:
    try:
        data = FileBytes(target)
        start = read(data, 0, len(wire.MAGIC)).lstrip()
    except FileNotFoundError:
        raise KeyFormatError(
            Reason.KEY_FORMAT,
            f"not a key (one starts with kvformat{registry.FORMAT_MAJOR}/) and not a file: "
            f"{target[:200]!r}",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(Reason.CONFIG_VALUE, f"can't read {target!r}: {error}") from error
    if start.startswith(b"{"):
        return _describe_manifest_file(target)
    return _describe_object_file(target, data, layout, reader)


def _describe_manifest_file(target: str) -> Description:
    data = read_file(target)
    layout = parse_layout(data)
    problems = []
    if manifest(layout) != data:
        error = ManifestError(
            Reason.MANIFEST_CANONICAL,
            "the file is not in canonical form (order, spacing, text), so that its SHA-256 is not "
            "the fingerprint",
        )
        problems.append(Problem.from_error(error))
    return _of_namespace("manifest_file", target, layout_namespace(layout), layout, problems)


def _describe_object_file(
    target: str, data: FileBytes, layout: Layout | None, reader: StoreReader | None
) -> Description:
    found = examine(data, None, None, verify=False)
    document = Description(kind="object_file", target=target, problems=found.problems)
    header = found.header
    if header is None:
        return document
    document.header = header_document(header)
    document.format_version = registry.FORMAT_MAJOR
    document.fingerprint = header.fingerprint.hex()
    document.groups = bitmap_groups(header.group_bitmap)
    document.shard = header.shard
    document.block_hash = header.block_hash.hex()
    if layout is None and reader is not None:
        layout = _find_layout_of(reader, header.fingerprint, document.problems)
    if layout is None:
        return document
    document.problems = examine(data, None, layout, verify=False).problems
    if fingerprint(layout) == header.fingerprint:
        namespace = layout_namespace(layout)
        document.tenant, document.model = namespace.tenant, namespace.model
        document.manifest_key = format_key(ManifestKey(namespace))
        _add_layout(document, layout)
        if not document.problems:
            document.object = object_document(
                find_object_map(layout, header.group_bitmap, header.shard)
            )
    return document


def _find_layout_of(reader: StoreReader, wanted: bytes, problems: list[Problem]) -> Layout | None:
    """The layout with this fingerprint, in whatever namespace it is."""
    for namespace in stored_namespaces(reader):
        if namespace.fingerprint == wanted:
            layout, found = find_layout(reader, ManifestKey(namespace))
            problems += found
            return layout
    problems.append(
        Problem("not_found", f"the store has no namespace with fingerprint {wanted.hex()}")
    )
    return None


def _of_namespace(
    kind: str,
    target: str,
    namespace: Namespace,
    layout: Layout | None,
    problems: list[Problem],
) -> Description:
    document = Description(
        kind=kind,
        target=target,
        format_version=registry.FORMAT_MAJOR,
        tenant=namespace.tenant,
        model=namespace.model,
        fingerprint=namespace.fingerprint.hex(),
        manifest_key=format_key(ManifestKey(namespace)),
        problems=problems,
    )
    if layout is not None:
        _add_layout(document, layout)
        document.groups = list(range(len(layout.groups)))
        document.objects = _summaries(layout)
    return document


def _add_layout(document: Description, layout: Layout) -> None:
    document.layout = msgspec.to_builtins(layout)
    document.content_fingerprint = content_fingerprint(layout).hex()


def _add_object(document: Description, key: BlockKey, layout: Layout) -> None:
    try:
        document.object = object_document(find_object_map(layout, key.group_bitmap, key.shard))
    except (RemoteDataError, LayoutError) as error:
        document.problems.append(Problem.from_error(error))
    if len(key.block_hash) != layout.hash.digest_nbytes:
        document.problems.append(
            Problem(
                Reason.KEY_HASH.value,
                f"the key's block hash has {len(key.block_hash)} bytes, the layout's have "
                f"{layout.hash.digest_nbytes}",
            )
        )


def _summaries(layout: Layout) -> list[ObjectSummary] | None:
    grid = layout.grid
    num_cuts = grid.head_shards * grid.context_shards
    num_components = sum(len(layer.components) for g in layout.groups for layer in g.layers)
    if (
        num_cuts * grid.layer_shards * len(layout.objects) > MAX_LISTED_OBJECTS
        or num_cuts * num_components > MAX_LISTED_COMPONENTS
    ):
        return None
    return list(_iterate_summaries(layout))


def _iterate_summaries(layout: Layout) -> Iterator[ObjectSummary]:
    for index, groups in enumerate(layout.objects):
        for shard in object_shards(layout, index):
            found = ObjectMap(layout, index, shard)
            yield ObjectSummary(
                groups=list(groups),
                group_bitmap=f"{group_bitmap(groups):016x}",
                shard=shard,
                nbytes=found.nbytes,
                header_nbytes=found.header_nbytes,
            )
