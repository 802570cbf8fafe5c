/**
 * JSON as section 4 wants it. JSON.parse is not enough: it keeps the last of two equal names,
 * rounds integers, takes `1.0` for 1 and lone surrogates for text. Objects become Maps, so that no
 * name has a meaning of its own; integers become BigInts.
 */
import { FormatError } from "./reason.js";
import { decodeUtf8 } from "./text.js";

const MAX_DEPTH = 32;
const MAX_INTEGER = 2n ** 53n - 1n;
const SPACE = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const INTEGER = /^-?(?:0|[1-9][0-9]{0,15})$/;
const PLAIN = /[^"\\\u0000-\u001f]*/y;
const UNIT = /[0-9a-fA-F]{4}/y;
const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };
const LITERALS = [
  ["true", true],
  ["false", false],
  ["null", null],
];

/** A number as it was written: rule M2 is about the whole text, rule M3 comes after it. */
class NumberText {
  constructor(text) {
    this.text = text;
  }
}

class Parser {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  fail(what) {
    throw new FormatError("manifest_json", `${what} at character ${this.at}`);
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found === null) return null;
    this.at += found[0].length;
    return found[0];
  }

  take(token) {
    if (!this.text.startsWith(token, this.at)) return false;
    this.at += token.length;
    return true;
  }

  need(token) {
    if (!this.take(token)) this.fail(`expected ${token}`);
  }

  document() {
    const value = this.value(0);
    if (this.at !== this.text.length) this.fail("more than one value");
    return value;
  }

  /** A value with the space around it. */
  value(depth) {
    this.match(SPACE);
    const value = this.bare(depth);
    this.match(SPACE);
    return value;
  }

  bare(depth) {
    if (this.take("{")) return this.object(depth + 1);
    if (this.take("[")) return this.array(depth + 1);
    if (this.take('"')) return this.string();
    for (const [token, value] of LITERALS) if (this.take(token)) return value;
    const number = this.match(NUMBER);
    return number === null ? this.fail("expected a value") : new NumberText(number);
  }

  /** An object after its opening brace, `depth` counting itself and what is around it. */
  object(depth) {
    if (depth > MAX_DEPTH) this.fail("nested too deep");
    const fields = new Map();
    this.match(SPACE);
    if (this.take("}")) return fields;
    do {
      this.match(SPACE);
      this.need('"');
      const name = this.string();
      if (fields.has(name)) this.fail("a name twice");
      this.match(SPACE);
      this.need(":");
      fields.set(name, this.value(depth));
    } while (this.take(","));
    this.need("}");
    return fields;
  }

  array(depth) {
    if (depth > MAX_DEPTH) this.fail("nested too deep");
    const items = [];
    this.match(SPACE);
    if (this.take("]")) return items;
    do items.push(this.value(depth));
    while (this.take(","));
    this.need("]");
    return items;
  }

  /** A string after its opening quote. */
  string() {
    let text = "";
    for (;;) {
      text += this.match(PLAIN);
      if (this.take('"')) return text;
      this.need("\\");
      text += this.escape();
    }
  }

  escape() {
    const letter = this.text[this.at++];
    if (letter !== "u") return ESCAPES[letter] ?? this.fail("unknown escape");
    const unit = this.unit();
    if ((unit & 0xf800) !== 0xd800) return String.fromCharCode(unit);
    if (unit >= 0xdc00 || !this.take("\\u")) this.fail("surrogate without its pair");
    const low = this.unit();
    if ((low & 0xfc00) !== 0xdc00) this.fail("surrogate without its pair");
    return String.fromCharCode(unit, low);
  }

  unit() {
    const digits = this.match(UNIT);
    return digits === null ? this.fail("expected four hex digits") : parseInt(digits, 16);
  }
}

function integers(value) {
  if (value instanceof NumberText) {
    const number = INTEGER.test(value.text) && value.text !== "-0" ? BigInt(value.text) : null;
    if (number === null || number > MAX_INTEGER || number < -MAX_INTEGER) {
      throw new FormatError(
        "manifest_number",
        `not an integer below 2^53: ${value.text.slice(0, 40)}`,
      );
    }
    return number;
  }
  if (value instanceof Map) {
    for (const [name, item] of value) value.set(name, integers(item));
  } else if (Array.isArray(value)) {
    value.forEach((item, index) => (value[index] = integers(item)));
  }
  return value;
}

/** Rules M2 and M3: the value of JSON bytes, as Map, Array, string, BigInt, boolean or null. */
export function parseJson(bytes) {
  const text = decodeUtf8(bytes);
  if (text === null) throw new FormatError("manifest_json", "not UTF-8");
  return integers(new Parser(text).document());
}

/** JSON text without spaces, an object's fields in their order. */
export function formatJson(value) {
  // JSON.stringify escapes a well-formed string exactly as section 4.1 says.
  if (typeof value === "string") return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(formatJson).join(",")}]`;
  if (!(value instanceof Map)) return String(value);
  const fields = [...value].map(([name, item]) => `${formatJson(name)}:${formatJson(item)}`);
  return `{${fields.join(",")}}`;
}

function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (!(value instanceof Map)) return value;
  const names = [...value.keys()].sort((a, b) => (a < b ? -1 : 1));
  return new Map(names.map((name) => [name, sorted(value.get(name))]));
}

/** Section 4.1: the canonical form, as bytes. */
export function canonicalJson(value) {
  return new TextEncoder().encode(formatJson(sorted(value)));
}
