// Draw the answers of mmpos. The page computes no ids: each change sends a new request.
"use strict";

const $ = (id) => document.getElementById(id);
const state = JSON.parse($("state").textContent);
const served = state.answer === null;
let request = state.request;
let answer = null;
let asked = 0;
let selected = 0;

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const element = (tag, properties = {}, ...children) => {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...children);
  return created;
};

// Requests. Only the answer to the last request is shown.

async function ask(change) {
  const next = { ...request, ...change };
  for (const name of Object.keys(next)) if (next[name] === null) delete next[name];
  const number = ++asked;
  let body;
  try {
    const response = await fetch("view", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(next),
    });
    body = await response.json();
  } catch {
    body = { error: "No answer from mmpos: is the command still running?" };
  }
  if (number !== asked) return;
  fail(body.error);
  if (body.error) return;
  if (body.parts) { // later requests change the parts, whatever the document was typed as
    next.parts = body.parts;
    delete next.spec;
  }
  request = next;
  show(body);
}

function fail(message) {
  $("error").hidden = !message;
  $("error").textContent = message || "";
}

// Send at most twenty requests per second, and always one for the last change.
const askSoon = (() => {
  let waiting = null;
  return (change) => {
    if (!waiting) setTimeout(() => {
      const last = waiting;
      waiting = null;
      ask(last);
    }, 50);
    waiting = { ...waiting, ...change };
  };
})();

const ofParts = (parts) => ({ parts, spec: null, input_ids: null, config: null, image_grid_thw: null });

// The document and its schemes.

function colourOf(segment) {
  if (answer.segments[segment].kind === "text") return style("--faint");
  const images = answer.segments.slice(0, segment).filter((before) => before.kind !== "text").length;
  return COLOURS[images % COLOURS.length];
}

const KINDS = ["text", "image", "video", "audio run", "clip", "thumbnail", "tile"]; // the order of counts and legend

// List the kinds of segments in the document, each with the indices of its segments.
function kinds() {
  const byKind = new Map(KINDS.map((kind) => [kind, []]));
  answer.segments.forEach(({ kind }, segment) => byKind.get(kind).push(segment));
  return [...byKind].filter(([, segments]) => segments.length);
}

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// Describe the document: "3,2x3,2: 11 tokens, 1 image".
function summary() {
  const counts = kinds().filter(([kind]) => kind !== "text").map(([kind, segments]) => counted(segments.length, kind));
  const sizes = [counted(answer.tokens, "token"), ...counts].join(", ");
  return answer.spec ? `${answer.spec}: ${sizes}` : sizes;
}

// Explain the symbols of the charts; the segments of a kind may have several colours.
function legend() {
  return kinds().map(([kind, segments]) => {
    const colours = [...new Set(segments.map(colourOf))];
    const marks = colours.map((colour) => {
      const mark = element("span", { className: kind === "text" ? "mark round" : "mark" });
      mark.style.background = colour;
      return mark;
    });
    return element("span", { className: "entry" }, ...marks, segments.length > 1 && kind !== "text" ? `${kind}s` : kind);
  });
}

function segmentOf(token) {
  return answer.segments.findLastIndex((segment) => segment.first <= token);
}

let shapes = ""; // kind and number of sides of each part on the page, as JSON
let items = []; // list item and update function of each part on the page

function showParts() {
  const parts = answer.parts;
  if (document.activeElement !== $("spec")) $("spec").value = (parts && answer.spec) || "";
  const newShapes = JSON.stringify((parts || []).map((part) => Object.entries(part).map(([name, value]) => [name, [value].flat().length])));
  if (newShapes !== shapes) {
    let images = 0;
    const colour = (part) => ("text" in part ? style("--faint") : COLOURS[images++ % COLOURS.length]);
    items = (parts || []).map((part, i) => partItem(part, i, colour(part)));
    $("parts").replaceChildren(...items.map(({ item }) => item));
    shapes = newShapes;
  }
  // update() does not change the focused input and the dragged drawing.
  (parts || []).forEach((part, i) => items[i].update([Object.values(part)[0]].flat()));
}

