// The mask explorer: what each branch of native sparse attention lets a query of a real text see,
// and at what price. Drag the query: the listed blocks jump.
//
// The first half is arithmetic, with that of heads.js, and needs no page; tests hold it against
// course/masks.py and course/costs.py. The second half draws. A model with get, set, on and
// save_changes holds the state: anywidget's in a notebook, page.js's on a page.
//
// Symbols: as in heads.js.

// -- arithmetic: the lists --

export const POWERS = [4, 8, 16, 32, 64, 128];
export const LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536];
export const KINDS = ["future", "not seen", "compressed", "window", "selected", "own block"];
const BYTES = 2; // of a number in fp16 or bf16
const TILE = 64; // queries of a dense kernel that share each load

// A number from 0 to 1 that depends on query and block alone: the score of a random slot.
export function chance(t, block) {
  let x = Math.imul(t * 4096 + block + 1, 2654435761);
  x = Math.imul(x ^ (x >>> 15), 2246822519);
  x = Math.imul(x ^ (x >>> 13), 3266489917);
  return ((x ^ (x >>> 16)) >>> 0) / 2 ** 32;
}

// Query t's list, from `importance` or at random; and those of all queries.
export function listOf(s, t, N, scores) {
  const first = t * Math.ceil(N / s.block_size);
  return choose(s, t, s.random ? (b) => chance(t, b) : (b) => scores[first + b]);
}
export const lists = (s, N, scores) =>
  Array.from({ length: N }, (_, t) => listOf(s, t, N, scores));

// -- arithmetic: what is seen --

// What query t's row shows, an index into KINDS for each of N keys. A kind covers those before it.
export function row(s, t, list, N, layers = s) {
  const found = new Uint8Array(N), BS = s.block_size, own = Math.floor(t / BS);
  found.fill(1, 0, t + 1);
  const n = visibleSummaries(t, s.length, s.stride);
  if (layers.compressed && n) found.fill(2, 0, (n - 1) * s.stride + s.length);
  if (layers.sliding) found.fill(3, Math.max(t + 1 - s.window, 0), t + 1);
  if (layers.selected)
    for (const b of list) found.fill(b === own ? 5 : 4, b * BS, Math.min((b + 1) * BS, t + 1));
  return found;
}

export function masks(s, listed, N, layers = s) {
  const found = new Uint8Array(N * N);
  for (let t = 0; t < N; t++) found.set(row(s, t, listed[t], N, layers), t * N);
  return found;
}

// The share of attention on keys that a list or the window shows one by one.
export function held(s, t, list, shares) {
  const seen = row(s, t, list, t + 1, { selected: true, sliding: true });
  return shares.reduce((sum, share, key) => sum + (seen[key] > 2 ? share : 0), 0);
}

// What query t loads through each branch.
export function loads(s, t, list) {
  const BS = s.block_size, keys = list.map((b) => Math.min((b + 1) * BS, t + 1) - b * BS);
  return {
    selected: keys.reduce((a, b) => a + b, 0),
    window: Math.min(s.window, t + 1),
    compressed: visibleSummaries(t, s.length, s.stride),
  };
}

// -- arithmetic: what it costs --

const triangle = (n) => (n * (n + 1)) / 2;

