/** Which part of a component a shard holds, and where it lies in the object (3.6, 6.2, 6.6). */
import { DTYPE_BITS, axisSize } from "./layout.js";
import { FormatError, require } from "./reason.js";

const FIXED_NBYTES = 192;
const CHECKSUM_NBYTES = 8;

const ceilDiv = (a, b) => (a + b - 1n) / b;
const least = (a, b) => (a < b ? a : b);

/** Heads `[start, stop)` that shard `index` of `num_shards` holds of an axis of `size` heads. */
export function headInterval(size, num_shards, index) {
  const cut = (shard) => ceilDiv(BigInt(shard) * size, BigInt(num_shards));
  return { start: cut(index), stop: cut(index + 1) };
}

/** The tokens that context shard `index` holds of an axis of `size` tokens: how many, and which. */
export class DealtTokens {
  constructor(size, num_shards, interleave, index) {
    this.run = BigInt(interleave);
    this.round = BigInt(num_shards) * this.run;
    this.first = BigInt(index) * this.run;
    const rest = (size % this.round) - this.first;
    const ofLastRound = rest < 0n ? 0n : least(rest, this.run);
    this.count = (size / this.round) * this.run + ofLastRound;
  }

  /** The token at a place among those held. */
  at(place) {
    return (place / this.run) * this.round + this.first + (place % this.run);
  }

  /** The place of a token; -1n if it isn't held. */
  placeOf(token) {
    const inRun = (token % this.round) - this.first;
    if (inRun < 0n || inRun >= this.run) return -1n;
    const place = (token / this.round) * this.run + inRun;
    return place < this.count ? place : -1n;
  }
}

/** Heads, tokens and bytes of a component in a shard. */
export function shardBox(grid, component, shard) {
  const { context_shards, context_interleave } = grid;
  const num_heads = axisSize(component, "head");
  const num_tokens = axisSize(component, "token");
  const heads = headInterval(num_heads, grid.head_shards, shard.head);
  const tokens = new DealtTokens(num_tokens, context_shards, context_interleave, shard.context);
  const cell_nbits = (component.nbytes * 8n) / (num_heads * num_tokens);
  const nbytes = (cell_nbits / 8n) * (heads.stop - heads.start) * tokens.count;
  return { heads, tokens, nbytes };
}

/** Sizes of the axes in bytes or elements, and the bytes of one: sub-byte dtypes count in bytes. */
export function byteAxes(component) {
  const bits = DTYPE_BITS.get(component.dtype);
  if (bits >= 8n) return { sizes: component.sizes, element_nbytes: bits / 8n };
  const last = component.sizes.length - 1;
  const sizes = component.sizes.map((size, index) => (index === last ? (size * bits) / 8n : size));
  return { sizes, element_nbytes: 1n };
}

/** Layers `[start, stop)` of a group in a layer shard. */
export function layerInterval(layout, group, layer_shard) {
  const starts = layout.grid.layer_starts[group];
  const stop = starts[layer_shard + 1] ?? layout.groups[group].layers.length;
  return { start: starts[layer_shard], stop };
}

export function numLayerShards(layout) {
  return layout.grid.layer_starts[0].length;
}

/** The size of a header of minor 0, by the layers of its groups. */
export function headerNbytes(layer_counts) {
  const words = layer_counts.reduce((total, count) => total + Math.ceil(count / 64), 0);
  const ranges = layer_counts.reduce((total, count) => total + count, 0);
  const nbytes = FIXED_NBYTES + 16 * layer_counts.length + 8 * words + 24 * ranges;
  return Math.ceil((nbytes + CHECKSUM_NBYTES) / 64) * 64;
}

export function groupBitmap(groups) {
  return groups.reduce((bitmap, group) => bitmap | (1n << BigInt(group)), 0n);
}

function entryOf(layout, object_index) {
  const entry = layout.objects[object_index];
  if (entry === undefined) throw new FormatError("layout_objects", `no object ${object_index}`);
  return entry;
}

/** Is the shard in the grid, and does it have bytes of the object's groups? */
export function hasObject(layout, object_index, shard) {
  const { grid } = layout;
  const inside =
    shard.layer < numLayerShards(layout) &&
    BigInt(shard.head) < grid.head_shards &&
    BigInt(shard.context) < grid.context_shards;
  const hasBytes = (group) => {
    const { start, stop } = layerInterval(layout, group, shard.layer);
    const components = layout.groups[group].layers.slice(start, stop).flatMap((l) => l.components);
    return components.some((component) => shardBox(grid, component, shard).nbytes > 0n);
  };
  return inside && entryOf(layout, object_index).some(hasBytes);
}

/**
 * Everything about an object that follows from layout, entry of `objects` and shard.
 * `components` are those of all layers in payload order, each with its box.
 */
export function objectMap(layout, object_index, shard) {
  const entry = entryOf(layout, object_index);
  const { grid } = layout;
  require(hasObject(layout, object_index, shard), "layout_grid", "the shard has no object");
  const directory = entry.map((group) => {
    const { start, stop } = layerInterval(layout, group, shard.layer);
    return { group, first_layer: start, num_layers: stop - start };
  });
  const header_nbytes = BigInt(headerNbytes(directory.map(({ num_layers }) => num_layers)));
  let offset = header_nbytes;
  const layers = [];
  for (const { group, first_layer, num_layers } of directory) {
    for (let layer = first_layer; layer < first_layer + num_layers; layer += 1) {
      const start = offset;
      const components = layout.groups[group].layers[layer].components.map((component) => {
        const box = shardBox(grid, component, shard);
        const placed = { group, layer, component, box, offset, nbytes: box.nbytes };
        offset += box.nbytes;
        return placed;
      });
      layers.push({ group, layer, offset: start, nbytes: offset - start, components });
    }
  }
  return {
    group_bitmap: groupBitmap(entry),
    num_tokens: layout.groups[entry[0]].block_size,
    digest_nbytes: Number(layout.hash.digest_nbytes),
    header_nbytes,
    object_nbytes: offset,
    shard,
    directory,
    layers,
  };
}

/** The shards that have an object, ascending by layer, head, context. */
export function* objectShards(layout, object_index) {
  const entry = entryOf(layout, object_index);
  const { head_shards, context_shards, context_interleave } = layout.grid;
  for (let layer = 0; layer < numLayerShards(layout); layer += 1) {
    const components = entry.flatMap((group) => {
      const { start, stop } = layerInterval(layout, group, layer);
      return layout.groups[group].layers.slice(start, stop).flatMap((held) => held.components);
    });
    const shapes = new Map();
    for (const component of components) {
      const shape = { heads: axisSize(component, "head"), tokens: axisSize(component, "token") };
      shapes.set(`${shape.heads} ${shape.tokens}`, shape);
    }
    for (let head = 0; shapes.size > 0 && head < head_shards; head += 1) {
      // Context shards are dealt to in turn, so those with tokens are the first ones.
      let contexts = 0n;
      for (const { heads, tokens } of shapes.values()) {
        const { start, stop } = headInterval(heads, head_shards, head);
        const dealt = start < stop ? ceilDiv(tokens, context_interleave) : 0n;
        if (dealt > contexts) contexts = dealt;
      }
      const stop = Number(least(contexts, context_shards));
      for (let context = 0; context < stop; context += 1) yield { layer, head, context };
    }
  }
}