function partItem(part, i, colour) {
  const kind = Object.keys(part)[0];
  const values = [part[kind]].flat();
  const name = kind === "grid" ? (values.length === 3 ? "video" : "image") : kind;
  const labels = values.length === 1 ? ["tokens"] : ["frames", "rows", "columns"].slice(-values.length);
  const inputs = values.map((value, k) => {
    const input = element("input", { type: "number", min: 1, value, ariaLabel: `${name} ${i + 1}, ${labels[k]}` });
    input.addEventListener("input", () => input.value > 0 && resize(i, { [k]: Number(input.value) }));
    return input;
  });
  const remove = element("button", { type: "button", ariaLabel: `Remove ${name} ${i + 1}`, textContent: "✕" });
  remove.addEventListener("click", () => request.parts.length > 1 && ask(ofParts(request.parts.filter((_, k) => k !== i))));
  const row = element("div", { className: "row" }, name, ...inputs.flatMap((input, k) => (k ? ["×", input] : [input])), remove);
  const drawing = kind === "grid" ? grip(i, values.length) : null;
  const item = element("li", {}, row, ...(drawing ? [drawing.svg] : []));
  item.style.setProperty("--colour", colour);
  const update = (sides) => {
    inputs.forEach((input, k) => document.activeElement !== input && (input.value = sides[k]));
    drawing?.update(...sides.slice(-2));
  };
  return { item, update };
}

// Change sides of a part; sides maps the index of each changed side to its new value.
function resize(part, sides) {
  const parts = structuredClone(request.parts);
  const kind = Object.keys(parts[part])[0];
  if (Array.isArray(parts[part][kind])) Object.assign(parts[part][kind], sides);
  else parts[part][kind] = sides[0];
  askSoon(ofParts(parts));
}

// Draw an image with a corner that resizes it when dragged; the number inputs do the same for the keyboard.
function grip(part, sides) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  const corner = document.createElementNS("http://www.w3.org/2000/svg", "path");
  corner.setAttribute("class", "corner");
  svg.setAttribute("class", "grip");
  svg.setAttribute("aria-hidden", "true");
  svg.append(path, corner);
  let cell = 0;
  let dragged = false;
  const update = (rows, columns) => {
    if (!dragged) cell = Math.max(1.5, Math.min(8, 160 / Math.max(rows, columns)));
    const [height, width] = [rows * cell, columns * cell];
    svg.setAttribute("width", width + 10);
    svg.setAttribute("height", height + 10);
    const gap = cell > 3 ? 1 : 0;
    let d = "";
    for (let y = 0; y < rows; y++) for (let x = 0; x < columns; x++)
      d += `M${x * cell} ${y * cell}h${cell - gap}v${cell - gap}h${gap - cell}z`;
    path.setAttribute("d", d);
    corner.setAttribute("d", `M${width + 9} ${height - 3}V${height + 9}H${width - 3}`);
  };
  svg.addEventListener("pointerdown", (down) => {
    svg.setPointerCapture(down.pointerId);
    dragged = true;
    const { left, top } = svg.getBoundingClientRect();
    svg.onpointermove = (event) => {
      const rows = Math.min(256, Math.max(1, Math.round((event.clientY - top - 5) / cell)));
      const columns = Math.min(256, Math.max(1, Math.round((event.clientX - left - 5) / cell)));
      update(rows, columns);
      resize(part, { [sides - 2]: rows, [sides - 1]: columns });
    };
    svg.onpointerup = svg.onpointercancel = () => {
      dragged = false;
      svg.onpointermove = svg.onpointerup = svg.onpointercancel = null;
      showParts();
    };
  });
  return { svg, update: (rows, columns) => dragged || update(rows, columns) };
}

function makeSchemes() {
  for (let i = 0; i < 3; i++) {
    const select = element("select", { ariaLabel: `Scheme ${i + 1}` });
    if (i) select.append(element("option", { value: "", textContent: "none" }));
    for (const name of state.schemes) select.append(element("option", { value: name, textContent: name }));
    select.value = request.schemes[i] || "";
    select.addEventListener("change", () => {
      const chosen = [...$("schemes").querySelectorAll("select")].map(({ value }) => value).filter(Boolean);
      ask({ schemes: [...new Set(chosen)] });
    });
    $("schemes").append(select);
  }
}

async function addPictures(files) {
  const parts = structuredClone(request.parts || []);
  for (const file of files) {
    try {
      const picture = await createImageBitmap(file);
      parts.push({ picture: [picture.height, picture.width] });
      picture.close();
    } catch {
      return fail(`${file.name} is not an image that this browser can read`);
    }
  }
  ask(ofParts(parts));
}

// The panels.

function show(newAnswer) {
  answer = newAnswer;
  selected = Math.min(selected, answer.tokens - 1);
  if (served) selected = answer.token;
  $("token").max = answer.tokens - 1;
  $("token").value = selected;
  $("pair").max = answer.pairs - 1;
  $("summary").textContent = summary();
  showParts();
  draw();
}

function view() {
  return document.querySelector("input[name=view]:checked").value;
}

