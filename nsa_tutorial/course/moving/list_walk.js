// The list walk: one program of selected attention, a query of a trained model with its list, block
// by block, and what it holds after each slot. Drag the query through the text.
//
// The first half is arithmetic and needs no page; tests hold it against the PyTorch twin that
// course/widgets/tilelang_forward.py traces. The second half draws.
//
// Symbols: N positions, H KV heads, G query heads of a group, D width of keys and of values, BS
// keys of a block, S slots of a list.

// -- arithmetic --

const BYTES = 2; // of a number in fp16
const LOG2_E = Math.log2(Math.E);

// Numbers in fp16, as base64.
function halves(base64) {
  const letters = atob(base64), found = new Float64Array(letters.length / 2);
  for (let i = 0; i < found.length; i++) {
    const bits = letters.charCodeAt(2 * i) | (letters.charCodeAt(2 * i + 1) << 8);
    const exponent = (bits >> 10) & 31, rest = (bits & 1023) / 1024;
    const size = exponent ? (1 + rest) * 2 ** (exponent - 15) : rest * 2 ** -14;
    found[i] = bits >> 15 ? -size : size;
  }
  return found;
}

// `q` [N, H * G, D], `k` and `v` [N, H, D] as numbers, the lists [N][H][S], and the sizes.
export function decode({ q, k, v, ...rest }) {
  return { ...rest, N: rest.text.length, S: rest.ids[0][0].length, q: halves(q), k: halves(k),
    v: halves(v) };
}

const dot = (a, i, b, j, D) => {
  let sum = 0;
  for (let d = 0; d < D; d++) sum += a[i + d] * b[j + d];
  return sum;
};

// What program (token, head) holds at the end of each slot, [S]: the tiles' rows that it loads,
// scores in nats and weights [G][BS], statistics [G] and the output's numerator [G][D].
export function walk(given, token, head) {
  const { H, G, D, BS } = given, scale = D ** -0.5, steps = [];
  let before = Array(G).fill(-Infinity), sums = Array(G).fill(0);
  let acc_o = Array.from({ length: G }, () => new Float64Array(D));
  for (const block of given.ids[token][head]) {
    const start = block * BS, last = Math.min(start + BS, token + 1, given.N);
    const seen = block < 0 ? 0 : Math.max(last - start, 0);
    const row = (tensor, key) => tensor.subarray((key * H + head) * D, (key * H + head + 1) * D);
    const rows = (tensor) => Array.from({ length: seen }, (_, i) => row(tensor, start + i));
    const k_tile = rows(given.k), v_tile = rows(given.v);
    const scores = before.map((_, g) => Array.from({ length: BS }, (_, i) =>
      i < seen ? dot(given.q, ((token * H + head) * G + g) * D, k_tile[i], 0, D) * scale
        : -Infinity));
    const maxima = scores.map((of_head, g) => Math.max(before[g], ...of_head));
    const shift = maxima.map((x) => (x === -Infinity ? 0 : x)); // -inf - -inf would be NaN
    const factors = before.map((x, g) => 2 ** ((x - shift[g]) * LOG2_E));
    const weights = scores.map((of_head, g) => of_head.map((x) => 2 ** ((x - shift[g]) * LOG2_E)));
    sums = sums.map((x, g) => x * factors[g] + weights[g].reduce((a, b) => a + b, 0));
    acc_o = acc_o.map((of_head, g) => of_head.map((x, d) =>
      v_tile.reduce((sum, v, i) => sum + weights[g][i] * v[d], x * factors[g])));
    steps.push({ block, seen, k_tile, v_tile, scores, weights, scores_max_prev: before,
      scores_max: maxima, scores_scale: factors, running_sum: sums, acc_o });
    before = maxima;
  }
  return steps;
}

// The bytes of this program so far, those of its whole list, and those of all keys that it sees.
export function bytes({ G, D }, steps, slot, token) {
  const key = 2 * D * BYTES, q = G * D * BYTES, all = (n) => n * key;
  const seen = steps.map((step) => step.seen), sum = (a, b) => a + b;
  return { q, so: all(seen.slice(0, slot + 1).reduce(sum, 0)), list: all(seen.reduce(sum, 0)),
    dense: all(token + 1), out: G * (D * BYTES + 4) };
}

export const settle = (given) => (state) => bringInto(() => ({
  token: { low: 0, high: given.N - 1 },
  head: { low: 0, high: given.H - 1 },
  slot: { low: 0, high: given.S - 1 },
}), state);

// -- words --

const grouped = (x) => x.toLocaleString("en");

