/** The command of CONFORMANCE.md: requests on standard input, answers on standard output. */
import { diffManifests } from "./diff.js";
import { checkHeader, decodeHeader } from "./header.js";
import { parseJson } from "./json.js";
import { formatKey, formatManifestKey, parseKey } from "./key.js";
import { readDocument, readManifest } from "./manifest.js";
import { identifyObject, readLayers, readObject, writeObject } from "./object.js";
import { planObjects, planTransfer, readPlacement } from "./plan.js";
import { FormatError } from "./reason.js";
import { objectMap, objectShards } from "./shards.js";
import { decodeUtf8, fromHex, toHex } from "./text.js";

const CLASSES = ["keyer", "reader", "layer_reader", "writer", "resharder", "explainer"];

const optional = (convert) => (value) => (value === null ? null : convert(value));
const decimals = (values) => values.map(BigInt);

/** The manifest, entry, shard and block that most requests name. */
function wantedOf(input) {
  const { layout, fingerprint } = readManifest(fromHex(input.manifest));
  const block_hash = fromHex(input.block_hash ?? "");
  return { layout, fingerprint, block_hash, object_index: input.object_index, shard: input.shard };
}

const withData = (components) => components.map((item) => ({ ...item, data: fromHex(item.data) }));

function placementOf(layout, placement) {
  const regions = placement.regions.map((region) => ({
    address: BigInt(region.address),
    nbytes: BigInt(region.nbytes),
  }));
  const layers = placement.layers.map((layer) => ({
    ...layer,
    components: layer.components.map((component) => ({
      ...component,
      base_address: BigInt(component.base_address),
      block_stride_nbytes: BigInt(component.block_stride_nbytes),
      axis_strides_nbytes: decimals(component.axis_strides_nbytes),
    })),
  }));
  return readPlacement(layout, { ...placement, regions, layers });
}

const limitsOf = (limits) => ({
  max_rows: BigInt(limits.max_rows),
  max_ranges: BigInt(limits.max_ranges),
  max_nbytes: BigInt(limits.max_nbytes),
});

function plan(input, whole) {
  const { layout } = readManifest(fromHex(input.manifest));
  const rank = placementOf(layout, input.placement);
  const limits = optional(limitsOf)(input.limits ?? null);
  return { objects: planObjects(layout, rank, decimals(input.blocks), limits, whole) };
}

const operations = {
  hello: () => ({ implementation: "kvformat-javascript", format: "1.0", classes: CLASSES }),

  "manifest.parse": ({ document, expected }) => {
    const { fingerprint, contentFingerprint } = readManifest(
      fromHex(document),
      optional(fromHex)(expected),
    );
    return { fingerprint, content_fingerprint: contentFingerprint };
  },
  "manifest.format": ({ document }) => {
    const { manifest, fingerprint, contentFingerprint } = readDocument(fromHex(document));
    return { manifest, fingerprint, content_fingerprint: contentFingerprint };
  },
  "key.format": (input) => ({
    key: formatKey({
      ...input,
      fingerprint: fromHex(input.fingerprint),
      group_bitmap: BigInt(input.group_bitmap),
      block_hash: fromHex(input.block_hash),
    }),
  }),
  "key.format_manifest": (input) =>
    formatManifestKey({ ...input, fingerprint: fromHex(input.fingerprint) }),
  "key.parse": ({ key, digest_nbytes }) => parseKey(key, digest_nbytes),

  "object.map": (input) => {
    const { layout, object_index, shard } = wantedOf(input);
    const map = objectMap(layout, object_index, shard);
    const place = ({ group, layer, offset, nbytes }) => ({ group, layer, offset, nbytes });
    return {
      group_bitmap: map.group_bitmap,
      header_nbytes: map.header_nbytes,
      object_nbytes: map.object_nbytes,
      layers: map.layers.map(place),
      components: map.layers.flatMap(({ components }) =>
        components.map((placed) => ({ ...place(placed), component: placed.component.name })),
      ),
    };
  },
  "object.shards": (input) => {
    const { layout, object_index } = wantedOf(input);
    return { shards: [...objectShards(layout, object_index)] };
  },
  "header.decode": ({ data }) => {
    const { has_checksums, ...header } = decodeHeader(fromHex(data));
    return header;
  },
  "header.check": (input) => {
    const { layout, fingerprint, block_hash, object_index, shard } = wantedOf(input);
    if (object_index === null) {
      const header = decodeHeader(fromHex(input.data));
      identifyObject(header, layout, fingerprint, input.require_checksums);
      return {};
    }
    const map = objectMap(layout, object_index, shard);
    const header = decodeHeader(fromHex(input.data), map.header_nbytes);
    checkHeader(header, map, fingerprint, block_hash, input.require_checksums);
    return {};
  },
  "object.read": (input) => ({ components: readObject(fromHex(input.data), wantedOf(input)) }),

  "object.read_layers": (input) => {
    const again = optional(fromHex)(input.again);
    return { components: readLayers(fromHex(input.data), again, wantedOf(input), input.layers) };
  },

  "object.write": (input) => {
    const components = withData(input.components);
    const write_id = fromHex(input.write_id);
    return { object: writeObject(wantedOf(input), write_id, input.checksums, components) };
  },

  "plan.put": (input) => plan(input, true),
  "plan.get": (input) => plan(input, false),
  "plan.transfer": (input) => {
    const { layout } = readManifest(fromHex(input.manifest));
    const [source, target] = [input.source, input.target].map((side) => placementOf(layout, side));
    const blocks = [input.source_blocks, input.target_blocks].map(decimals);
    return { layers: planTransfer(source, target, ...blocks) };
  },

  "layout.diff": ({ a, b }) => {
    const [left, right] = [a, b].map((hex) => {
      const manifest = fromHex(hex);
      readManifest(manifest);
      return parseJson(manifest);
    });
    // Integers of a manifest are below 2^53, and JSON integers in this answer.
    const plain = (value) => (typeof value === "bigint" ? Number(value) : value);
    const found = diffManifests(left, right);
    return {
      differences: found.map(({ path, a: one, b: other }) => ({
        path,
        a: plain(one),
        b: plain(other),
      })),
    };
  },
};

function answer({ id, op, input }) {
  if (!Object.hasOwn(operations, op)) return { id, unsupported: true };
  try {
    return { id, result: operations[op](input) };
  } catch (error) {
    if (!(error instanceof FormatError)) {
      // A defect of this program: no code of the registry, so that no vector takes it for right.
      process.stderr.write(`${id}: ${error.stack}\n`);
      return { id, error: { reason: "defect" } };
    }
    return { id, error: { reason: error.reason, ...error.place } };
  }
}

const jsonValue = (_, value) => {
  if (typeof value === "bigint") return String(value);
  return value instanceof Uint8Array ? toHex(value) : value;
};

// Lines end with a newline only; readline would also end them at U+2028, which JSON may hold.
let pending = [];
for await (const chunk of process.stdin) {
  let start = 0;
  for (let end = chunk.indexOf(10); end >= 0; end = chunk.indexOf(10, start)) {
    const line = Buffer.concat([...pending, chunk.subarray(start, end)]);
    pending = [];
    start = end + 1;
    process.stdout.write(`${JSON.stringify(answer(JSON.parse(decodeUtf8(line))), jsonValue)}\n`);
  }
  pending.push(chunk.subarray(start));
}
