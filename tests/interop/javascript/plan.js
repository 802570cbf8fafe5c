/** Plans between objects and memories (section 7). Addresses and strides are BigInts. */
import { box, intersection } from "./boxes.js";
import { axisSize } from "./layout.js";
import { require } from "./reason.js";
import { DealtTokens, byteAxes, objectMap, objectShards } from "./shards.js";

const MAX_SHARDS = 65536;
const MAX_ADDRESS = 2n ** 61n;

const magnitude = (number) => (number < 0n ? -number : number);
const placeOf = (group, layer) => `${group} ${layer}`;

/** The boxes of a placed layer in its components' order; `plan_placement` where it doesn't fit. */
function placedBoxes(placement, layer, placed) {
  const reason = "plan_placement";
  const given = new Map(placed.components.map((item) => [item.component, item]));
  const names = layer.components.map(({ name }) => name);
  const paired = given.size === placed.components.length && given.size === names.length;
  require(paired && names.every((name) => given.has(name)), reason, "other components");
  return layer.components.map((component) => {
    const item = given.get(component.name);
    const { base_address, block_stride_nbytes, axis_strides_nbytes } = item;
    require(axis_strides_nbytes.length === component.axes.length, reason, "strides of other axes");
    const heads = { start: BigInt(item.head_start), stop: BigInt(item.head_stop) };
    const inside = heads.start < heads.stop && heads.stop <= axisSize(component, "head");
    require(inside, reason, "interval of heads");
    require(base_address >= 0n && block_stride_nbytes >= 0n, reason, "negative address or stride");
    const last_place = byteAxes(component).sizes.reduce(
      (place, size, axis) => place + magnitude(axis_strides_nbytes[axis]) * (size - 1n),
      base_address,
    );
    const last_block = block_stride_nbytes * BigInt(placed.num_blocks - 1);
    const reached = [block_stride_nbytes, last_place, last_block];
    require(reached.every((place) => place < MAX_ADDRESS), reason, "2^61 or more");
    const { context_shards, context_interleave, context_index } = placement;
    const num_tokens = axisSize(component, "token");
    const tokens = new DealtTokens(num_tokens, context_shards, context_interleave, context_index);
    const memory = box(component, heads, tokens, base_address, axis_strides_nbytes);
    return { component, memory, block_stride: block_stride_nbytes };
  });
}

/** A placement that fits the layout: its layers by place. */
export function readPlacement(layout, placement) {
  const reason = "plan_placement";
  require(placement.context_index < placement.context_shards, reason, "context index");
  require(placement.context_shards <= MAX_SHARDS, reason, "context shards");
  const { context_interleave } = placement;
  require(1 <= context_interleave && context_interleave < 2 ** 32, reason, "interleave");
  const layers = new Map();
  for (const placed of placement.layers) {
    const layer = layout.groups[placed.group]?.layers[placed.layer];
    require(layer !== undefined, reason, `no layer ${placed.layer} in group ${placed.group}`);
    const place = placeOf(placed.group, placed.layer);
    require(!layers.has(place), reason, "a layer placed twice");
    require(placed.num_blocks > 0, reason, "no blocks");
    const components = placedBoxes(placement, layer, placed);
    layers.set(place, { ...placed, num_blocks: BigInt(placed.num_blocks), components });
  }
  return { layers, regions: placement.regions };
}

/** Section 7.4, for a range that starts at `start` in block 0. */
function checkBounds(rank, layer, block_stride, start, nbytes) {
  const stop = start + (layer.num_blocks - 1n) * block_stride + nbytes;
  const inRegion = rank.regions.some(
    (region) => region.address <= start && stop <= region.address + region.nbytes,
  );
  require(inRegion, "plan_bounds", "a range is outside of the regions");
}

function checkBlocks(layer, blocks) {
  const known = blocks.every((block) => 0n <= block && block < layer.num_blocks);
  require(known, "plan_bounds", "block id out of range");
}

/** Joins ranges of one layer that touch on both sides in every block. */
function joined(ranges) {
  const result = [];
  for (const range of ranges) {
    const last = result.at(-1);
    const touches =
      last !== undefined &&
      last.address + last.nbytes === range.address &&
      last.offset + last.nbytes === range.offset &&
      last.block_stride === range.block_stride &&
      last.other_stride === range.other_stride;
    if (touches) last.nbytes += range.nbytes;
    else result.push({ ...range });
  }
  return result;
}

