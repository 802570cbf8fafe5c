/** Manifests and fingerprints (section 4): M1 to M8. */
import { createHash } from "node:crypto";
import { canonicalJson, parseJson } from "./json.js";
import { checkLayout } from "./layout.js";
import { FormatError, require } from "./reason.js";
import { sameBytes } from "./text.js";

const SCHEMA = "kvformat/1";
const MAX_MANIFEST_NBYTES = 16777216;

const wrongType = (path, type) => {
  throw new FormatError("manifest_field", `${path}: expected ${type}`);
};
const text = (value, path) => (typeof value === "string" ? value : wrongType(path, "text"));
const int = (value, path) => (typeof value === "bigint" ? value : wrongType(path, "an integer"));
const list = (item) => (value, path) =>
  Array.isArray(value)
    ? value.map((entry, index) => item(entry, `${path}[${index}]`))
    : wrongType(path, "a list");

/** An object with exactly these fields, as a plain object. */
const object = (fields) => (value, path) => {
  if (!(value instanceof Map)) return wrongType(path, "an object");
  for (const name of value.keys()) {
    if (!Object.hasOwn(fields, name)) throw new FormatError("manifest_field", `${path}: ${name}`);
  }
  const entries = Object.entries(fields).map(([name, type]) => [
    name,
    type(value.get(name), `${path}.${name}`),
  ]);
  return Object.fromEntries(entries);
};

/** The only object with names of its own; it stays a Map. */
const config = (value, path) => {
  if (!(value instanceof Map)) return wrongType(path, "an object");
  for (const [name, setting] of value) {
    if (!["string", "bigint", "boolean"].includes(typeof setting)) {
      wrongType(`${path}.${name}`, "text, an integer or a boolean");
    }
  }
  return value;
};

const component = object({
  name: text,
  dtype: text,
  axes: list(text),
  sizes: list(int),
  nbytes: int,
});
const layer = object({ name: text, components: list(component) });
const group = object({ kind: text, block_size: int, window: int, layers: list(layer) });
const layout = object({
  schema: text,
  identity: object({ tenant: text, model: text, weights: text, adapter: text, config }),
  hash: object({ algorithm: text, seed: text, block_size: int, digest_nbytes: int }),
  groups: list(group),
  objects: list(list(int)),
  grid: object({
    head_shards: int,
    context_shards: int,
    context_interleave: int,
    layer_starts: list(list(int)),
  }),
});

const fingerprintOf = (bytes) =>
  new Uint8Array(createHash("sha256").update(bytes).digest().subarray(0, 16));

/**
 * M1 to M6: a layout given by a person, in any spelling.
 * @returns {{layout, manifest: Uint8Array, fingerprint: Uint8Array,
 *   contentFingerprint: Uint8Array}}
 */
export function readDocument(bytes) {
  require(bytes.length <= MAX_MANIFEST_NBYTES, "manifest_json", `${bytes.length} bytes`);
  const value = parseJson(bytes);
  const schema = value instanceof Map ? value.get("schema") : undefined;
  require(typeof schema === "string", "manifest_field", "no schema");
  require(schema === SCHEMA, "layout_schema", `expected ${SCHEMA}, found ${schema}`);
  const checked = checkLayout(layout(value, "layout"));
  const manifest = canonicalJson(value);
  const content = new Map(value);
  content.delete("grid");
  return {
    layout: checked,
    manifest,
    fingerprint: fingerprintOf(manifest),
    contentFingerprint: fingerprintOf(canonicalJson(content)),
  };
}

/** M1 to M8: a stored manifest; `expected` is the fingerprint of its namespace, or null. */
export function readManifest(bytes, expected = null) {
  const found = readDocument(bytes);
  require(sameBytes(found.manifest, bytes), "manifest_canonical", "not the canonical form");
  const same = expected === null || sameBytes(expected, found.fingerprint);
  require(same, "manifest_fingerprint", "manifest of another namespace");
  return found;
}
