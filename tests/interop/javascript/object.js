/** Whole objects: reading all of one, reading some layers, writing one (sections 6.6, 8). */
import { box, intersection } from "./boxes.js";
import { checksum } from "./checksum.js";
import { checkHeader, decodeHeader, encodeHeader } from "./header.js";
import { FormatError, require } from "./reason.js";
import { axisSize } from "./layout.js";
import { DealtTokens, groupBitmap, hasObject, objectMap } from "./shards.js";
import { sameBytes } from "./text.js";

const slice = (data, { offset, nbytes }) => data.subarray(Number(offset), Number(offset + nbytes));

/** R5: the range of a layer against the header's checksum. */
function verifyRange(data, header, map, index) {
  const range = map.layers[index];
  if (checksum(slice(data, range)) === header.checksums[index]) return;
  const place = { group: range.group, layer: range.layer };
  throw new FormatError("checksum_mismatch", "payload is damaged", place);
}

const componentsOf = (data, range) =>
  range.components.map((placed) => ({
    group: placed.group,
    layer: placed.layer,
    component: placed.component.name,
    data: slice(data, placed),
  }));

/** Verifies the ranges of a whole object whose header was checked, and gives its components. */
export function readPayload(data, header, map) {
  require(BigInt(data.length) === map.object_nbytes, "wrong_size", `${data.length} bytes`);
  map.layers.forEach((_, index) => verifyRange(data, header, map, index));
  return map.layers.flatMap((range) => componentsOf(data, range));
}

/**
 * C1 to C8 for an object of which nobody told which one it should be: the header names the entry of
 * `objects`, the shard and the block.
 */
export function identifyObject(header, layout, fingerprint, require_checksums) {
  // C1 before the groups are looked up: another layout's groups and shards mean nothing here.
  require(sameBytes(header.fingerprint, fingerprint), "wrong_fingerprint", "another layout");
  const { group_bitmap, block_hash, shard } = header;
  const object_index = layout.objects.findIndex((entry) => groupBitmap(entry) === group_bitmap);
  require(object_index >= 0, "wrong_groups", `no object has the groups ${group_bitmap}`);
  require(hasObject(layout, object_index, shard), "wrong_shard", JSON.stringify(shard));
  const map = objectMap(layout, object_index, shard);
  checkHeader(header, map, fingerprint, block_hash, require_checksums);
  return { object_index, map };
}

/** @param wanted {layout, fingerprint, object_index, shard, block_hash} */
export function readObject(data, wanted) {
  const map = objectMap(wanted.layout, wanted.object_index, wanted.shard);
  const header = decodeHeader(data, map.header_nbytes);
  checkHeader(header, map, wanted.fingerprint, wanted.block_hash, true);
  return readPayload(data, header, map);
}

/**
 * Only the layers given. `again` is the object when its header is read again, for a reader without
 * checksums (R7), or null.
 */
export function readLayers(data, again, wanted, layers) {
  const map = objectMap(wanted.layout, wanted.object_index, wanted.shard);
  const read = (bytes) => {
    const header = decodeHeader(bytes, map.header_nbytes);
    checkHeader(header, map, wanted.fingerprint, wanted.block_hash, again === null);
    return header;
  };
  const header = read(data);
  require(BigInt(data.length) === map.object_nbytes, "wrong_size", `${data.length} bytes`);
  const indices = layers.map(({ group, layer }) => {
    const index = map.layers.findIndex((range) => range.group === group && range.layer === layer);
    require(index >= 0, "layout_grid", `layer ${layer} of group ${group} is not in the shard`);
    return index;
  });
  if (again === null) indices.forEach((index) => verifyRange(data, header, map, index));
  else require(sameBytes(read(again).write_id, header.write_id), "replaced", "another write_id");
  return indices.flatMap((index) => componentsOf(data, map.layers[index]));
}

/** The box of a component with all its heads and tokens. */
function wholeBox(component) {
  const heads = { start: 0n, stop: axisSize(component, "head") };
  return box(component, heads, new DealtTokens(axisSize(component, "token"), 1, 1, 0), 0n);
}

/**
 * An object of one shard, cut out of whole components.
 * @param components [{group, layer, component, data}]
 */
export function writeObject(wanted, write_id, has_checksums, components) {
  const map = objectMap(wanted.layout, wanted.object_index, wanted.shard);
  const place = ({ group, layer }, name) => `${group} ${layer} ${name}`;
  const given = new Map(components.map((item) => [place(item, item.component), item.data]));
  const object = new Uint8Array(Number(map.object_nbytes));
  for (const placed of map.layers.flatMap((range) => range.components)) {
    const { component, offset } = placed;
    const data = given.get(place(placed, component.name));
    require(data !== undefined, "incomplete", `${component.name} of layer ${placed.layer}`);
    require(BigInt(data.length) === component.nbytes, "header_size", `${component.name}`);
    const target = box(component, placed.box.heads, placed.box.tokens, offset);
    for (const [from, to, nbytes] of intersection(component, wholeBox(component), target)) {
      object.set(data.subarray(Number(from), Number(from + nbytes)), Number(to));
    }
  }
  const checksums = has_checksums
    ? map.layers.map((range) => checksum(slice(object, range)))
    : null;
  object.set(encodeHeader(map, wanted.fingerprint, wanted.block_hash, write_id, checksums));
  return object;
}