export function sentence({ BS }, { token, head, slot }, step, cost) {
  const at = `Program (token ${token}, KV head ${head}), slot ${slot}: `;
  const { block, seen, running_sum: sums } = step;
  const paid = ` So far ${grouped(cost.so)} B of keys and values; all that it sees would be ` +
    `${grouped(cost.dense)} B.`;
  const why = block < 0 ? "an empty slot" : `block ${block} lies in the future`;
  if (!seen)
    return `${at}${why}. Nothing is seen, every factor is 1, the sums stay as they were.${paid}`;
  const raised = sums.filter((_, g) => step.scores_max[g] > step.scores_max_prev[g]).length;
  return `${at}block ${block}, keys ${block * BS} to ${block * BS + BS - 1}, of which ${seen} ` +
    `${seen === 1 ? "is" : "are"} seen. The maximum rises in ${raised} of ${sums.length} heads; ` +
    `the denominators are now ${sums.map((x) => x.toFixed(2)).join(", ")}.${paid}`;
}

// -- drawing --

const STYLE = `
.nsa-list_walk .body { display: grid; gap: 4px 26px; grid-template-columns: minmax(0, 1fr); }
@container (min-width: 660px) {
  .nsa-list_walk .body { grid-template-columns: minmax(0, 5fr) minmax(0, 7fr); }
}
.nsa-list_walk .drawn { touch-action: pan-y; user-select: none; cursor: pointer; }
.nsa-list_walk .drawn { position: relative; }
.nsa-list_walk .drawn svg { height: auto; position: relative; }
.nsa-list_walk .drawn canvas { position: absolute; left: 0; top: 0; height: auto; }
.nsa-list_walk .said { min-height: 4.2em; font-variant-numeric: tabular-nums; }
@container (max-width: 699px) { .nsa-list_walk .said { min-height: 7em; } }
`;
const LEFT = 52; // beside the text
const LINE = 24; // of the text, a block each
const TOP = 24;

// From a number, -1 to 1, to its colour: orange, white, blue.
function shades(palette) {
  const known = Array.from({ length: 65 }, (_, i) =>
    mix(palette[i < 32 ? "query" : "selected"], Math.abs(i / 32 - 1)));
  return (x) => known[Math.round(32 * (x + 1))];
}

const SIGNS = { " ": "␣", "\n": "↵", "\0": "·" };
const letters = (text) => [...text].map((c) => SIGNS[c] ?? c).join("");
const places = (left, each, n) =>
  Array.from({ length: n }, (_, i) => (left + (i + 0.5) * each).toFixed(1)).join(" ");
const place = (given, wide) => (wide - LEFT - 4) / given.BS;

// The text, a block in each line, and the bytes of the row.
function drawnText(given, s, steps, cost, wide, palette) {
  const { BS, N, D, text } = given, each = place(given, wide), lines = Math.ceil(N / BS);
  const { box, write, line, svg } = sheet(palette);
  const slots = new Map(steps.map(({ block }, slot) => [block, slot]));
  write(LEFT, 14, "the text, a block in each line", "start");
  for (let block = 0; block < lines; block++) {
    const y = TOP + block * LINE, slot = slots.get(block);
    write(LEFT - 6, y + 16, `block ${block}`, "end", "text",
      slot === undefined ? "" : 'font-weight="bold"');
    const kind = (t) => {
      const isLoaded = slot <= s.slot && t <= s.token;
      return t === s.token ? "query" : isLoaded ? (slot === s.slot ? "selected" : "key")
        : t > s.token ? "masked" : "#ffffff";
    };
    // letters that lie on one colour are one text, which has a place for each
    for (let first = block * BS, end; first < Math.min((block + 1) * BS, N); first = end) {
      const colour = kind(first), at = LEFT + (first - block * BS) * each;
      for (end = first + 1; end < Math.min((block + 1) * BS, N) && kind(end) === colour; end++);
      box(at, y, (end - first) * each - 1, LINE - 3, colour);
      write(places(at, each, end - first), y + 15, letters(text.slice(first, end)), "middle",
        ...(["query", "selected"].includes(colour) ? ["#ffffff", `data-on="${palette[colour]}"`]
          : []));
    }
    if (slot !== undefined)
      line(`M${LEFT - 1} ${y - 1}h${BS * each}v${LINE - 1}h${-BS * each}z`, "selected", 1.5);
  }
  const foot = TOP + lines * LINE + 20, room = wide - LEFT - 4;
  write(LEFT, foot, `keys and values: ${grouped(cost.so)} of ${grouped(cost.list)} B`, "start");
  for (const [y, told, value, all, colour] of [
    [foot + 8, "list", cost.so, cost.list, "selected"],
    [foot + 52, "dense", cost.dense, cost.dense, "masked"],
  ]) {
    const long = (x) => (x / cost.dense) * room;
    write(LEFT - 6, y + 13, told, "end");
    box(LEFT, y, long(value), 18, colour);
    line(`M${LEFT} ${y}h${long(all)}v18h${-long(all)}z`, "line");
  }
  write(LEFT, foot + 44, `all ${grouped(cost.dense / (2 * D * BYTES))} keys: ` +
    `${grouped(cost.dense)} B`, "start");
  write(LEFT, foot + 92, `both: q ${grouped(cost.q)} B, o and lse ${grouped(cost.out)} B`, "start");
  return svg(wide, foot + 104);
}

