meta:
  id: kvformat
  title: Object of a KV-cache block, format major 1
  file-extension: kv
  license: Apache-2.0
  ks-version: "0.10"
  endian: le
doc: |
  The header of an object and the ranges of its payload. What a byte of the payload means is said by
  the layout whose fingerprint the header gives, not by the object.

  This describes the structure. It does not verify checksums, nor the rules that compare fields with
  each other: a reader follows section 6.3 of kvformat.md.
doc-ref: kvformat.md section 6
seq:
  - id: magic
    contents: [0x8b, "KVF", 0x0d, 0x0a, 0x1a, 0x0a]
  - id: major
    type: u2
    valid: 1
  - id: minor
    type: u2
  - id: header_nbytes
    type: u4
    valid:
      expr: _ % 64 == 0 and _ >= 256 and _ <= 1048576
  - id: required_features
    type: bitmap64
  - id: optional_features
    type: bitmap64
  - id: fingerprint
    size: 16
  - id: object_nbytes
    type: u8
    doc: Below 2^53 in every object that a store can hold, so a double is enough.
  - id: write_id
    size: 16
  - id: group_bitmap
    type: bitmap64
  - id: num_tokens
    type: u4
  - id: layer_shard
    type: u2
  - id: head_shard
    type: u2
  - id: context_shard
    type: u2
  - id: hash_nbytes
    type: u1
    valid:
      min: 1
      max: 64
  - id: num_groups
    type: u1
  - id: num_ranges
    type: u4
  - id: block_hash
    size: hash_nbytes
  - id: block_hash_padding
    size: 64 - hash_nbytes
  - id: extension
    size: 32
  - id: directory
    type: group_entry
    repeat: expr
    repeat-expr: num_groups
  - id: completeness
    type: layer_bits(directory[_index].num_layers)
    repeat: expr
    repeat-expr: num_groups
  - id: offsets
    type: u8
    repeat: expr
    repeat-expr: num_ranges
  - id: sizes
    type: u8
    repeat: expr
    repeat-expr: num_ranges
  - id: checksums
    size: 8
    repeat: expr
    repeat-expr: num_ranges
    doc: XXH3-64 of each range, little-endian; as bytes, because they need all 64 bits.
  - id: padding
    size: header_nbytes - 8 - _io.pos
  - id: header_checksum
    size: 8
    doc: XXH3-64 of the bytes before, little-endian.
instances:
  ranges:
    type: range(offsets[_index], sizes[_index])
    repeat: expr
    repeat-expr: num_ranges
    doc: The payload, one (group, layer) after the other in the order of the directory.
types:
  bitmap64:
    doc: A u64, in two halves because not every language has integers of 64 bits.
    seq:
      - id: low
        type: u4
      - id: high
        type: u4
  group_entry:
    seq:
      - id: group
        type: u2
      - id: zero_1
        type: u2
        valid: 0
      - id: first_layer
        type: u4
      - id: num_layers
        type: u4
      - id: zero_2
        type: u4
        valid: 0
  layer_bits:
    doc: Byte floor(i/8), bit i mod 8 says that layer first_layer + i is complete.
    params:
      - id: num_layers
        type: u4
    seq:
      - id: bits
        size: (num_layers + 63) / 64 * 8
  range:
    params:
      - id: offset
        type: u8
      - id: nbytes
        type: u8
    instances:
      data:
        io: _root._io
        pos: offset
        size: nbytes
