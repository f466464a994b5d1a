// The tile walk: one tile of queries after the other stays on the chip while tiles of keys and
// values pass by, and a meter counts the bytes, beside those of a table of scores.
//
// The first half is arithmetic and needs no page; tests hold it against exact/tiled_attention.py,
// course/widgets/tiled_attention.py and course/costs.py. The second half draws.
//
// State: N queries, the last of M positions; tiles of BQ queries and BK keys.

// -- arithmetic --

export const D = 16; // width of a head
export const END = 256; // tiles, at most
const BYTES = 2; // of a number in bf16
const MOST = 64; // queries, and keys

// The tiles in the order of the walk. A query sees the keys up to its own position.
export function tiles({ N, M, tile_q: BQ, tile_k: BK, causal }) {
  const found = [];
  for (let q = 0; q < N; q += BQ) {
    const qEnd = Math.min(q + BQ, N);
    const [byFirst, byLast] = causal ? [M - N + q + 1, M - N + qEnd] : [M, M];
    for (let k = 0; k < M; k += BK) {
      const kEnd = Math.min(k + BK, M);
      const kind = k >= byLast ? "skipped" : kEnd <= byFirst ? "full" : "diagonal";
      found.push({ q, qEnd, k, kEnd, kind });
    }
  }
  return found;
}

// The tiles that are computed, each with the bytes that it moves, and those so far: of queries, of
// keys and values, and of `o` and `lse` (fp32), which a walk stores at its end.
export function meter(s) {
  const visited = tiles(s).filter((tile) => tile.kind !== "skipped"), so = { q: 0, kv: 0, out: 0 };
  return visited.map((tile, i) => {
    const rows = tile.qEnd - tile.q, isLast = (visited[i + 1]?.k ?? 0) === 0;
    const moves = {
      q: tile.k === 0 ? rows * D * BYTES : 0,
      kv: (tile.kEnd - tile.k) * 2 * D * BYTES,
      out: isLast ? rows * (D * BYTES + 4) : 0,
    };
    for (const part of Object.keys(so)) so[part] += moves[part];
    return { ...tile, moves, so: { ...so }, bytes: so.q + so.kv + so.out };
  });
}

// The bytes of dense attention: scores and weights, written and read.
export function table({ N, M }) {
  const parts = { q: N * D * BYTES, kv: 2 * M * D * BYTES, table: 4 * N * M * BYTES,
    out: N * D * BYTES };
  return { parts, bytes: Object.values(parts).reduce((a, b) => a + b, 0) };
}

export const settle = (state) => bringInto((s) => ({
  M: { low: 8, high: MOST },
  N: { low: 8, high: s.M },
  tile_q: { low: 4, high: MOST },
  tile_k: { low: 4, high: MOST },
  step: { low: 1, high: END },
  causal: [true, false],
}), state);

// What is drawn of a state: the readings of the meter, and the one that is shown.
export function look(s) {
  const readings = meter(s), step = Math.min(s.step, readings.length);
  return { readings, step, now: readings[step - 1], dense: table(s),
    skipped: tiles(s).length - readings.length };
}

// -- words --

const kib = (bytes) => (evenly(bytes / 102.4) / 10).toFixed(1);
const range = (from, end) => (end - from > 1 ? `${from} to ${end - 1}` : `${from}`);

export function sentence(s, { readings, step, now, dense, skipped }) {
  const seen = { full: "all of them seen", diagonal: "some of them hidden" }[now.kind];
  const told = `Tile ${step} of ${readings.length}: queries ${range(now.q, now.qEnd)} meet keys ` +
    `${range(now.k, now.kEnd)}, ${seen}. `;
  if (step < readings.length)
    return `${told}${kib(now.bytes)} of ${kib(readings.at(-1).bytes)} KiB moved so far; with the ` +
      `table it would be ${kib(dense.bytes)}.`;
  const left = `${skipped} ${skipped === 1 ? "tile" : "tiles"} skipped`;
  return `${told}${kib(now.bytes)} KiB moved, and ${left}; with the table it would be ` +
    `${kib(dense.bytes)}.`;
}

// -- drawing --

const STYLE = `
.nsa-tiles .body { display: grid; gap: 4px 26px; grid-template-columns: minmax(0, 1fr); }
@container (min-width: 660px) {
  .nsa-tiles .body { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
}
.nsa-tiles .drawn { cursor: crosshair; touch-action: pan-y; user-select: none; }
.nsa-tiles .body svg { height: auto; }
.nsa-tiles .said { min-height: 2.8em; font-variant-numeric: tabular-nums; }
@container (max-width: 699px) { .nsa-tiles .said { min-height: 5.6em; } }
`;
const LEFT = 48; // beside the matrix, and above it
const TOP = 44;
const HIGHEST = 400; // of the matrix
const PALE = 'opacity="0.31"'; // computed, then masked

