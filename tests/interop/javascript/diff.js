/** The fields in which two layouts differ (section 4.4), from manifests as JSON values. */
import { formatJson } from "./json.js";

/** A side that lacks the field. */
const ABSENT = null;

const shown = (value) => {
  if (value === undefined) return ABSENT;
  return Array.isArray(value) || value instanceof Map ? formatJson(value) : value;
};

const without = (map, ...names) => new Map([...map].filter(([name]) => !names.includes(name)));

const both = (a, b) => new Set([...a.keys(), ...b.keys()]);

/** Differences of two objects, entering the objects in them. */
function* diffFields(path, a, b) {
  for (const name of both(a, b)) {
    const [left, right] = [a.get(name), b.get(name)];
    const inner = path === "" ? name : `${path}.${name}`;
    if (left instanceof Map && right instanceof Map) {
      yield* diffFields(inner, left, right);
    } else if (a.has(name) !== b.has(name) || shown(left) !== shown(right)) {
      yield { path: inner, a: shown(left), b: shown(right) };
    }
  }
}

/** What is compared of the components of a layer, by their names: sizes by axis, no nbytes. */
function byName(components) {
  const comparable = (component) => {
    const axes = component.get("axes");
    const sizes = new Map(axes.map((axis, index) => [axis, component.get("sizes")[index]]));
    return new Map([
      ["dtype", component.get("dtype")],
      ["axes", axes],
      ["sizes", sizes],
    ]);
  };
  return new Map(components.map((component) => [component.get("name"), comparable(component)]));
}

/** Differences of two layers, with paths that begin after the layer's. */
function* diffLayer(a, b) {
  if (a === undefined || b === undefined) {
    yield { path: "", a: a?.get("name") ?? ABSENT, b: b?.get("name") ?? ABSENT };
    return;
  }
  if (a.get("name") !== b.get("name")) yield { path: ".name", a: a.get("name"), b: b.get("name") };
  const [left, right] = [byName(a.get("components")), byName(b.get("components"))];
  for (const name of both(left, right)) {
    const path = `.components[${name}]`;
    const [one, other] = [left.get(name), right.get(name)];
    if (one !== undefined && other !== undefined) yield* diffFields(path, one, other);
    else yield { path, a: shown(one), b: shown(other) };
  }
  const orders = [left, right].map((components) => [...components.keys()].join(", "));
  if (orders[0] !== orders[1]) yield { path: ".component_order", a: orders[0], b: orders[1] };
}

/** Differences of the layers of a group; equal ones of consecutive layers are one. */
function* diffLayers(path, a, b) {
  const found = [];
  const open = new Map();
  for (let index = 0; index < Math.max(a.length, b.length); index += 1) {
    for (const difference of diffLayer(a[index], b[index])) {
      const key = formatJson([
        difference.path,
        typeof difference.a,
        difference.a,
        typeof difference.b,
        difference.b,
      ]);
      const run = open.get(key);
      if (run?.last === index - 1) {
        run.last = index;
      } else {
        const started = { ...difference, first: index, last: index };
        open.set(key, started);
        found.push(started);
      }
    }
  }
  for (const { path: field, a: left, b: right, first, last } of found) {
    const indices = first === last ? first : `${first}..${last}`;
    yield { path: `${path}.layers[${indices}]${field}`, a: left, b: right };
  }
}

/** @returns {[{path: string, a, b}]}; integers are BigInts. */
export function diffManifests(a, b) {
  const found = [...diffFields("", without(a, "groups"), without(b, "groups"))];
  const [left, right] = [a.get("groups"), b.get("groups")];
  for (let index = 0; index < Math.max(left.length, right.length); index += 1) {
    const path = `groups[${index}]`;
    const [one, other] = [left[index], right[index]];
    if (one === undefined || other === undefined) {
      found.push({ path, a: one?.get("kind") ?? ABSENT, b: other?.get("kind") ?? ABSENT });
    } else {
      found.push(...diffFields(path, without(one, "layers"), without(other, "layers")));
      found.push(...diffLayers(path, one.get("layers"), other.get("layers")));
    }
  }
  return found;
}
