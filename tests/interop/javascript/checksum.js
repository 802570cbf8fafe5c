/** XXH3 with 64 bits, seed 0 (section 6.5). */
import { createXXHash3 } from "hash-wasm";

const hasher = await createXXHash3(0, 0);

/** The checksum of bytes, as a BigInt. */
export function checksum(bytes) {
  // The digest in hex is the library's canonical, big-endian form: the number as it is read.
  return BigInt(`0x${hasher.init().update(bytes).digest("hex")}`);
}
