// A client that shares only the .proto files with mmpos: node client.js ADDRESS PROTO GOLDEN
// prints the server's answers as JSON, and the cases of the golden file whose answers were wrong.
"use strict";

const fs = require("node:fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const { expand } = require("./table.js");

const [address, protoFolder, goldenFile] = process.argv.slice(2);

const files = ["info", "positions"].map((name) => `mmpos/rpc/v1/${name}.proto`);
const options = { includeDirs: [protoFolder], keepCase: true, longs: String, enums: String, oneofs: true, defaults: true };
const { v1 } = grpc.loadPackageDefinition(loader.loadSync(files, options)).mmpos.rpc;

const connect = (service) => new service(address, grpc.credentials.createInsecure());
const deadline = () => ({ deadline: Date.now() + 30000 });

function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, new grpc.Metadata(), deadline(), (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

// Return all answers to these requests, in order of arrival.
function stream(client, method, requests) {
  return new Promise((resolve, reject) => {
    const answers = [];
    const duplex = client[method](new grpc.Metadata(), deadline());
    duplex.on("data", (answer) => answers.push(answer));
    duplex.on("error", reject);
    duplex.on("end", () => resolve(answers));
    requests.forEach((request) => duplex.write(request));
    duplex.end();
  });
}

// Encode a batch of golden documents, all of one scheme, as a query.
function query(cases) {
  const parts = cases.flatMap((golden) => golden.document);
  const text = (part) => part[0] === "text";
  const scheme = { name: cases[0].scheme };
  if (cases[0].axes === 3 && scheme.name.startsWith("rope-tie")) scheme.axes = 3;
  const starts = cases.map((golden) => golden.start);
  const start = new Set(starts).size === 1 ? { start: starts[0] } : { start_per_document: starts };
  return {
    segments: {
      kind: parts.map((part) => (text(part) ? "SEGMENT_KIND_TEXT" : "SEGMENT_KIND_GRID")),
      frames: parts.map((part) => (text(part) ? 1 : part[1])),
      height: parts.map((part) => (text(part) ? 1 : part[2])),
      width: parts.map((part) => (text(part) ? part[1] : part[3])),
      segments_per_document: cases.map((golden) => golden.document.length),
    },
    scheme,
    ...start,
  };
}

// Return whether these positions equal the golden ones, id by id.
function equal(positions, cases) {
  const want = cases[0].position_ids.map((_, axis) => cases.flatMap((golden) => golden.position_ids[axis]));
  const next = cases.map((golden) => golden.next_position).filter((position) => position !== null);
  const got = expand(positions.table);
  return JSON.stringify([got, positions.next_positions]) === JSON.stringify([want, next]);
}

async function golden(client) {
  const cases = JSON.parse(fs.readFileSync(goldenFile, "utf8")).cases;
  const wrong = [];
  for (const [i, document] of cases.entries()) {
    const { positions } = await call(client, "Place", { query: query([document]) });
    if (!equal(positions, [document])) wrong.push(i);
  }
  return { cases: cases.length, wrong };
}

// Stream the golden documents again, one batch per scheme, with an invalid query among them.
async function batches(client) {
  const groups = new Map();
  for (const document of JSON.parse(fs.readFileSync(goldenFile, "utf8")).cases) {
    // Schemes without a next position accept only one start for all documents.
    const key = `${document.scheme} ${document.axes} ${document.next_position === null ? document.start : ""}`;
    groups.set(key, [...(groups.get(key) || []), document]);
  }
  const all = [...groups.values()];
  const requests = all.map((cases, i) => ({ id: i + 1, query: query(cases) }));
  requests.splice(2, 0, { id: "18446744073709551615", query: { spans: { lengths: [3], offsets: [1], grid_thw: [1, 2, 2] } } });
  const answers = await stream(client, "StreamPlace", requests);
  const errors = answers.filter((answer) => answer.outcome === "error");
  const right = answers.filter((answer) => answer.outcome === "positions" && equal(answer.positions, all[answer.id - 1]));
  return { ids: answers.map((answer) => answer.id), right: right.length, errors };
}

// Return the code and the message of an invalid call.
async function refusal(client) {
  const zero = { kind: ["SEGMENT_KIND_GRID"], height: [0], width: [2], segments_per_document: [1] };
  try {
    return await call(client, "Place", { query: { segments: zero } });
  } catch (error) {
    return { code: grpc.status[error.code], message: error.details };
  }
}

async function main() {
  const [info, positions] = [v1.InfoService, v1.PositionService].map(connect);
  const server = await call(info, "GetInfo", {});
  const summary = {
    version: server.version,
    schemes: server.schemes.map((scheme) => scheme.name),
    golden: await golden(positions),
    stream: await batches(positions),
    refusal: await refusal(positions),
  };
  [info, positions].forEach((client) => client.close());
  console.log(JSON.stringify(summary));
}

main();