function draw() {
  $("token-number").textContent = `${selected} of ${answer.tokens}`;
  const sentences = answer.schemes.map((scheme) => [scheme.label, scheme.sentences[selected]]);
  $("sentences").replaceChildren(
    ...sentences.map(([label, sentence]) => element("p", {}, element("strong", { textContent: `${label}: ` }), sentence || "")),
  );
  $("pair-label").hidden = view() !== "phases" || !served;
  $("pair-number").textContent = answer.schemes[0].pair.index;
  $("legend").hidden = !["plane", "phases", "scores"].includes(view());
  $("legend").replaceChildren(...legend());
  const panels = answer.schemes.map((scheme, i) => {
    const panel = $(`panel-${i}`) || element("article", { id: `panel-${i}`, className: "panel" });
    const end = scheme.next === null ? "no next position" : `next position ${scheme.next}, delta ${scheme.delta}`;
    const title = element("h2", { textContent: scheme.label });
    panel.replaceChildren(title, element("p", { className: "facts", textContent: `axes ${scheme.axes.join(", ")}; ${end}` }));
    return panel;
  });
  $("panels").replaceChildren(...panels);
  panels.forEach((panel, i) => VIEWS[view()](panel, answer.schemes[i]));
}

function chart(panel, traces, layout, className = "chart") {
  const target = element("div", { className });
  panel.append(target);
  const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true };
  Plotly.newPlot(
    target,
    traces,
    {
      margin: { l: 44, r: 12, t: 12, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style("--ink"), size: 13 },
      showlegend: false,
      hovermode: "closest",
      ...layout,
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
    },
    { displayModeBar: false, responsive: true },
  );
  target.on("plotly_click", ({ points }) => {
    const token = points[0].customdata;
    if (Number.isInteger(token)) select(token);
  });
  return target;
}

const written = (scheme, token) => (scheme.exact || scheme.ids).map((axis) => axis[token]).join(", ");
const tokens = () => [...Array(answer.tokens).keys()];
const colours = () => tokens().map((token) => colourOf(segmentOf(token)));

function points(scheme, x, y, hover) {
  const symbols = tokens().map((token) => (answer.segments[segmentOf(token)].kind === "text" ? "circle" : "square"));
  const all = {
    x, y, mode: "markers", type: "scatter", customdata: tokens(), text: hover, hoverinfo: "text",
    marker: { color: colours(), symbol: symbols, size: 8, opacity: 0.85 },
  };
  const ring = {
    x: [x[selected]], y: [y[selected]], mode: "markers", type: "scatter", hoverinfo: "skip",
    marker: { symbol: "circle-open", size: 16, color: style("--ink"), line: { width: 2.5 } },
  };
  return [all, ring];
}

function plane(panel, scheme) {
  const hover = tokens().map((token) => `token ${token}: ${written(scheme, token)}`);
  const last = scheme.axes.length - 1;
  const [x, y] = last ? [scheme.ids[last], scheme.ids[last - 1]] : [tokens(), scheme.ids[0]];
  const [xTitle, yTitle] = last ? [`${scheme.axes[last]} id`, `${scheme.axes[last - 1]} id`] : ["token", "id"];
  chart(panel, points(scheme, x, y, hover), {
    xaxis: { title: { text: xTitle } },
    yaxis: { title: { text: yTitle }, autorange: last ? "reversed" : true },
  });
}

// Draw one map with a row per axis and a column per token, then the maps of the selected token's image or frame.
function maps(panel, scheme) {
  const scale = { colorscale: "Viridis", showscale: false };
  const hover = scheme.axes.map((name) => tokens().map((token) => `token ${token}: ${written(scheme, token)}`));
  chart(
    panel,
    [{ type: "heatmap", z: scheme.ids, y: scheme.axes, text: hover, hoverinfo: "text",
       customdata: scheme.axes.map(tokens), ...scale, showscale: true, colorbar: { thickness: 10 } }],
    { xaxis: { title: { text: "token" } }, yaxis: { autorange: "reversed", type: "category" } },
    "chart strip",
  );
  const inside = answer.segments[segmentOf(selected)];
  const grid = inside.kind !== "text" && inside.height * inside.width * inside.frames === inside.length
    ? inside : answer.segments.find((part) => part.kind !== "text" && part.height * part.width * part.frames === part.length);
  if (!grid) return;
  const area = grid.height * grid.width;
  const frame = grid === inside ? Math.floor((selected - grid.first) / area) : 0;
  const first = grid.first + frame * area;
  const rows = (values) => [...Array(grid.height).keys()].map((y) => values.slice(first + y * grid.width, first + (y + 1) * grid.width));
  scheme.ids.forEach((ids, axis) => {
    const text = rows((scheme.exact || scheme.ids)[axis]);
    const title = `${scheme.axes[axis]} ids of the ${grid.kind === "video" ? `video's frame ${frame}` : "image"} at token ${grid.first}`;
    chart(
      panel,
      [{ type: "heatmap", z: rows(ids), text, texttemplate: area <= 200 ? "%{text}" : "", hoverinfo: "text",
         customdata: rows(tokens()), ...scale }],
      { title: { text: title, font: { size: 13 } }, margin: { l: 44, r: 12, t: 36, b: 24 },
        yaxis: { autorange: "reversed", dtick: Math.ceil(grid.height / 8) }, xaxis: { dtick: Math.ceil(grid.width / 8) } },
      "chart strip",
    );
  });
}

