// Compiles a Kaitai Struct, then parses the objects given in hex, one a line of standard input.
// Answers one line of JSON each: the fields, or {"error": text}.
// Usage: node parse.js FILE.ksy [--header]; with --header the payload isn't read.
"use strict";

const fs = require("node:fs");
const yaml = require("js-yaml");
const compiler = require("kaitai-struct-compiler");
const KaitaiStream = require("kaitai-struct/KaitaiStream");

const hex = (bytes) => Buffer.from(bytes).toString("hex");
const u64 = ({ low, high }) => ((BigInt(high) << 32n) | BigInt(low)).toString();

async function compiled(path) {
  const files = await compiler.compile("javascript", yaml.load(fs.readFileSync(path, "utf8")), null, false);
  const module = { exports: {} };
  new Function("exports", "module", "require", Object.values(files)[0])(module.exports, module, require);
  return module.exports.Kvformat;
}

function completeLayers(entry, bits) {
  return Array.from({ length: entry.numLayers }, (_, i) => i)
    .filter((i) => (bits[i >> 3] >> (i & 7)) & 1)
    .map((i) => entry.firstLayer + i);
}

function fields(object, withPayload) {
  return {
    minor: object.minor,
    header_nbytes: object.headerNbytes,
    required_features: u64(object.requiredFeatures),
    optional_features: u64(object.optionalFeatures),
    fingerprint: hex(object.fingerprint),
    object_nbytes: String(object.objectNbytes),
    write_id: hex(object.writeId),
    group_bitmap: u64(object.groupBitmap),
    num_tokens: object.numTokens,
    shard: { layer: object.layerShard, head: object.headShard, context: object.contextShard },
    block_hash: hex(object.blockHash),
    extension: hex(object.extension),
    groups: object.directory.map((entry, index) => ({
      group: entry.group,
      first_layer: entry.firstLayer,
      num_layers: entry.numLayers,
      complete: completeLayers(entry, object.completeness[index].bits),
    })),
    offsets: object.offsets.map(String),
    sizes: object.sizes.map(String),
    checksums: object.checksums.map((bytes) => Buffer.from(bytes).readBigUInt64LE().toString()),
    header_checksum: hex(object.headerChecksum),
    ranges: withPayload ? object.ranges.map((range) => hex(range.data)) : null,
  };
}

async function main([path, option]) {
  const Kvformat = await compiled(path);
  const lines = fs.readFileSync(0, "ascii").split("\n").slice(0, -1);
  for (const line of lines) {
    let answer;
    try {
      const data = Buffer.from(line, "hex");
      answer = fields(new Kvformat(new KaitaiStream(data)), option !== "--header");
    } catch (error) {
      answer = { error: `${error.name ?? ""} ${error.message ?? error}` };
    }
    console.log(JSON.stringify(answer));
  }
}

main(process.argv.slice(2));