const unit = (s, wide) => Math.min((wide - LEFT - 8) / s.M, HIGHEST / s.N);

// The matrix of queries and keys, `wide` pixels wide, and what stays and what passes by.
function drawnWalk(s, { readings, step, now }, wide, palette) {
  const { N, M } = s, u = unit(s, wide), { box, write, line, area, svg } = sheet(palette);
  const x = (key) => LEFT + key * u, y = (query) => TOP + query * u;
  const visits = new Map(readings.map((tile, i) => [`${tile.q} ${tile.k}`, i + 1]));
  for (const tile of tiles(s)) {
    const { q, qEnd, k, kEnd, kind } = tile, visit = visits.get(`${q} ${k}`);
    const place = [x(k), y(q), (kEnd - k) * u, (qEnd - q) * u];
    if (kind === "skipped") box(...place, "masked");
    else if (visit <= step && kind === "full") box(...place, "key");
    else if (visit <= step) {
      box(...place, "key", PALE);
      let seen = `M${x(k)} ${y(q)}`;
      for (let query = q; query < qEnd; query++) {
        const end = Math.min(Math.max(M - N + query + 1, k), kEnd);
        seen += `H${x(end)}v${u}`;
      }
      area(`${seen}H${x(k)}z`, "key");
    }
    line(`M${place[0]} ${place[1]}h${place[2]}v${place[3]}h${-place[2]}z`,
      kind === "skipped" ? "#ffffff" : "faint", 0.8);
    const middle = [place[0] + place[2] / 2, place[1] + place[3] / 2 + 4];
    const isRoomy = place[2] > 54 && place[3] > 36;
    if (visit <= step && place[2] > 21 && place[3] > 15)
      write(middle[0], middle[1] - (isRoomy ? 7 : 0), visit);
    if (isRoomy) write(middle[0], middle[1] + (kind === "skipped" ? 0 : 9), kind);
  }
  const here = [x(now.k), y(now.q), (now.kEnd - now.k) * u, (now.qEnd - now.q) * u];
  line(`M${here[0]} ${here[1]}h${here[2]}v${here[3]}h${-here[2]}z`, "query", 3);
  // what stays on the chip, and what passes by
  box(LEFT - 14, here[1], 9, here[3], "query");
  box(here[0], TOP - 14, here[2], 9, "key");
  const every = (size, room) => size * Math.ceil(room / (size * u)); // a number of each so many
  for (let q = 0; q < N; q += every(s.tile_q, 14)) write(LEFT - 18, y(q) + 11, q, "end");
  for (let k = 0; k < M; k += every(s.tile_k, 20)) write(x(k) + 2, TOP - 18, k, "start");
  write(x(0), 12, "keys and values pass by →", "start");
  write(12, y(0), "queries stay", "end", "text", `transform="rotate(-90 12 ${y(0)})"`);
  return svg(wide, Math.ceil(TOP + N * u + 8));
}

const PARTS = [["queries", "q", "query"], ["keys and values", "kv", "key"],
  ["scores and weights", "table", "text"], ["o and lse", "out", "faint"]];

// The bytes of both ways as bars, and the scores that exist at once.
function drawnMeter(s, { readings, now, dense }, wide, palette) {
  const { box, write, line, svg } = sheet(palette), total = readings.at(-1).bytes;
  const room = wide - 8, most = Math.max(dense.bytes, total), rows = [
    [`with the table: ${kib(dense.bytes)} KiB`, dense.parts, dense.bytes],
    [`by tiles: ${kib(now.bytes)} of ${kib(total)} KiB`, now.so, total],
  ];
  rows.forEach(([told, parts, all], i) => {
    const y = 30 + i * 56;
    let x = 2;
    write(2, y - 8, told, "start");
    for (const [, part, colour] of PARTS) {
      const long = ((parts[part] ?? 0) / most) * room;
      box(x, y, long, 24, colour);
      x += long;
    }
    line(`M2 ${y}h${(all / most) * room}v24h${(-all / most) * room}z`, "line");
  });
  const held = (now.qEnd - now.q) * (now.kEnd - now.k), pairs = s.N * s.M;
  write(2, 134, `scores at once: ${held} of the table's ${pairs.toLocaleString("en")}`, "start");
  box(2, 142, (held / pairs) * room, 12, "text");
  line(`M2 142h${room}v12h${-room}z`);
  const moved = [["loads queries", now.moves.q], ["loads keys and values", now.moves.kv],
    ["stores o and lse", now.moves.out]];
  write(2, 182, "this tile", "start", "text", 'font-weight="bold"');
  moved.forEach(([told, bytes], i) => {
    write(2, 202 + i * 18, told, "start", bytes ? "text" : "faint");
    write(190, 202 + i * 18, `${bytes.toLocaleString("en")} B`, "end", bytes ? "text" : "faint");
  });
  return svg(wide, 246);
}