function phases(panel, scheme) {
  const { axis, inv_freq: frequency, phases: values, index } = scheme.pair;
  const hover = tokens().map((token) => `token ${token}: ${values[token].toFixed(3)} rad`);
  const title = `pair ${index} rotates by ${frequency.toPrecision(4)} rad per ${axis} id`;
  chart(panel, points(scheme, tokens(), values, hover), {
    title: { text: title, font: { size: 13 } },
    margin: { l: 44, r: 12, t: 36, b: 40 },
    xaxis: { title: { text: "token" } },
    yaxis: { title: { text: "phase in rad" }, range: [-0.2, 6.5], tickvals: [0, Math.PI / 2, Math.PI, 1.5 * Math.PI, 2 * Math.PI],
      ticktext: ["0", "π/2", "π", "3π/2", "2π"] },
  });
}

function scores(panel, scheme) {
  const from = answer.token; // the query of the scores
  const distances = tokens().map((token) => token - from);
  const hover = tokens().map((token) => `token ${token}: ${scheme.scores[token].toFixed(3)}`);
  chart(panel, points(scheme, distances, scheme.scores, hover), {
    title: { text: `mean cosine over pairs between<br>token ${from} and every token`, font: { size: 13 } },
    margin: { l: 44, r: 12, t: 52, b: 40 },
    xaxis: { title: { text: "distance in tokens" } },
    yaxis: { title: { text: "score by position alone" } },
  });
}

function ids(panel, scheme) {
  const head = element("tr", {}, ...["token", ...scheme.axes].map((name) => element("th", { scope: "col", textContent: name })));
  const rows = tokens().map((token) => {
    const cells = (scheme.exact || scheme.ids).map((axis) => element("td", { textContent: axis[token] }));
    const row = element("tr", {}, element("th", { scope: "row", textContent: token }), ...cells);
    if (token === selected) row.ariaCurrent = "true";
    row.addEventListener("click", () => select(token));
    return row;
  });
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  panel.append(element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: `ids of ${scheme.label}` }, table));
}

function python(panel, scheme) {
  const code = element("pre", { tabIndex: 0, textContent: scheme.python });
  const copy = element("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(scheme.python);
      copy.textContent = "Copied";
    } catch { // browsers may deny the clipboard to local files
      getSelection().selectAllChildren(code);
      copy.textContent = "Selected";
    }
  });
  panel.append(copy, code);
}

const VIEWS = { plane, maps, phases, scores, ids, python };

function select(token) {
  selected = token;
  $("token").value = token;
  if (served) askSoon({ token });
  else draw();
}

// Events.

$("token").addEventListener("input", () => {
  $("token-number").textContent = `${$("token").value} of ${answer.tokens}`;
  select(Number($("token").value));
});
$("pair").addEventListener("input", () => {
  $("pair-number").textContent = $("pair").value;
  askSoon({ pair: Number($("pair").value) });
});
$("views").addEventListener("change", (event) => event.target.name === "view" && draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

if (served) {
  makeSchemes();
  $("spec-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask({ ...ofParts(null), spec: $("spec").value });
  });
  $("ids-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const values = {};
    for (const name of ["input_ids", "config", "image_grid_thw"]) {
      const text = event.target.elements[name].value.trim();
      try {
        values[name] = text ? JSON.parse(text) : null;
      } catch {
        return fail(`${name} is not valid JSON`);
      }
    }
    ask({ ...ofParts(null), ...values });
  });
  for (const button of document.querySelectorAll("[data-add]"))
    button.addEventListener("click", () => ask(ofParts([...(request.parts || []), JSON.parse(button.dataset.add)])));
  $("pictures").addEventListener("change", () => addPictures($("pictures").files));
  for (const name of ["dragover", "dragleave", "drop"])
    document.addEventListener(name, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer.files.length) addPictures(event.dataTransfer.files);
    });
  ask({});
} else {
  document.body.classList.add("kept");
  selected = state.answer.token;
  show(state.answer);
}
