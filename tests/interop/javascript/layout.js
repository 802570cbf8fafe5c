/** The rules of section 3 on a layout whose fields and types are right. Integers are BigInts. */
import { require } from "./reason.js";
import { encodeUtf8 } from "./text.js";

const MAX_TEXT_NBYTES = 16384;
const MAX_GROUPS = 64;
const MAX_OBJECT_LAYERS = 16384;
const MAX_COMPONENTS = 64;
const MAX_AXES = 8;
const MAX_SHARDS = 65536n;
const MAX_GRID_SHARDS = 65536n;
const MAX_INTEGER = 2n ** 53n - 1n;
const MAX_OBJECT_NBYTES = 2n ** 48n - 1n;
const MAX_U32 = 2n ** 32n - 1n;

const NAME = /^[a-z][a-z0-9_]{0,62}$/;
const CONFIG_NAME = /^[A-Za-z0-9_][A-Za-z0-9_.\-[\]]{0,254}$/;
const SEED = /^(?:[0-9a-f]{2}){0,64}$/;

/** registry.md: does the kind have a window? */
const WINDOWED = new Map([
  ["full_attention", false],
  ["sliding_window", true],
  ["chunked_local", true],
  ["recurrent_state", false],
]);

/** registry.md: bits of an element. */
export const DTYPE_BITS = new Map([
  ["bfloat16", 16n],
  ["float16", 16n],
  ["float32", 32n],
  ["float64", 64n],
  ["float8_e4m3fn", 8n],
  ["float8_e4m3fnuz", 8n],
  ["float8_e5m2", 8n],
  ["float8_e5m2fnuz", 8n],
  ["float8_e8m0fnu", 8n],
  ["float4_e2m1fn", 4n],
  ["int4", 4n],
  ["int8", 8n],
  ["int16", 16n],
  ["int32", 32n],
  ["int64", 64n],
  ["uint4", 4n],
  ["uint8", 8n],
]);

const within = (value, low, high) => low <= value && value <= high;
const distinct = (values) => new Set(values).size === values.length;
const sum = (values) => values.reduce((total, value) => total + value, 0n);
const product = (values) => values.reduce((total, value) => total * value, 1n);

/** The size of a component along a cut axis; 1 where it has no such axis. */
export function axisSize(component, axis) {
  const index = component.axes.indexOf(axis);
  return index < 0 ? 1n : component.sizes[index];
}

function checkText(text, reason, path) {
  const bytes = encodeUtf8(text);
  require(bytes !== null && bytes.length <= MAX_TEXT_NBYTES, reason, `${path} is too long`);
}

function checkIdentity(identity) {
  const reason = "layout_identity";
  for (const field of ["tenant", "model", "weights", "adapter"]) {
    checkText(identity[field], reason, `identity.${field}`);
  }
  require(identity.weights !== "", reason, "identity.weights is empty");
  for (const [name, value] of identity.config) {
    require(CONFIG_NAME.test(name), reason, `identity.config has the name ${name}`);
    if (typeof value === "string") checkText(value, reason, `identity.config.${name}`);
  }
}

function checkHash(hash) {
  const reason = "layout_hash";
  require(NAME.test(hash.algorithm), reason, "hash.algorithm is not a name");
  require(SEED.test(hash.seed), reason, "hash.seed is not hex of at most 64 bytes");
  require(within(hash.block_size, 1n, MAX_U32), reason, "hash.block_size");
  require(within(hash.digest_nbytes, 1n, 64n), reason, "hash.digest_nbytes");
}

function checkComponent(component, path) {
  const reason = "layout_component";
  const { axes, sizes } = component;
  require(NAME.test(component.name), reason, `${path}.name is not a name`);
  require(axes.every((axis) => NAME.test(axis)) && distinct(axes), reason, `${path}.axes`);
  const bits = DTYPE_BITS.get(component.dtype);
  require(bits !== undefined, "layout_dtype", `${path}.dtype is not registered`);
  require(within(axes.length, 1, MAX_AXES), reason, `${path} has ${axes.length} axes`);
  require(sizes.length === axes.length, reason, `${path} has as many sizes as axes`);
  require(sizes.every((size) => within(size, 1n, MAX_INTEGER)), reason, `${path}.sizes`);
  if (bits < 8n) {
    const last = axes.at(-1);
    require(last !== "head" && last !== "token", reason, `${path}: the last axis is cut`);
    require((sizes.at(-1) * bits) % 8n === 0n, reason, `${path}: the last axis is not whole bytes`);
  }
  const nbits = product(sizes) * bits;
  require(component.nbytes * 8n === nbits, reason, `${path}.nbytes is not that of its sizes`);
  require(component.nbytes <= MAX_OBJECT_NBYTES, reason, `${path}.nbytes is above 2^48-1`);
}