// Dense attention beside NSA in a text of N tokens, for one group of G heads. `one`: the last query
// loads these keys, and these bytes of keys and values. `all`: FLOPs and bytes of all queries. A
// dense kernel and the compressed branch share each load among TILE queries; lists and windows do
// not. The choice scores the summaries once more. Making summaries and gates is left out.
export function costs(s, { G, D }, N) {
  const BS = s.block_size, full = s.top_n * BS, rest = Math.max(N - full, 0);
  const late = Math.floor(rest / BS), own = late * triangle(BS) + triangle(rest % BS);
  const selected = triangle(Math.min(N, full)) + own + rest * (full - BS);
  const window = triangle(Math.min(N, s.window)) + s.window * Math.max(N - s.window, 0);
  const tiled = { keys: 0, pairs: 0 }, summed = { keys: 0, pairs: 0 };
  for (let start = 0; start < N; start += TILE) {
    const end = Math.min(start + TILE, N), queries = end - start;
    for (const [sum, keys] of [
      [tiled, Math.min(Math.ceil(end / TILE) * TILE, N)],
      [summed, visibleSummaries(end - 1, s.length, s.stride)],
    ]) {
      sum.keys += keys;
      sum.pairs += queries * keys;
    }
  }
  const io = N * G * (2 * D * BYTES + 4); // queries in, outputs and log-sum-exps out
  const pair = 2 * D * BYTES, list = 4 * N * s.top_n;
  const chosen = N * G * (D * BYTES + 4) + summed.keys * D * BYTES + list;
  const last = Math.floor((N - 1) / BS), blocks = Math.min(s.top_n, last + 1);
  const keys = visibleSummaries(N - 1, s.length, s.stride) + Math.min(s.window, N) +
    (blocks - 1) * BS + N - last * BS;
  return {
    one: { dense: { keys: N, bytes: N * pair }, nsa: { keys, bytes: keys * pair } },
    all: {
      dense: { flops: 4 * G * D * tiled.pairs, bytes: io + tiled.keys * pair },
      nsa: {
        flops: 4 * G * D * (selected + window + summed.pairs) + 2 * G * D * summed.pairs,
        bytes: 3 * io + (selected + window + summed.keys) * pair + list + chosen,
      },
    },
  };
}

// -- arithmetic: the controls --

// What each number may be, given those before it.
function ranges(s, N, groups) {
  const upTo = (low, high) => ({ low, high: Math.max(low, high) });
  return {
    query: upTo(0, N - 1),
    block_size: POWERS,
    top_n: upTo(1, 32),
    num_local: upTo(1, Math.min(8, s.top_n)),
    num_initial: upTo(0, Math.min(8, s.top_n - s.num_local)),
    window: upTo(1, 256),
    length: POWERS,
    stride: POWERS.filter((x) => x <= Math.min(s.length, s.block_size)),
    group: upTo(0, groups - 1),
    lens: LENGTHS,
  };
}

// The state brought into range, and what had to move, in words.
export function settle(state, N, groups) {
  const { s, moved } = bringInto((now) => ranges(now, N, groups), state);
  for (const name of ["compressed", "selected", "sliding", "random"]) s[name] = Boolean(s[name]);
  return { s, moved };
}

// -- words --

const count = (n, noun, many = `${noun}s`) => `${n.toLocaleString("en")} ${n === 1 ? noun : many}`;
const percent = (share) => `${Math.round(100 * share)}%`;

// A number in three digits at most: `640 B`, `1.5 KiB`, `12.3 k`.
export function amount(x, unit = "") {
  const base = unit ? 1024 : 1000, prefixes = ["", "k", "M", "G", "T"];
  let power = 0;
  for (; x >= 999.5 && power < 4; power++) x /= base;
  const prefix = unit && power ? `${prefixes[power].toUpperCase()}i` : prefixes[power];
  return `${x.toFixed(x >= 99.5 || !power ? 0 : x >= 9.95 ? 1 : 2)} ${prefix}${unit}`.trimEnd();
}

export function quote(text, t) {
  const marks = { " ": "␣", "\n": "↵", "\0": "·" };
  return [...text.slice(Math.max(t - 11, 0), t + 1)].map((c) => marks[c] ?? c).join("");
}

export function sentence(s, heads, list, shares, other) {
  const t = s.query, n = loads(s, t, list);
  const rest = s.random
    ? `slots chosen by the summaries would hold ${percent(held(s, t, other, shares))}`
    : `with random slots, ${percent(held(s, t, other, shares))}`;
  return `Query ${t} (the last byte of “${quote(heads.text, t)}”) loads ` +
    `${count(n.selected, "key")} of ${count(list.length, "block")}, ${n.window} of its window ` +
    `and ${count(n.compressed, "summary", "summaries")}. The keys hold ` +
    `${percent(held(s, t, list, shares))} of its attention; ${rest}.`;
}

