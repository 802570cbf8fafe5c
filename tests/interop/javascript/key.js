/** Keys (section 5). */
import { FormatError, require } from "./reason.js";
import { decodeUtf8, encodeUtf8, fromHex, toHex } from "./text.js";

const MAX_TEXT_NBYTES = 16384;
const MAX_KEY_CHARACTERS = 131072;
const PLAIN = /[A-Za-z0-9_-]/;
const TEXT = /^(?:~|(?:[A-Za-z0-9_-]|%[0-9A-F]{2})(?:[A-Za-z0-9_.-]|%[0-9A-F]{2})*)$/;

function formatText(text) {
  const bytes = encodeUtf8(text);
  require(bytes !== null, "key_text", "a surrogate without its pair");
  require(bytes.length <= MAX_TEXT_NBYTES, "key_text", `${bytes.length} bytes`);
  if (bytes.length === 0) return "~";
  const parts = Array.from(bytes, (byte, index) => {
    const character = String.fromCharCode(byte);
    if (PLAIN.test(character) || (character === "." && index > 0)) return character;
    return `%${byte.toString(16).toUpperCase().padStart(2, "0")}`;
  });
  return parts.join("");
}

function parseText(part) {
  require(TEXT.test(part), "key_text", `not a text: ${part.slice(0, 80)}`);
  if (part === "~") return "";
  const bytes = [];
  for (let at = 0; at < part.length; at += 1) {
    if (part[at] === "%") {
      bytes.push(parseInt(part.slice(at + 1, at + 3), 16));
      at += 2;
    } else {
      bytes.push(part.charCodeAt(at));
    }
  }
  const text = decodeUtf8(Uint8Array.from(bytes));
  require(text !== null, "key_text", "not UTF-8");
  require(formatText(text) === part, "key_text", "another spelling");
  return text;
}

function formatNamespace({ tenant, model, fingerprint }) {
  const texts = [tenant, model].map(formatText);
  require(fingerprint.length === 16, "key_fingerprint", `${fingerprint.length} bytes`);
  return ["kvformat1", ...texts, toHex(fingerprint), ""].join("/");
}

/** @returns {{key: string, prefix: string}} */
export function formatManifestKey(namespace) {
  const prefix = formatNamespace(namespace);
  return { key: `${prefix}manifest`, prefix };
}

/** @param parts {tenant, model, fingerprint, group_bitmap: BigInt, shard, block_hash} */
export function formatKey(parts) {
  const prefix = formatNamespace(parts);
  const { group_bitmap, shard, block_hash } = parts;
  require(0n < group_bitmap && group_bitmap < 2n ** 64n, "key_groups", `${group_bitmap}`);
  const index = (value) => {
    require(value <= 65535, "key_shard", `${value} is above 65535`);
    return value.toString(16).padStart(4, "0");
  };
  const place = `l${index(shard.layer)}h${index(shard.head)}c${index(shard.context)}`;
  require(1 <= block_hash.length && block_hash.length <= 64, "key_hash", "1 to 64 bytes");
  return `${prefix}g${group_bitmap.toString(16).padStart(16, "0")}/${place}/${toHex(block_hash)}`;
}

function match(pattern, part, reason) {
  const found = pattern.exec(part);
  if (found === null) throw new FormatError(reason, part.slice(0, 80));
  return found.slice(1);
}

/** K1 to K8; `digest_nbytes` is the layout's where it is known, else null. */
export function parseKey(key, digest_nbytes) {
  const tooLong = key.length > MAX_KEY_CHARACTERS && [...key].length > MAX_KEY_CHARACTERS;
  require(!tooLong, "key_length", "too long");
  const parts = key.split("/");
  const [major] = match(/^kvformat([1-9][0-9]{0,4})$/, parts[0], "key_format");
  require(major === "1", "key_version", `format ${major}`);
  const isManifest = parts.length === 5 && parts[4] === "manifest";
  require(isManifest || parts.length === 7, "key_format", `${parts.length} parts`);
  const tenant = parseText(parts[1]);
  const model = parseText(parts[2]);
  const fingerprint = fromHex(match(/^([0-9a-f]{32})$/, parts[3], "key_fingerprint")[0]);
  if (isManifest) return { kind: "manifest", tenant, model, fingerprint };
  const group_bitmap = BigInt(`0x${match(/^g([0-9a-f]{16})$/, parts[4], "key_groups")[0]}`);
  require(group_bitmap !== 0n, "key_groups", "no group");
  const place = /^l([0-9a-f]{4})h([0-9a-f]{4})c([0-9a-f]{4})$/;
  const [layer, head, context] = match(place, parts[5], "key_shard").map((hex) =>
    parseInt(hex, 16),
  );
  const block_hash = fromHex(match(/^((?:[0-9a-f]{2}){1,64})$/, parts[6], "key_hash")[0]);
  const known = digest_nbytes === null || block_hash.length === digest_nbytes;
  require(known, "key_hash", `the layout's hashes have ${digest_nbytes} bytes`);
  const shard = { layer, head, context };
  return { kind: "block", tenant, model, fingerprint, group_bitmap, shard, block_hash };
}
