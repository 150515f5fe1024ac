// Usage: reader.js FOLDER. Read the vectors with node alone, and compare them with the three schemes implemented here.
const { createHash } = require("node:crypto");
const { readFileSync } = require("node:fs");

const AXES = { flatten: 1, "rope-tie": 2, mrope: 3 };
const range = (start, stop) => Array.from({ length: stop - start }, (_, n) => start + n);

// Return the ids of a grid, and the next position.
function grid(scheme, cursor, [frames, height, width]) {
  const places = range(0, frames * height * width).map((n) => [
    Math.floor(n / (height * width)), Math.floor(n / width) % height, n % width]);
  if (scheme === "mrope") return [places.map((p) => p.map((x) => cursor + x)), cursor + Math.max(frames, height, width)];
  if (scheme === "flatten") return [places.map((_, n) => [cursor + n]), cursor + places.length];
  const [before, row, column] = [cursor - 1, width + 1, height + 1]; // rope-tie
  return [places.map(([, i, j]) => [before + row * (i + 1), before + column * (j + 1)]), before + row * column];
}

// Return the ids of a document, and the next position.
function place(scheme, { start, segments }) {
  let [ids, cursor] = [[], start];
  for (const part of segments) {
    const text = range(cursor, cursor + (part.text ?? 0)).map((id) => Array(AXES[scheme]).fill(id));
    const [own, following] = part.text ? [text, cursor + part.text] : grid(scheme, cursor, part.grid);
    [ids, cursor] = [[...ids, ...own], following];
  }
  return [ids, cursor];
}

// Return the ids that answer a case, axis by axis.
function answer(scheme, documents, { ask, document = 0, start, stop, steps, length, keep, side }) {
  const byAxis = (tokens) => range(0, AXES[scheme]).map((axis) => tokens.map((token) => token[axis]));
  const placed = documents.map((parts) => place(scheme, parts));
  const [ids, following] = placed[document];
  const at = (n) => ids[n] ?? Array(AXES[scheme]).fill(following + n - ids.length);
  if (ask === "packed") return byAxis(placed.flatMap(([own]) => own));
  if (ask === "padded") {
    const rows = placed.map(([own]) => {
      const gap = Array(length - own.length).fill(Array(AXES[scheme]).fill(null));
      return byAxis(side === "left" ? [...gap, ...own] : [...own, ...gap]);
    });
    return range(0, AXES[scheme]).map((axis) => rows.map((row) => row[axis]));
  }
  const chosen = { prefill: [0, ids.length], chunk: [start, stop], decode: [ids.length, ids.length + steps],
    draft: [start, start + length] };
  return byAxis((keep ?? range(...chosen[ask])).map(at));
}

const [folder, counts] = [process.argv[2], { true: 0, false: 0 }];
for (const [path, digest] of Object.entries(JSON.parse(readFileSync(`${folder}/manifest.json`)).files)) {
  const data = readFileSync(`${folder}/${path}`);
  if (createHash("sha256").update(data).digest("hex") !== digest) throw Error(`${path}: the checksum differs from the manifest`);
  for (const { scheme, documents, cases } of data.toString().trimEnd().split("\n").map((line) => JSON.parse(line))) {
    if (!(scheme?.name in AXES) || JSON.stringify([scheme.parameters, documents]).match(/axes|row_separator/)) continue;
    for (const { want, ...question } of cases.filter(({ ask }) => ask !== "rotation")) {
      counts[JSON.stringify(answer(scheme.name, documents, question)) === JSON.stringify(want.position_ids)] += 1;
    }
  }
}
console.log(`${counts.true} the same, ${counts.false} different`);