// What the bytes of all queries say.
export function verdict(s, shape) {
  const { dense, nsa } = costs(s, shape, s.lens).all, times = nsa.bytes / dense.bytes;
  const factor = (x) => x.toFixed(x < 9.95 ? 1 : 0);
  if (times <= 1)
    return `All queries move ${factor(1 / times)} times fewer bytes than dense tiles.`;
  const from = LENGTHS.find((N) => {
    const all = costs(s, shape, N).all;
    return all.nsa.bytes <= all.dense.bytes;
  });
  return `All queries move ${factor(times)} times the bytes of dense tiles, because ${TILE} ` +
    "queries of a tile share each load and lists do not. " +
    (from ? `From ${from.toLocaleString("en")} tokens on, NSA moves fewer.`
      : "A longer text or a shorter list turns it round.");
}

// -- drawing --

const STYLE = `
.nsa-masks .body { display: grid; gap: 14px 26px; grid-template-columns: minmax(0, 1fr); }
@container (min-width: 700px) {
  .nsa-masks .body { grid-template-columns: minmax(0, 5fr) minmax(0, 6fr); }
  .nsa-masks .said { min-height: 2.8em; }
}
.nsa-masks .mask { position: relative; cursor: crosshair; touch-action: pan-y; }
.nsa-masks .mask canvas { aspect-ratio: 1; border: 1px solid #848D97; }
.nsa-masks .past { position: absolute; left: 0; height: 0; border-top: 2px solid #C75000;
  pointer-events: none; }
.nsa-masks .curtain { position: absolute; left: 1px; right: 1px; bottom: 1px; background: #FFF;
  pointer-events: none; }
.nsa-masks .handle { position: absolute; width: 44px; height: 44px; margin: -22px; cursor: grab;
  touch-action: none; }
.nsa-masks .handle::after { content: ""; position: absolute; inset: 14px; border-radius: 50%;
  background: #C75000; border: 2px solid #FFF; }
.nsa-masks .strip { height: 74px; margin-top: 8px; cursor: crosshair; touch-action: pan-y; }
.nsa-masks .actions [aria-pressed=false] { background: none; text-decoration: line-through; }
.nsa-masks .text { margin: 0; padding: 0; background: none; color: inherit; border: 0; cursor: text;
  font: 12px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  word-break: normal; touch-action: pan-y; user-select: none; overflow: visible; }
.nsa-masks table { border-collapse: collapse; width: 100%; margin: 6px 0; font-size: inherit; }
@container (max-width: 420px) { .nsa-masks table { font-size: 13px; } }
.nsa-masks :is(th, td) { padding: 2px 0 2px 10px; text-align: right; font-weight: 400; border: 0;
  background: none; font-variant-numeric: tabular-nums; }
.nsa-masks th:first-child { text-align: left; padding-left: 0; }
.nsa-masks td { white-space: nowrap; }
.nsa-masks td i { display: block; height: 5px; margin-left: auto; min-width: 1px; }
`;

// The colour of each of KINDS, the palette's; what only summaries show is paler.
function colours(palette) {
  const pale = mix(palette.compressed, 0.55);
  const { masked, window, selected } = palette;
  return [masked, "#ffffff", pale, window, selected, palette["own block"]];
}

