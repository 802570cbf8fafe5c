/** Headers: H1 to H18, C1 to C8, and writing one (section 6). Offsets are BigInts. */
import { checksum } from "./checksum.js";
import { require } from "./reason.js";
import { headerNbytes } from "./shards.js";
import { sameBytes } from "./text.js";

const MAGIC = Uint8Array.of(0x8b, 0x4b, 0x56, 0x46, 0x0d, 0x0a, 0x1a, 0x0a);
const MIN_HEADER_NBYTES = 256;
const MAX_HEADER_NBYTES = 1048576;
const MAX_OBJECT_LAYERS = 16384;
const TABLES_OFFSET = 192;
const PAYLOAD_XXH3 = 1n;
const KNOWN_REQUIRED = 0n;
const KNOWN_OPTIONAL = PAYLOAD_XXH3;

const viewOf = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
const isZero = (bytes) => bytes.every((byte) => byte === 0);
const sumOf = (numbers) => numbers.reduce((total, number) => total + number, 0);

function bitsOf(bitmap) {
  const bits = [];
  for (let bit = 0; bit < 64; bit += 1) if ((bitmap >> BigInt(bit)) & 1n) bits.push(bit);
  return bits;
}

function words(view, offset, count) {
  return Array.from({ length: count }, (_, index) => view.getBigUint64(offset + 8 * index, true));
}

function decodeDirectory(view, num_groups) {
  const directory = [];
  for (let index = 0; index < num_groups; index += 1) {
    const at = TABLES_OFFSET + 16 * index;
    const group = view.getUint16(at, true);
    const first_layer = view.getUint32(at + 4, true);
    const num_layers = view.getUint32(at + 8, true);
    const zeros = view.getUint16(at + 2, true) === 0 && view.getUint32(at + 12, true) === 0;
    require(zeros, "header_reserved", `zero fields of entry ${index}`);
    const ascends = index === 0 || group > directory[index - 1].group;
    require(ascends, "header_groups", `group ${group} is not above those before it`);
    const fits = first_layer + num_layers <= MAX_OBJECT_LAYERS;
    require(fits, "header_groups", `layers of group ${group}`);
    directory.push({ group, first_layer, num_layers });
  }
  return directory;
}

/** The indices of the complete layers of each group; H15. */
function decodeCompleteness(view, directory) {
  let at = TABLES_OFFSET + 16 * directory.length;
  const complete = [];
  for (const { first_layer, num_layers } of directory) {
    const count = Math.ceil(num_layers / 64);
    const bits = words(view, at, count).flatMap((word, index) =>
      bitsOf(word).map((bit) => 64 * index + bit),
    );
    require(bits.every((bit) => bit < num_layers), "header_completeness", "bits beyond the layers");
    complete.push(bits.map((bit) => first_layer + bit));
    at += 8 * count;
  }
  return { complete, end: at };
}

/**
 * H1 to H18: the header at the start of any bytes; `expected_nbytes` (BigInt) is the layout's size of
 * it where the object is known, else null.
 */