const highOf = ({ G }) => 382 + 17 * G;
const nats = (x) => (Number.isFinite(x) ? x.toFixed(2) : "−∞");

// The list, and what the program holds at the end of the slot. `paint(x, y, width, height, colour)`
// takes the squares of numbers, many of them, if it is given.
function drawnState(given, s, steps, wide, palette, paint = null) {
  const { BS, G, D, S } = given, now = steps[s.slot], half = (wide - 16) / 2, right = half + 16;
  const { box, write, line, svg } = sheet(palette), shade = shades(palette);
  const largest = (rows) => Math.max(...rows.map((row) =>
    row.reduce((top, x) => (Number.isFinite(x) ? Math.max(top, Math.abs(x)) : top), 0))) || 1;

  write(0, 14, "the list, a slot in each box", "start");
  steps.forEach(({ block }, slot) => {
    const each = wide / S, isNow = slot === s.slot;
    const colour = isNow ? "selected" : slot < s.slot && block >= 0 ? "key" : "#ffffff";
    box(slot * each + 1, 22, each - 4, 26, block < 0 && !isNow ? "masked" : colour,
      `stroke="${palette.line}"`);
    write((slot + 0.5) * each, 39, block < 0 ? "−1" : `block ${block}`, "middle",
      ...(isNow ? ["#ffffff", `data-on="${palette.selected}"`, 'font-weight="bold"'] : []));
  });
  // a picture of numbers, [rows][columns]; those that are not loaded are gray
  const picture = (x, y, long, tall, told, rows, count, columns, most) => {
    const w = long / columns, h = tall / count, square = paint ?? box;
    write(x, y - 6, told, "start");
    square(x, y, long, tall, palette.masked);
    rows.forEach((row, i) => row.forEach((value, j) => {
      if (Number.isFinite(value))
        square(x + j * w, y + i * h, w + 0.3, h + 0.3, shade(value / most));
    }));
    line(`M${x} ${y}h${long}v${tall}h${-long}z`, "line", 0.8);
  };
  const wideEnough = half > 260;
  for (const [x, name, rows] of [[0, "k_tile", now.k_tile], [right, "v_tile", now.v_tile]]) {
    picture(x, 74, half, 96, `${name} [${BS} keys, ${D}]`, rows, BS, D, largest(rows));
  }
  const hidden = (rows) => rows.map((row) => row.map((v, i) => (i < now.seen ? v : NaN)));
  const top = largest(now.scores), heaviest = largest(now.weights);
  const note = (told) => (wideEnough ? told : "");
  picture(0, 196, half, 56, `scores${note(`, −${top.toFixed(1)} to ${top.toFixed(1)} nats`)}`,
    hidden(now.scores), G, BS, top);
  picture(right, 196, half, 56, `weights${note(`, 0 to ${heaviest.toPrecision(2)}`)}`,
    hidden(now.weights), G, BS, heaviest);
  if (now.seen && half / BS > 9)
    for (const x of [0, right])
      write(places(x, half / BS, BS), 266,
        letters(given.text.slice(now.block * BS, (now.block + 1) * BS)));
  picture(0, 294, wide, 48, `acc_o [${G} heads, ${D}], not yet divided`, [...now.acc_o], G, D,
    largest(now.acc_o));

  const columns = [0, wideEnough ? 0.16 : 0.11, wideEnough ? 0.52 : 0.53, 0.8].map((x) => x * wide);
  ["head", wideEnough ? "scores_max, nats" : "scores_max", "scores_scale", "running_sum"]
    .forEach((told, i) => write(columns[i], 364, told, "start", "faint"));
  for (let g = 0; g < G; g++)
    [s.head * G + g, `${nats(now.scores_max_prev[g])} → ${nats(now.scores_max[g])}`,
      now.scores_scale[g].toFixed(3), now.running_sum[g].toFixed(3)]
      .forEach((told, i) => write(columns[i], 382 + 17 * g, told, "start"));
  return svg(wide, highOf(given));
}

