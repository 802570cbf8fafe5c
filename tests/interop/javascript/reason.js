/** A rule of the specification that does not hold; `reason` is its code from registry.md. */
export class FormatError extends Error {
  constructor(reason, message, place = {}) {
    super(`${reason}: ${message}`);
    this.reason = reason;
    this.place = place;
  }
}

/** Throws a FormatError unless `holds`. */
export function require(holds, reason, message) {
  if (!holds) throw new FormatError(reason, message);
}