function render({ model, el }) {
  const palette = model.get("palette");
  let s, now;
  const state = inStep(model, settle, (...told) => {
    [s] = told;
    draw();
  });
  // at the end of the walk, it stays there when the tiles change
  const change = (values) =>
    state.change(values.step >= now.readings.length ? { ...values, step: END } : values);
  const speech = speaker(), controls = controlsFor(change), { slider, flag } = controls;
  let first = 1;
  const restart = () => (first = now.step < now.readings.length ? now.step : 1);
  const play = player(restart, (passed, calm) => {
    const step = first + Math.floor(passed / (calm ? 1600 : 500));
    if (step !== now.step) change({ step });
    return step < now.readings.length;
  }, () => draw());
  const said = element("p", { class: "said" }), counted = element("div", {});
  const walk = element("div", { class: "drawn", tabindex: 0, role: "slider", onkeydown: press,
    "aria-label": "tiles computed, in the picture", "aria-valuemin": 1 });
  const names = [...PARTS.map(([told, , colour]) => [told, palette[colour]]),
    ["computed, then masked", `color-mix(in srgb, ${palette.key} 31%, white)`],
    ["skipped", palette.masked]];
  const legend = names.map(([told, colour]) =>
    element("span", { class: "swatch", style: `--colour:${colour}` }, told));
  const root = figureRoot("tiles", STYLE,
    element("div", { class: "bar" }, slider("step", "tile", 1, END),
      slider("tile_q", "queries a tile", 4, MOST), slider("tile_k", "keys a tile", 4, MOST),
      play.button),
    element("details", {}, element("summary", {}, "more"), element("div", { class: "more" },
      slider("N", "queries", 8, MOST), slider("M", "keys", 8, MOST),
      flag("causal", "causal mask"))),
    said, speech.live, element("div", { class: "body" }, walk, counted),
    element("div", { class: "actions" }, ...legend,
      ...savers(() => stacked(drawnWalk(s, now, 520, palette), drawnMeter(s, now, 520, palette)),
        () => `tiles_step${now.step}`)));
  el.replaceChildren(root);

  // the tile of a query and a key, or the last one before it that is computed
  function stepAt(query, key) {
    return now.readings.filter((tile) =>
      tile.qEnd <= query || (tile.q <= query && tile.k <= key)).length;
  }
  function press(event) {
    const by = keyed(event, { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1],
      ArrowDown: [0, 1], Home: [-END, 0], End: [END, 0] });
    if (by === null) return;
    play.stop();
    const { q, k } = now.now, below = Math.min(Math.max(q + by[1] * s.tile_q, 0), s.N - 1);
    const step = by[1] ? stepAt(below, k) : now.step + by[0];
    change({ step: within(step, 1, now.readings.length) });
  }
  drag(walk, (event) => {
    play.stop();
    const box = walk.getBoundingClientRect(), u = unit(s, box.width);
    const query = Math.floor((event.clientY - box.top - TOP) / u);
    const key = Math.floor((event.clientX - box.left - LEFT) / u);
    change({ step: stepAt(Math.min(Math.max(query, 0), s.N - 1), Math.max(key, 0)) });
  });

  function draw() {
    now = look(s);
    walk.innerHTML = drawnWalk(s, now, Math.max(walk.clientWidth, 300), palette);
    counted.innerHTML = drawnMeter(s, now, Math.max(counted.clientWidth, 300), palette);
    said.textContent = sentence(s, now);
    speech.say(said.textContent);
    walk.setAttribute("aria-valuenow", now.step);
    walk.setAttribute("aria-valuemax", now.readings.length);
    walk.setAttribute("aria-valuetext", said.textContent);
    controls.tell({ ...s, step: now.step }, { step: now.readings.length, N: s.M });
  }
  return begin(root, state, speech, play);
}

export default { render };
