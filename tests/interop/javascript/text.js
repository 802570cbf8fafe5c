/** Bytes and text: hex, strict UTF-8, text that is Unicode. */
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const encoder = new TextEncoder();

/** The text of UTF-8 bytes, a leading U+FEFF included; null if they are not UTF-8. */
export function decodeUtf8(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return null;
  }
}

/** The UTF-8 of a text; null if it has a surrogate without its pair. */
export function encodeUtf8(text) {
  const bytes = encoder.encode(text);
  // TextEncoder writes U+FFFD for a lone surrogate, so only such a text doesn't come back.
  return strict.decode(bytes) === text ? bytes : null;
}

export function toHex(bytes) {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString("hex");
}

export function fromHex(text) {
  if (!/^(?:[0-9a-f]{2})*$/.test(text)) throw new TypeError("not lowercase hex of whole bytes");
  return new Uint8Array(Buffer.from(text, "hex"));
}

export function sameBytes(a, b) {
  return a.length === b.length && Buffer.compare(a, b) === 0;
}