function light(colour) {
  const [r, g, b] = rgb(colour).map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// A canvas of N by N, and what paints a mask on it, pixel by pixel.
function painter(N, shown) {
  const canvas = element("canvas", { width: N, height: N }), context = canvas.getContext("2d");
  const image = context.createImageData(N, N), pixels = new Uint32Array(image.data.buffer);
  const words = shown.map(rgb).map(([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0);
  return (found) => {
    for (let i = 0; i < pixels.length; i++) pixels[i] = words[found[i]];
    context.putImageData(image, 0, 0);
    return canvas;
  };
}

// What is drawn of a query's row: bars of attention over the keys' kinds, in a box `wide` by
// `high`; as rectangles [x, y, width, height, colour]. A bar is as high as the root of its share,
// so that small ones are seen. Gray bars are attention that is missed.
function bars(kinds, shares, N, wide, high, shown, missed) {
  const each = wide / N, top = Math.max(...shares, 0.02), room = high - 20, found = [];
  for (let start = 0, key = 1; key <= N; key++)
    if (key === N || kinds[key] !== kinds[start]) {
      found.push([start * each, high - 14, (key - start) * each, 14, shown[kinds[start]]]);
      start = key;
    }
  shares.forEach((share, key) => {
    const tall = Math.sqrt(share / top) * room;
    const colour = kinds[key] > 2 ? shown[kinds[key]] : missed;
    if (tall > 0.3) found.push([key * each, room + 2 - tall, Math.max(each, 1), tall, colour]);
  });
  return found;
}

const ROWS = [
  ["loaded by the last query", "one", "keys", (x) => x.toLocaleString("en")],
  ["the same in bytes", "one", "bytes", (x) => amount(x, "B")],
  ["FLOPs, all queries", "all", "flops", (x) => amount(x)],
  ["bytes, all queries", "all", "bytes", (x) => amount(x, "B")],
];
const LAYERS = [
  ["compressed", "compressed", 2], ["selected", "selected", 4], ["sliding", "window", 3],
];

function render({ model, el }) {
  const heads = decode(model.get("data")), palette = model.get("palette"), { N } = heads;
  const shown = colours(palette), paint = painter(N, shown);
  const settled = (values) => settle(values, N, heads.groups.length);
  let s, moved, base, curtain = false;
  const state = inStep(model, settled, (...now) => {
    [s, moved] = now;
    draw();
  });
  const { change, names } = state, speech = speaker(), controls = controlsFor(change);

  // what does not change with the query is kept until its own settings do
  const known = new Map();
  const keep = (name, key, make) => {
    if (known.get(name)?.key !== key) known.set(name, { key, made: make() });
    return known.get(name).made;
  };
  const ids = (fields) => fields.map((name) => s[name]).join();
  const score = ["group", "block_size", "length", "stride"];
  const scores = () => keep("scores", ids(score), () => importance(heads, s));
  const listed = () => keep("lists", ids([...score, "top_n", "num_initial", "num_local", "random"]),
    () => lists(s, N, scores()));

  // -- the page --

  const { slider, choice, flag } = controls;
  const powers = POWERS.map((x) => [x, x]);
  let first = 0;
  const play = player(() => {
    curtain = true;
    first = s.query < N - 1 ? s.query : 0;
  }, write, () => {
    curtain = false;
    draw();
  });
  const said = element("p", { class: "said" }), price = element("p", { class: "price" });
  const canvas = element("canvas", {
    tabindex: 0, role: "slider", "aria-label": "the mask, queries down and keys to the right",
    "aria-valuemin": 0, "aria-valuemax": N - 1, onkeydown: press });
  const past = element("div", { class: "past" }), handle = element("div", { class: "handle" });
  const veil = element("div", { class: "curtain" });
  const mask = element("div", { class: "mask" }, canvas, veil, past, handle);
  const strip = element("canvas", { class: "strip", role: "img" });
  const layers = LAYERS.map(([name, told, kind]) =>
    element("button", { type: "button", class: "swatch", style: `--colour:${shown[kind]}`,
      onclick: () => change({ [name]: !s[name] }) }, told));
  const legend = [["own block", 5], ["later", 0]].map(([told, kind]) =>
    element("span", { class: "swatch", style: `--colour:${shown[kind]}` }, told));
  const letters = [...heads.text].map((c, t) =>
    element("span", { "data-t": t }, c === "\n" ? "↵\n" : c === "\0" ? "·" : c));
  const text = element("pre", { class: "text", "aria-label": "the text" }, ...letters);
  const cells = ROWS.map(() => [0, 1, 2].map(() => element("td")));
  const table = element("table", {}, element("tr", {},
    ...["", "dense", "NSA", ""].map((name) => element("th", { scope: "col" }, name))),
    ...ROWS.map(([told], i) =>
      element("tr", {}, element("th", { scope: "row" }, told), ...cells[i])));
  const root = figureRoot("masks", STYLE,
    element("div", { class: "bar" },
      slider("query", "query", 0, N - 1), slider("top_n", "blocks", 1, 32),
      slider("window", "window", 1, 256), play.button),
    element("details", {}, element("summary", {}, "more"), element("div", { class: "more" },
      choice("block_size", "block size", powers),
      slider("num_initial", "first blocks, forced", 0, 8),
      slider("num_local", "latest blocks, forced", 1, 8),
      choice("length", "summary length", powers), choice("stride", "summary stride", powers),
      choice("group", "head group", heads.groups.map((group, i) => [i, group.label])),
      flag("random", "random slots"))),
    said, speech.live, element("div", { class: "actions" }, ...layers, ...legend),
    element("div", { class: "body" }, element("div", {}, mask, strip),
      element("div", {}, text,
        slider("lens", "a text of", 0, LENGTHS.length - 1, LENGTHS), table, price)),
    element("p", {}, "Queries run down, keys to the right. Below: the query's own row, and " +
      "its attention to each key. Gray bars are attention that it misses."),
    element("div", { class: "actions" }, ...savers(svg, () => `mask_query${s.query}`)));
  el.replaceChildren(root);

  // -- moves --

  function press(event) {
    const step = keyed(event, { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1,
      PageUp: -s.block_size, PageDown: s.block_size, Home: -N, End: N });
    if (step === null) return;
    play.stop();
    change({ query: within(s.query + step, 0, N - 1) });
  }

  function follow(target, place) {
    drag(target, (event) => {
      play.stop();
      const query = place(event);
      if (query !== null && query !== s.query) change({ query });
    });
  }
  const share = (value, low, size) =>
    Math.min(Math.max(Math.floor(((value - low) / size) * N), 0), N - 1);
  const downwards = (event) => {
    const box = canvas.getBoundingClientRect();
    return share(event.clientY, box.top, box.height);
  };
  follow(canvas, downwards);
  follow(handle, downwards);
  follow(strip, (event) => {
    const box = strip.getBoundingClientRect();
    return share(event.clientX, box.left, box.width);
  });
  follow(text, (event) => {
    const under = text.getRootNode().elementFromPoint(event.clientX, event.clientY);
    return under?.dataset?.t === undefined ? null : Number(under.dataset.t);
  });

  // Writes the mask row by row; where motion is unwelcome, block by block.
  function write(passed, calm) {
    const t = first + (calm ? Math.round(passed / 800) * s.block_size : Math.floor(passed / 16));
    change({ query: Math.min(t, N - 1) });
    return t < N - 1;
  }

  // -- the picture --

  function fit(target, high) {
    const ratio = devicePixelRatio || 1, wide = Math.max(target.clientWidth, 1);
    const [w, h] = [Math.round(wide * ratio), Math.round((high ?? wide) * ratio)];
    if (target.width !== w || target.height !== h) [target.width, target.height] = [w, h];
    return ratio;
  }

  function picture() {
    const t = s.query, list = listed()[t], shares = attention(heads, s.group, t);
    const other = listOf({ ...s, random: !s.random }, t, N, scores());
    return { list, shares, kinds: row(s, t, list, N), other };
  }

  function draw() {
    const t = s.query;
    const key = ids(names.filter((name) => name !== "query" && name !== "lens"));
    const image = keep("image", key, () => paint(masks(s, listed(), N)));
    fit(canvas);
    if (base !== `${key} ${canvas.width}`) {
      base = `${key} ${canvas.width}`;
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = canvas.width < 2 * N;
      context.drawImage(image, 0, 0, canvas.width, canvas.height);
    }
    const at = `${(100 * (t + 0.5)) / N}%`;
    Object.assign(past.style, { top: at, width: at });
    Object.assign(handle.style, { top: at, left: at });
    Object.assign(veil.style, { top: `${(100 * (t + 1)) / N}%`, display: curtain ? "" : "none" });

    const { list, shares, kinds, other } = picture();
    const ratio = fit(strip, 74), context = strip.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, strip.width, strip.height);
    for (const [x, y, w, h, colour] of bars(
      kinds, shares, N, strip.width / ratio, 74, shown, palette.line)) {
      context.fillStyle = colour;
      context.fillRect(x, y, w, h);
    }
    letters.forEach((letter, key) => {
      const kind = key === t ? "query" : kinds[key];
      if (letter.kind !== kind) dress(letter, kind);
    });

    said.textContent = sentence(s, heads, list, shares, other) +
      (moved.length ? ` Out of range: ${moved.join(", ")}.` : "");
    speech.say(said.textContent);
    canvas.setAttribute("aria-valuenow", t);
    canvas.setAttribute("aria-valuetext", `query ${t}, blocks ${list.join(", ")}`);
    strip.setAttribute("aria-label", `The row of query ${t}: its attention to each key, ` +
      `and what it sees of blocks ${list.join(", ")}`);
    tell();
  }

  function dress(letter, kind) {
    letter.kind = kind;
    const ground = kind === "query" ? palette.query : kind > 2 ? shown[kind] : "";
    letter.style.background = ground;
    letter.style.color = kind === 0 ? palette.faint : !ground ? ""
      : (light(ground) + 0.05) / 0.065 > 1.05 / (light(ground) + 0.05) ? palette.text : "#ffffff";
    letter.style.boxShadow = kind === 2 ? `inset 0 -2px ${shown[2]}` : "";
  }

  function tell() {
    layers.forEach((button, i) => button.setAttribute("aria-pressed", s[LAYERS[i][0]]));
    controls.tell(s, { num_local: Math.min(8, s.top_n),
      num_initial: Math.min(8, s.top_n - s.num_local) });
    const key = ids(names.filter((name) => name !== "query"));
    const found = keep("price", key, () => costs(s, heads, s.lens));
    ROWS.forEach(([, part, unit, words], i) => {
      const both = ["dense", "nsa"].map((name) => found[part][name][unit]);
      const most = Math.max(...both);
      both.forEach((value, j) => {
        const style = `width:${(100 * value) / most}%;background:${[palette.key, shown[4]][j]}`;
        cells[i][j].replaceChildren(words(value), element("i", { style }));
      });
      const times = both[0] / both[1], factor = Math.max(times, 1 / times);
      cells[i][2].textContent =
        `${factor.toFixed(factor < 9.95 ? 1 : 0)}× ${times >= 1 ? "less" : "more"}`;
    });
    price.textContent = keep("verdict", key, () => verdict(s, heads));
  }

  // -- to save --

  function svg() {
    const { list, shares, kinds, other } = picture(), words = [], side = 480;
    const image = known.get("image").made.toDataURL();
    let line = "";
    for (const word of sentence(s, heads, list, shares, other).split(" "))
      if (`${line} ${word}`.length > 76) (words.push(line), (line = word));
      else line = line ? `${line} ${word}` : word;
    words.push(line);
    const write = (x, y, told, colour = palette.text) =>
      `<text x="${x}" y="${y}" fill="${colour}">${escaped(told)}</text>`;
    const top = 20 + 18 * words.length, y = top + ((s.query + 0.5) / N) * side;
    const box = ([x, dy, w, h, colour]) =>
      `<rect x="${20 + x}" y="${top + side + 10 + dy}" width="${w}" height="${h}" ` +
      `fill="${colour}"/>`;
    const legend = LAYERS.map(([, told, kind], i) =>
      `<rect x="${20 + 130 * i}" y="${top + side + 96}" width="12" height="12" ` +
      `fill="${shown[kind]}"/>` + write(38 + 130 * i, top + side + 107, told));
    return `<svg xmlns="http://www.w3.org/2000/svg" width="520" height="${top + side + 122}" ` +
      `role="img" font-family="sans-serif" font-size="13"><rect width="100%" height="100%" ` +
      `fill="#fff"/>${words.map((told, i) => write(20, 26 + 18 * i, told)).join("")}` +
      `<image x="20" y="${top}" width="${side}" height="${side}" href="${image}"/>` +
      `<path d="M20 ${y}h${((s.query + 1) / N) * side}" stroke="${palette.query}" ` +
      'stroke-width="2"/>' +
      bars(kinds, shares, N, side, 74, shown, palette.line).map(box).join("") +
      `${legend.join("")}</svg>`;
  }

  return begin(root, state, speech, play);
}

export default { render };