function render({ model, el }) {
  const given = decode(model.get("data")), palette = model.get("palette");
  const { N, H, S, BS } = given;
  let s, steps, cost;
  const state = inStep(model, settle(given), (...told) => {
    [s] = told;
    draw();
  });
  const { change } = state, controls = controlsFor(change), { slider } = controls;
  const speech = speaker();
  let first = 0;
  const restart = () => (first = s.slot < S - 1 ? s.slot : 0);
  const play = player(restart, (passed, calm) => {
    const slot = first + Math.floor(passed / (calm ? 2400 : 1500));
    if (slot !== s.slot && slot < S) change({ slot });
    return slot < S;
  }, () => draw());
  const part = (told, most, onkeydown) => element("div", { class: "drawn", tabindex: 0,
    role: "slider", onkeydown, "aria-label": told, "aria-valuemin": 0, "aria-valuemax": most });
  const text = part("the query, in the text", N - 1, pressText);
  const held = part("the slot, in the list", S - 1, pressList);
  const squares = element("canvas", {}), shapes = element("div", {});
  held.append(squares, shapes);
  const said = element("p", { class: "said" });
  const names = [["the query, or negative", "query"], ["just loaded, or positive", "selected"],
    ["loaded before", "key"], ["not loaded", "masked"]];
  const legend = names.map(([told, name]) =>
    element("span", { class: "swatch", style: `--colour:${palette[name]}` }, told));
  const root = figureRoot("list_walk", STYLE,
    element("div", { class: "bar" }, slider("token", "token", 0, N - 1),
      slider("head", "KV head", 0, H - 1), slider("slot", "slot", 0, S - 1), play.button),
    said, speech.live, element("div", { class: "body" }, text, held),
    element("div", { class: "actions" }, ...legend,
      ...savers(() => stacked(drawnText(given, s, steps, cost, 620, palette),
        drawnState(given, s, steps, 620, palette)), () => `list_token${s.token}_slot${s.slot}`)));
  el.replaceChildren(root);

  function pressText(event) {
    const by = keyed(event, { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -BS, ArrowDown: BS,
      Home: -N, End: N });
    if (by === null) return;
    play.stop();
    change({ token: within(s.token + by, 0, N - 1) });
  }
  function pressList(event) {
    const by = keyed(event, { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, Home: -S,
      End: S });
    if (by === null) return;
    play.stop();
    change({ slot: within(s.slot + by, 0, S - 1) });
  }
  drag(text, (event) => {
    play.stop();
    const box = text.getBoundingClientRect(), each = place(given, box.width);
    const at = Math.floor((event.clientX - box.left - LEFT) / each);
    const line = Math.floor((event.clientY - box.top - TOP) / LINE);
    const token = within(line, 0, Math.ceil(N / BS) - 1) * BS + within(at, 0, BS - 1);
    change({ token: Math.min(token, N - 1) });
  });
  drag(held, (event) => {
    play.stop();
    const box = held.getBoundingClientRect();
    change({ slot: within(((event.clientX - box.left) / box.width) * S - 0.5, 0, S - 1) });
  });

  // the squares on a canvas, below what is written and drawn as SVG
  function drawHeld(wide) {
    const ratio = devicePixelRatio || 1, context = squares.getContext("2d");
    const sizes = [wide, highOf(given)].map((x) => Math.round(x * ratio));
    if (squares.width !== sizes[0] || squares.height !== sizes[1])
      [squares.width, squares.height] = sizes;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, highOf(given));
    shapes.innerHTML = drawnState(given, s, steps, wide, palette, (x, y, w, h, colour) => {
      context.fillStyle = colour;
      context.fillRect(x, y, w, h);
    });
  }
  function draw() {
    steps = walk(given, s.token, s.head);
    cost = bytes(given, steps, s.slot, s.token);
    text.innerHTML = drawnText(given, s, steps, cost, Math.max(text.clientWidth, 240), palette);
    drawHeld(Math.max(held.clientWidth, 300));
    said.textContent = sentence(given, s, steps[s.slot], cost);
    speech.say(said.textContent);
    for (const [where, value] of [[text, s.token], [held, s.slot]]) {
      where.setAttribute("aria-valuenow", value);
      where.setAttribute("aria-valuetext", said.textContent);
    }
    controls.tell(s);
  }
  return begin(root, state, speech, play);
}

export default { render };