export function decodeHeader(data, expected_nbytes = null) {
  require(data.length >= 16, "header_truncated", `${data.length} bytes`);
  require(sameBytes(data.subarray(0, 8), MAGIC), "header_magic", "not an object");
  const start = viewOf(data);
  const major = start.getUint16(8, true);
  require(major === 1, "header_version", `format ${major}`);
  const minor = start.getUint16(10, true);
  const header_nbytes = start.getUint32(12, true);
  const sized =
    header_nbytes % 64 === 0 &&
    header_nbytes >= MIN_HEADER_NBYTES &&
    header_nbytes <= MAX_HEADER_NBYTES;
  require(sized, "header_size", `${header_nbytes} bytes`);
  const expected = expected_nbytes === null || BigInt(header_nbytes) === expected_nbytes;
  require(expected, "wrong_size", `a header of ${header_nbytes} bytes`);
  require(data.length >= header_nbytes, "header_truncated", `${data.length} bytes`);
  const bytes = data.subarray(0, header_nbytes);
  const view = viewOf(bytes);
  const own_checksum = checksum(bytes.subarray(0, header_nbytes - 8));
  const damaged = view.getBigUint64(header_nbytes - 8, true) !== own_checksum;
  require(!damaged, "header_checksum", "the header is damaged");
  const required_features = view.getBigUint64(16, true);
  const optional_features = view.getBigUint64(24, true);
  require((required_features & ~KNOWN_REQUIRED) === 0n, "header_feature", `${required_features}`);
  const extension = bytes.slice(160, 192);
  const mayExtend = (optional_features & ~KNOWN_OPTIONAL) !== 0n;
  require(mayExtend || isZero(extension), "header_reserved", "extension");
  const hash_nbytes = bytes[90];
  const hashed =
    1 <= hash_nbytes && hash_nbytes <= 64 && isZero(bytes.subarray(96 + hash_nbytes, 160));
  require(hashed, "header_hash", `${hash_nbytes} bytes`);
  const num_tokens = view.getUint32(80, true);
  require(num_tokens !== 0, "header_tokens", "no tokens");

  const group_bitmap = view.getBigUint64(72, true);
  const num_groups = bytes[91];
  const listed =
    num_groups !== 0 &&
    num_groups === bitsOf(group_bitmap).length &&
    TABLES_OFFSET + 16 * num_groups <= header_nbytes;
  require(listed, "header_groups", `${num_groups} groups`);
  const directory = decodeDirectory(view, num_groups);
  const num_ranges = view.getUint32(92, true);
  const layer_counts = directory.map(({ num_layers }) => num_layers);
  const counted =
    bitsOf(group_bitmap).every((group, index) => directory[index].group === group) &&
    sumOf(layer_counts) === num_ranges &&
    num_ranges >= 1 &&
    num_ranges <= MAX_OBJECT_LAYERS;
  require(counted, "header_groups", `bitmap, directory and ${num_ranges} ranges disagree`);
  const least = headerNbytes(layer_counts);
  const holds = minor === 0 ? header_nbytes === least : header_nbytes >= least;
  require(holds, "header_size", `${header_nbytes} bytes for tables of ${least}`);

  const { complete, end } = decodeCompleteness(view, directory);
  const offsets = words(view, end, num_ranges);
  const sizes = words(view, end + 8 * num_ranges, num_ranges);
  const checksums = words(view, end + 16 * num_ranges, num_ranges);
  const padding = bytes.subarray(end + 24 * num_ranges, header_nbytes - 8);
  require(minor !== 0 || isZero(padding), "header_reserved", "padding");
  const object_nbytes = view.getBigUint64(48, true);
  let next = BigInt(header_nbytes);
  sizes.forEach((size, index) => {
    require(size < 2n ** 48n && offsets[index] === next, "header_ranges", `range ${index}`);
    next += size;
  });
  require(next === object_nbytes, "header_ranges", "the last range is not the end");
  const has_checksums = (optional_features & PAYLOAD_XXH3) !== 0n;
  const absent = checksums.every((value) => value === 0n);
  require(has_checksums || absent, "header_reserved", "checksums without payload_xxh3");

  return {
    minor,
    header_nbytes,
    required_features,
    optional_features,
    fingerprint: bytes.slice(32, 48),
    object_nbytes,
    write_id: bytes.slice(56, 72),
    group_bitmap,
    num_tokens,
    shard: {
      layer: view.getUint16(84, true),
      head: view.getUint16(86, true),
      context: view.getUint16(88, true),
    },
    block_hash: bytes.slice(96, 96 + hash_nbytes),
    extension,
    groups: directory.map((entry, index) => ({ ...entry, complete: complete[index] })),
    offsets,
    sizes,
    checksums,
    has_checksums,
  };
}