function checkLayer(layer, path) {
  const reason = "layout_component";
  checkText(layer.name, reason, `${path}.name`);
  const { components } = layer;
  components.forEach((component) => checkComponent(component, `${path}.${component.name}`));
  require(within(components.length, 1, MAX_COMPONENTS), reason, `${path}.components`);
  require(distinct(components.map(({ name }) => name)), reason, `${path}: one name twice`);
}

function checkGroup(group, hash, path) {
  const reason = "layout_group";
  group.layers.forEach((layer, index) => checkLayer(layer, `${path}.layers[${index}]`));
  const windowed = WINDOWED.get(group.kind);
  require(windowed !== undefined, reason, `${path}.kind is not registered`);
  require(within(group.block_size, 1n, MAX_U32), reason, `${path}.block_size`);
  require(group.block_size % hash.block_size === 0n, reason, `${path}.block_size`);
  const [low, high] = windowed ? [1n, MAX_INTEGER] : [0n, 0n];
  require(within(group.window, low, high), reason, `${path}.window`);
  require(group.layers.length > 0, reason, `${path} has no layers`);
  require(group.layers.length <= MAX_OBJECT_LAYERS, "layout_limit", `${path} has too many layers`);
  require(distinct(group.layers.map(({ name }) => name)), reason, `${path}: one name twice`);
  const recurrent = group.kind === "recurrent_state";
  for (const component of group.layers.flatMap(({ components }) => components)) {
    const fits = recurrent
      ? !component.axes.includes("token")
      : group.block_size % axisSize(component, "token") === 0n;
    require(fits, reason, `${path}: the token axis of ${component.name}`);
  }
}

const layerNbytes = (layer) => sum(layer.components.map(({ nbytes }) => nbytes));

function checkObjects(objects, groups) {
  const reason = "layout_objects";
  const indices = objects.flat();
  const isPartition = indices.length === groups.length && distinct(indices);
  const inRange = indices.every((index) => within(index, 0n, BigInt(groups.length) - 1n));
  require(isPartition && inRange, reason, "objects is not a partition of the groups");
  objects.forEach((entry, index) => {
    require(entry.length > 0, reason, "an entry of objects is empty");
    const ascends = entry.every((group, place) => place === 0 || entry[place - 1] < group);
    require(ascends, reason, "an entry of objects does not ascend");
    require(index === 0 || objects[index - 1][0] < entry[0], reason, "objects are not in order");
    const members = entry.map((group) => groups[Number(group)]);
    const sizes = members.map(({ block_size }) => block_size);
    require(new Set(sizes).size === 1, reason, "groups of an object differ in block_size");
    const layers = members.flatMap((group) => group.layers);
    require(layers.length <= MAX_OBJECT_LAYERS, "layout_limit", "an object has too many layers");
    const nbytes = sum(layers.map(layerNbytes));
    require(nbytes <= MAX_OBJECT_NBYTES, "layout_limit", "an object has too many bytes");
  });
}

function checkGrid(grid, groups) {
  const reason = "layout_grid";
  require(within(grid.head_shards, 1n, MAX_SHARDS), reason, "grid.head_shards");
  require(within(grid.context_shards, 1n, MAX_SHARDS), reason, "grid.context_shards");
  const most = grid.context_shards === 1n ? 1n : MAX_U32;
  require(within(grid.context_interleave, 1n, most), reason, "grid.context_interleave");
  const starts = grid.layer_starts;
  require(starts.length === groups.length, reason, "grid.layer_starts has one list a group");
  starts.forEach((list, index) => {
    const num_layers = BigInt(groups[index].layers.length);
    require(within(BigInt(list.length), 1n, MAX_SHARDS), reason, "grid.layer_starts");
    require(list.length ===
      starts[0].length, reason, "lists of grid.layer_starts differ in length");
    const rises = list.every((start, place) => place === 0 || list[place - 1] <= start);
    require(list[0] === 0n && rises, reason, "grid.layer_starts falls or does not begin with 0");
    require(list.at(-1) <= num_layers, reason, "grid.layer_starts is above the number of layers");
  });
  const num_shards = BigInt(starts[0].length) * grid.head_shards * grid.context_shards;
  require(num_shards <= MAX_GRID_SHARDS, "layout_limit", `a grid of ${num_shards} shards`);
}

/**
 * All rules of section 3; a value is judged after the values inside it.
 * @returns the layout, with the indices in `objects` and `layer_starts` as numbers
 */
export function checkLayout(layout) {
  const { groups } = layout;
  checkIdentity(layout.identity);
  checkHash(layout.hash);
  groups.forEach((group, index) => checkGroup(group, layout.hash, `groups[${index}]`));
  require(groups.length > 0, "layout_group", "no groups");
  require(groups.length <= MAX_GROUPS, "layout_limit", `${groups.length} groups`);
  checkObjects(layout.objects, groups);
  checkGrid(layout.grid, groups);
  const numbers = (lists) => lists.map((list) => list.map(Number));
  const grid = { ...layout.grid, layer_starts: numbers(layout.grid.layer_starts) };
  return { ...layout, objects: numbers(layout.objects), grid };
}
