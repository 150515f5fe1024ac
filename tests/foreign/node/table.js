// Expand a placed table to ids as table.proto specifies, for any scheme.
"use strict";

// Node only runs on little-endian platforms; the copy is needed because a Buffer may be unaligned.
const int64s = (bytes) => new BigInt64Array(new Uint8Array(bytes).buffer);

const gcd = (a, b) => (b === 0n ? a : gcd(b, a % b));

function ratio(numerator, denominator) {
  const size = numerator < 0n ? -numerator : numerator;
  const common = gcd(size, denominator);
  const whole = denominator === common;
  return whole ? `${numerator / common}` : `${numerator / common}/${denominator / common}`;
}

// Return the ids of all tokens, one list of exact numbers per axis.
function expand(table) {
  const rows = int64s(table.table);
  const segments = rows.length / (5 + 4 * table.axes);
  const at = (row, s) => rows[row * segments + s];
  const ids = Array.from({ length: table.axes }, () => []);
  for (let g = 0n, s = 0; g < BigInt(table.num_tokens); g += 1n) {
    while (s + 1 < segments && at(0, s + 1) <= g) s += 1;
    const i = at(1, s) + g - at(0, s);
    const [height, width] = [at(2, s), at(3, s)];
    const [frame, row, col] = [i / width / height, (i / width) % height, i % width];
    ids.forEach((axis, a) => {
      const [origin, stepFrame, stepRow, stepCol] = [5, 6, 7, 8].map((r) => at(r + 4 * a, s));
      axis.push(ratio(origin + frame * stepFrame + row * stepRow + col * stepCol, at(4, s)));
    });
  }
  return ids;
}

module.exports = { expand, int64s };