/** C1 to C8: is this the object of `map` (from objectMap), this namespace and block? */
export function checkHeader(header, map, fingerprint, block_hash, require_checksums) {
  require(sameBytes(header.fingerprint, fingerprint), "wrong_fingerprint", "another layout");
  require(header.group_bitmap === map.group_bitmap, "wrong_groups", `${header.group_bitmap}`);
  const same = ["layer", "head", "context"].every((axis) => header.shard[axis] === map.shard[axis]);
  require(same, "wrong_shard", JSON.stringify(header.shard));
  require(sameBytes(header.block_hash, block_hash), "wrong_block", "another block");
  const hashed = block_hash.length === map.digest_nbytes;
  require(hashed, "wrong_block", `a block hash of ${block_hash.length} bytes`);
  require(BigInt(header.num_tokens) === map.num_tokens, "wrong_tokens", `${header.num_tokens}`);
  const sized =
    header.object_nbytes === map.object_nbytes &&
    header.groups.every(
      ({ group, first_layer, num_layers }, index) =>
        group === map.directory[index].group &&
        first_layer === map.directory[index].first_layer &&
        num_layers === map.directory[index].num_layers,
    ) &&
    header.sizes.every((size, index) => size === map.layers[index].nbytes);
  require(sized, "wrong_size", "sizes are not the layout's");
  const whole = header.groups.every(({ num_layers, complete }) => complete.length === num_layers);
  require(whole, "incomplete", "not all layers are there");
  require(header.has_checksums || !require_checksums, "checksum_absent", "no checksums");
}

/** The header of the object of `map`; `checksums` has one for each range, or is null (6.5). */
export function encodeHeader(map, fingerprint, block_hash, write_id, checksums) {
  require(fingerprint.length === 16 && write_id.length === 16, "header_size", "16 bytes each");
  const hash_nbytes = block_hash.length;
  require(hash_nbytes === map.digest_nbytes, "header_hash", `${hash_nbytes} bytes`);
  const header_nbytes = Number(map.header_nbytes);
  const bytes = new Uint8Array(header_nbytes);
  const view = viewOf(bytes);
  bytes.set(MAGIC, 0);
  view.setUint16(8, 1, true);
  view.setUint32(12, header_nbytes, true);
  view.setBigUint64(24, checksums === null ? 0n : PAYLOAD_XXH3, true);
  bytes.set(fingerprint, 32);
  view.setBigUint64(48, map.object_nbytes, true);
  bytes.set(write_id, 56);
  view.setBigUint64(72, map.group_bitmap, true);
  view.setUint32(80, Number(map.num_tokens), true);
  view.setUint16(84, map.shard.layer, true);
  view.setUint16(86, map.shard.head, true);
  view.setUint16(88, map.shard.context, true);
  view.setUint8(90, hash_nbytes);
  view.setUint8(91, map.directory.length);
  view.setUint32(92, map.layers.length, true);
  bytes.set(block_hash, 96);
  let at = TABLES_OFFSET;
  for (const { group, first_layer, num_layers } of map.directory) {
    view.setUint16(at, group, true);
    view.setUint32(at + 4, first_layer, true);
    view.setUint32(at + 8, num_layers, true);
    at += 16;
  }
  for (const { num_layers } of map.directory) {
    for (let first = 0; first < num_layers; first += 64, at += 8) {
      const bits = BigInt(Math.min(64, num_layers - first));
      view.setBigUint64(at, (1n << bits) - 1n, true);
    }
  }
  const sums = checksums ?? map.layers.map(() => 0n);
  for (const table of [
    map.layers.map(({ offset }) => offset),
    map.layers.map(({ nbytes }) => nbytes),
    sums,
  ]) {
    table.forEach((value, index) => view.setBigUint64(at + 8 * index, value, true));
    at += 8 * table.length;
  }
  view.setBigUint64(header_nbytes - 8, checksum(bytes.subarray(0, header_nbytes - 8)), true);
  return bytes;
}
