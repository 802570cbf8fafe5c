/** Boxes of a component in memory or in an object, and what two of them share (section 7.2). */
import { byteAxes } from "./shards.js";

/** Strides of a box without gaps, in bytes, by the sizes of its axes. */
export function packedStrides(sizes, element_nbytes) {
  const strides = [];
  let stride = element_nbytes;
  for (let axis = sizes.length - 1; axis >= 0; axis -= 1) {
    strides[axis] = stride;
    stride *= sizes[axis];
  }
  return strides;
}

/** A box: the heads `[start, stop)` and tokens (DealtTokens) it holds, its base and its strides. */
export function box(component, heads, tokens, base, strides = null) {
  const { sizes, element_nbytes } = byteAxes(component);
  const counts = component.axes.map((axis, index) => {
    if (axis === "head") return heads.stop - heads.start;
    return axis === "token" ? tokens.count : sizes[index];
  });
  return { heads, tokens, base, strides: strides ?? packedStrides(counts, element_nbytes) };
}

/** The pairs of places [in a, in b] of the indices that both boxes hold on an axis. */
function sharedPlaces(axis, size, a, b) {
  const pairs = [];
  if (axis === "head") {
    const start = a.heads.start > b.heads.start ? a.heads.start : b.heads.start;
    const stop = a.heads.stop < b.heads.stop ? a.heads.stop : b.heads.stop;
    for (let head = start; head < stop; head += 1n) {
      pairs.push([head - a.heads.start, head - b.heads.start]);
    }
  } else if (axis === "token") {
    for (let place = 0n; place < a.tokens.count; place += 1n) {
      const other = b.tokens.placeOf(a.tokens.at(place));
      if (other >= 0n) pairs.push([place, other]);
    }
  } else {
    for (let index = 0n; index < size; index += 1n) pairs.push([index, index]);
  }
  return pairs;
}

/**
 * The ranges [offset in a, offset in b, nbytes] of the elements in both boxes, ascending in the
 * component's axis order; neighbours that touch on both sides are joined.
 */
export function intersection(component, a, b) {
  const { sizes, element_nbytes } = byteAxes(component);
  const { axes } = component;
  // A component without an axis is in a box where its index 0 is.
  for (const axis of ["head", "token"]) {
    if (!axes.includes(axis) && sharedPlaces(axis, 1n, a, b).length === 0) return [];
  }
  let depth = axes.length;
  let chunk = element_nbytes;
  const isWhole = (index) =>
    axes[index] !== "head" &&
    axes[index] !== "token" &&
    (sizes[index] === 1n || (a.strides[index] === chunk && b.strides[index] === chunk));
  while (depth > 0 && isWhole(depth - 1)) chunk *= sizes[--depth];

  const places = axes.slice(0, depth).map((axis, index) => sharedPlaces(axis, sizes[index], a, b));
  const ranges = [];
  const walk = (axis, from, to) => {
    if (axis < depth) {
      for (const [p, q] of places[axis])
        walk(axis + 1, from + p * a.strides[axis], to + q * b.strides[axis]);
      return;
    }
    const last = ranges.at(-1);
    if (last !== undefined && last[0] + last[2] === from && last[1] + last[2] === to)
      last[2] += chunk;
    else ranges.push([from, to, chunk]);
  };
  walk(0, a.base, b.base);
  return ranges;
}
