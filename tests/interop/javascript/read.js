/**
 * Reads an object as a file store keeps it, with its manifest, verifies everything and prints it.
 *
 *     node read.js MANIFEST_FILE OBJECT_FILE [--json]
 *
 * Ends with 0 if all is well, 1 if something was refused (with its reason code), 2 for usage.
 */
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { decodeHeader } from "./header.js";
import { readManifest } from "./manifest.js";
import { identifyObject, readPayload } from "./object.js";
import { FormatError } from "./reason.js";
import { toHex } from "./text.js";

function readObjectFile(manifest, object) {
  const { layout, fingerprint } = readManifest(manifest);
  const header = decodeHeader(object);
  const { object_index, map } = identifyObject(header, layout, fingerprint, true);
  const components = readPayload(object, header, map).map(({ data, ...place }) => ({
    ...place,
    nbytes: data.length,
    sha256: createHash("sha256").update(data).digest("hex"),
  }));
  const ranges = map.layers.map(({ group, layer, offset, nbytes }, index) => ({
    group,
    layer,
    offset,
    nbytes,
    checksum: header.checksums[index],
  }));
  const { offsets, sizes, checksums, has_checksums, ...fixed } = header;
  return { object_index, header: fixed, ranges, components };
}

/** Integers that a double holds are JSON integers here; the few that can be larger are text. */
const jsonValue = (name, value) => {
  if (value instanceof Uint8Array) return toHex(value);
  if (typeof value !== "bigint") return value;
  if (name === "checksum") return value.toString(16).padStart(16, "0");
  return value <= Number.MAX_SAFE_INTEGER ? Number(value) : String(value);
};

function printText({ object_index, header, ranges, components }) {
  const lines = [`object ${object_index}`];
  for (const [name, value] of Object.entries(header)) {
    lines.push(`${name}: ${JSON.stringify(jsonValue(name, value), jsonValue)}`);
  }
  for (const { group, layer, offset, nbytes, checksum } of ranges) {
    lines.push(
      `range ${group}/${layer}: ${nbytes} bytes at ${offset}, ${jsonValue("checksum", checksum)}`,
    );
  }
  for (const { group, layer, component, nbytes, sha256 } of components) {
    lines.push(`component ${group}/${layer}/${component}: ${nbytes} bytes, sha256 ${sha256}`);
  }
  return lines.join("\n");
}

function main(args) {
  const asJson = args.includes("--json");
  const paths = args.filter((arg) => arg !== "--json");
  if (paths.length !== 2 || paths.some((path) => path.startsWith("--"))) {
    console.error("usage: node read.js MANIFEST_FILE OBJECT_FILE [--json]");
    return 2;
  }
  let files;
  try {
    files = paths.map((path) => new Uint8Array(readFileSync(path)));
  } catch (error) {
    console.error(error.message);
    return 2;
  }
  try {
    const found = readObjectFile(...files);
    console.log(asJson ? JSON.stringify(found, jsonValue) : printText(found));
    return 0;
  } catch (error) {
    if (!(error instanceof FormatError)) throw error;
    const refused = { reason: error.reason, ...error.place };
    console.log(asJson ? JSON.stringify(refused) : error.message);
    return 1;
  }
}

process.exitCode = main(process.argv.slice(2));