/**
 * The ranges of one object that the rank holds; is that all of it (`whole`), or does the rank's box
 * cut through it (`cut`: a layer isn't placed, or a component is held in part)?
 */
function objectPart(rank, map) {
  let whole = true;
  let cut = false;
  const ranges = map.layers.flatMap((stored) => {
    const layer = rank.layers.get(placeOf(stored.group, stored.layer));
    if (layer === undefined) {
      cut ||= stored.nbytes > 0n;
      return [];
    }
    const found = layer.components.flatMap(({ component, memory, block_stride }, index) => {
      const { box: shard, offset, nbytes: stored_nbytes } = stored.components[index];
      const packed = box(component, shard.heads, shard.tokens, offset);
      const shared = intersection(component, memory, packed);
      const held = shared.reduce((total, [, , nbytes]) => total + nbytes, 0n);
      whole &&= held === stored_nbytes;
      cut ||= 0n < held && held < stored_nbytes;
      return shared.map(([address, to, nbytes]) => ({
        address,
        offset: to,
        nbytes,
        block_stride,
        layer,
      }));
    });
    found.sort((a, b) => (a.offset < b.offset ? -1 : 1));
    return joined(found);
  });
  return { ranges, whole: whole && !cut, cut };
}

function checkLimits(limits, ranges) {
  const { max_rows, max_ranges, max_nbytes } = limits;
  require([max_rows, max_ranges, max_nbytes].every(
    (limit) => limit >= 1n,
  ), "plan_limit", "below 1");
  require(ranges.every(({ nbytes }) => nbytes <= max_nbytes), "plan_limit", "a range is too long");
}

/** Put (`isPut`: whole objects only) or get: for each object touched, a row for each block. */
export function planObjects(layout, rank, blocks, limits, isPut) {
  const objects = [];
  layout.objects.forEach((_, object_index) => {
    for (const shard of objectShards(layout, object_index)) {
      const map = objectMap(layout, object_index, shard);
      const { ranges, whole, cut } = objectPart(rank, map);
      if (ranges.length === 0) continue;
      for (const { layer, block_stride, address, nbytes } of ranges) {
        checkBounds(rank, layer, block_stride, address, nbytes);
      }
      require(!isPut || !cut, "plan_coverage", "the rank's box cuts through an object");
      if (isPut && !whole) continue;
      for (const { layer } of ranges) checkBlocks(layer, blocks);
      objects.push({ object_index, shard, ranges });
    }
  });
  if (limits !== null)
    checkLimits(
      limits,
      objects.flatMap(({ ranges }) => ranges),
    );
  return objects.map(({ object_index, shard, ranges }) => ({
    object_index,
    shard,
    rows: blocks.map((block) =>
      ranges.map(({ address, offset, nbytes, block_stride }) => [
        address + block * block_stride,
        offset,
        nbytes,
      ]),
    ),
  }));
}

/** Transfer between two ranks: for each layer with bytes on both sides, a row for each pair. */
export function planTransfer(source, target, source_blocks, target_blocks) {
  require(source_blocks.length ===
    target_blocks.length, "plan_bounds", "block ids differ in number");
  const layers = [];
  for (const [place, from] of source.layers) {
    const to = target.layers.get(place);
    if (to === undefined) continue;
    const shared = from.components.flatMap(({ component, memory, block_stride }, index) => {
      const other = to.components[index];
      return intersection(component, memory, other.memory).map(([address, offset, nbytes]) => ({
        address,
        block_stride,
        offset,
        other_stride: other.block_stride,
        nbytes,
      }));
    });
    if (shared.length === 0) continue;
    const ranges = joined(shared);
    for (const { address, block_stride, offset, other_stride, nbytes } of ranges) {
      checkBounds(source, from, block_stride, address, nbytes);
      checkBounds(target, to, other_stride, offset, nbytes);
    }
    checkBlocks(from, source_blocks);
    checkBlocks(to, target_blocks);
    const rows = source_blocks.map((block, index) =>
      ranges.map(({ address, block_stride, offset, other_stride, nbytes }) => [
        address + block * block_stride,
        offset + target_blocks[index] * other_stride,
        nbytes,
      ]),
    );
    layers.push({ group: from.group, layer: from.layer, rows });
  }
  return layers.sort((a, b) => a.group - b.group || a.layer - b.layer);
}
