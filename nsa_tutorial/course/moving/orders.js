// Three orders of the same sums: one query a program, tiles of queries, blocks of keys. Drag the
// union of four neighbours' lists, and see what each order moves, how long that takes on paper, and
// what was recorded.
//
// The first half is arithmetic and needs no page; tests hold it against
// course/widgets/performance.py. The second half draws.

// -- arithmetic --

export const ORDERS = ["queries", "tiles", "blocks"];
export const LOWEST = 100, HIGHEST = 400; // the union of four lists, in % of one

// What an order moves and multiplies in one forward, at lists whose union is `union` times a list;
// and the milliseconds of each part on paper, of which the longest counts.
export function cost(order, group, union, data) {
  const { tokens, width, block, tile, least_rows, rates } = data;
  const [HQ, H] = data.heads[group], entries = (H * data.keys) / block; // one query and one block
  const load = 2 * block * width * 2, row = 2 * width; // bytes of a block, and of a query head
  const ends = tokens * HQ * 2 * row + 2 * tokens * H * width * 2; // q, o, k and v, once
  const pair = 4 * width * block; // operations of one row and one block
  const loads = (entries * union) / tile, partials = 2 * entries * group * (row + 4);
  const { cached, memory, flops } = {
    queries: { cached: entries * load + ends, memory: ends,
      flops: entries * Math.max(group, least_rows) * pair },
    tiles: { cached: loads * load + ends, memory: ends,
      flops: loads * Math.max(tile * group, least_rows) * pair },
    blocks: { cached: entries * group * row + partials + ends,
      memory: partials + ends, flops: entries * group * pair },
  }[order];
  const times = { L2: (1e3 * cached) / rates.L2, memory: (1e3 * memory) / rates.memory,
    products: (1e3 * flops) / rates.products };
  const limit = Object.keys(times).reduce((a, b) => (times[b] > times[a] ? b : a));
  return { cached, memory, flops, times, limit, ms: times[limit] };
}

// The recorded milliseconds of an order at these lists, or undefined.
export const recordedAt = (order, group, union, data) => data.recorded.find((run) =>
  run.order === order && run.group === group && Math.abs(run.union - union) < 0.02)?.ms;

// Lists of four neighbours whose union has the size that is asked for: columns of a sketch.
export function neighbours(union, data) {
  const { slots, tile } = data, columns = Math.round(slots * union);
  return Array.from({ length: tile }, (_, t) => {
    const first = Math.round((t * (columns - slots)) / (tile - 1));
    return Array.from({ length: slots }, (_, i) => first + i);
  });
}

// What the programs of an order have loaded for these four queries after each step: pairs of a
// query and a block, and how many loads that took.
export function walk(order, union, data) {
  const lists = neighbours(union, data), blocks = [...new Set(lists.flat())].sort((a, b) => a - b);
  const steps = {
    queries: () => lists[0].map((_, slot) => lists.map((list, t) => [t, list[slot]])),
    tiles: () => blocks.map((b) => lists.flatMap((list, t) => (list.includes(b) ? [[t, b]] : []))),
    blocks: () => lists.map((list, t) => list.map((b) => [t, b])),
  }[order]();
  let loads = 0;
  return steps.map((pairs) => ({ pairs, loads: loads += order === "tiles" ? 1 : pairs.length }));
}

export const settle = (state, data) => bringInto(() => ({
  union: { low: LOWEST, high: HIGHEST },
  group: Object.keys(data.heads).map(Number).sort((a, b) => a - b),
  order: ORDERS,
}), state);

// -- words --

export function sentence(s, data) {
  const union = s.union / 100, now = cost(s.order, s.group, union, data);
  const [HQ, H] = data.heads[s.group], ms = recordedAt(s.order, s.group, union, data);
  const was = ms ? `Recorded: ${ms.toFixed(1)} ms.` : "No recorded run has these lists.";
  return `${HQ} heads over ${H}, ${data.told[s.order]}: ${(now.cached / 1e9).toFixed(0)} GB ` +
    `through L2, ${(now.memory / 1e9).toFixed(0)} GB through memory, ` +
    `${(now.flops / 1e12).toFixed(1)} TFLOP. The longest on paper: ${now.limit}, ` +
    `${now.ms.toFixed(1)} ms. ${was}`;
}

// What one order loads for four neighbours.
export function loaded(order, union, data) {
  const { loads } = walk(order, union, data).at(-1), { tile } = data;
  const wanted = data.slots * tile, columns = Math.round(data.slots * union);
  return {
    queries: `${tile} programs, each with its own list: ${loads} loads of a block`,
    tiles: `one program with the union: ${loads} loads of a block, and ` +
      `${tile * columns - wanted} of ${tile * columns} pairs are hidden`,
    blocks: `${columns} programs, each with a block: ${loads} loads of a query`,
  }[order];
}

// -- drawing --

const STYLE = `
.nsa-orders .drawn { cursor: ew-resize; touch-action: pan-y; }
.nsa-orders .drawn svg { height: auto; }
.nsa-orders .said { min-height: 5.6em; font-variant-numeric: tabular-nums; }
@container (min-width: 700px) { .nsa-orders .said { min-height: 2.8em; } }
`;
const COLOURS = { queries: "query", tiles: "text", blocks: "key" };
const SHADES = { L2: 1, memory: 0.62, products: 0.3 };
const PAD = 34; // left of the chart

// The chart's box in a picture `wide` pixels wide.
export const chartOf = (wide) => ({ x: PAD, y: 40, w: (wide >= 700 ? wide * 0.48 : wide) - PAD - 8,
  h: 240 });

// The picture as SVG, `wide` pixels wide; `step` steps of the sketch's programs are done.
function drawn(s, data, wide, palette, step = Infinity) {
  const { box, write, line, dot, svg } = sheet(palette), chart = chartOf(wide);
  const union = s.union / 100, isWide = wide >= 700;
  const at = (order, u) => cost(order, s.group, u, data).ms;
  const runs = data.recorded.filter((run) => run.group === s.group);
  const most = 1.1 * Math.max(...ORDERS.flatMap((order) => [at(order, 1), at(order, 4)]),
    ...runs.map((run) => run.ms));
  const x = (u) => chart.x + ((u - 1) / 3) * chart.w;
  const y = (ms) => chart.y + chart.h * (1 - ms / most);

  // time by union
  write(chart.x, 14, "milliseconds: lines on paper, circles recorded", "start");
  const unit = most > 60 ? 20 : most > 25 ? 10 : 5;
  for (let ms = 0; ms < most; ms += unit) {
    line(`M${chart.x} ${y(ms).toFixed(1)}h${chart.w}`, "masked");
    write(chart.x - 5, y(ms) + 4, ms, "end");
  }
  for (const u of [1, 2, 3, 4]) write(x(u), chart.y + chart.h + 16, u, u === 4 ? "end" : "middle");
  write(chart.x + chart.w / 2, chart.y + chart.h + 32, "union of four lists / one list");
  for (const order of ORDERS) {
    const points = Array.from({ length: 61 }, (_, i) => 1 + i / 20)
      .map((u) => `${x(u).toFixed(1)} ${y(at(order, u)).toFixed(1)}`);
    line(`M${points.join("L")}`, COLOURS[order], order === s.order ? 4 : 2);
  }
  line(`M${x(union)} ${chart.y - 4}v${chart.h + 4}`, "text", 1, 'stroke-dasharray="4 3"');
  line(`M${x(union)} ${chart.y - 4}l-6 -9h12z`, "text", 1, `style="fill:${palette.text}"`);
  for (const run of runs)
    dot(x(run.union).toFixed(1), y(run.ms).toFixed(1), run.order === s.order ? 6.5 : 5,
      COLOURS[run.order], `stroke="${run.order === "tiles" ? "#ffffff" : palette.text}"`);

  // what each order's time is made of
  const left = isWide ? chart.x + chart.w + 36 : PAD, right = wide - 8;
  let top = isWide ? 14 : chart.y + chart.h + 60;
  const room = right - left - 62 - 56, scale = room / most;
  for (const order of ORDERS) {
    const now = cost(order, s.group, union, data);
    const ms = recordedAt(order, s.group, union, data);
    box(left, top - 10, 11, 11, COLOURS[order]);
    write(left + 17, top, data.told[order] + (ms ? `: ${ms.toFixed(1)} recorded` : ""), "start",
      "text", order === s.order ? 'font-weight="bold"' : "");
    Object.entries(now.times).forEach(([part, time], i) => {
      const row = top + 6 + i * 15, isLimit = part === now.limit;
      write(left + 58, row + 11, part, "end");
      box(left + 62, row + 2, Math.max(time * scale, 1).toFixed(1), 11, COLOURS[order],
        `opacity="${SHADES[part]}"`);
      write((left + 66 + time * scale).toFixed(1), row + 11, time.toFixed(1), "start", "text",
        isLimit ? 'font-weight="bold"' : "");
    });
    if (ms) line(`M${left + 62 + ms * scale} ${top + 5}v48`, "text", 2);
    top += 72;
  }

  // four neighbours' lists, and what the programs of the order load
  const sketch = isWide ? chart.y + chart.h + 72 : top + 16, lists = neighbours(union, data);
  const columns = Math.round(data.slots * union), each = Math.min((right - PAD) / columns, 22);
  const steps = walk(s.order, union, data), done = steps.slice(0, step);
  const lit = new Set(done.flatMap(({ pairs }) => pairs.map(String)));
  write(PAD, sketch - 8, isWide ? `four neighbours, and the blocks that they list; ` +
    loaded(s.order, union, data) : "four neighbours, and the blocks they list", "start");
  const shapes = { listed: "", lit: "", hidden: "", none: "" };
  lists.forEach((list, t) => {
    for (let b = 0; b < columns; b++) {
      const kind = lit.has(String([t, b])) ? "lit" : list.includes(b) ? "listed"
        : s.order === "tiles" && done.length > b ? "hidden" : "none";
      shapes[kind] += `M${(PAD + b * each).toFixed(1)} ${sketch + t * 18}` +
        `h${(each - 1.5).toFixed(1)}v16h-${(each - 1.5).toFixed(1)}z`;
    }
  });
  for (const [kind, colour, opacity] of [["lit", "selected", 1], ["listed", "key", 0.55],
    ["hidden", "masked", 1], ["none", "masked", 0.3]])
    line(shapes[kind], "none", 0, `style="fill:${palette[colour]};opacity:${opacity}"`);
  if (!isWide)
    loaded(s.order, union, data).split(": ").forEach((told, i) =>
      write(PAD, sketch + 90 + 16 * i, told, "start"));
  return svg(wide, sketch + (isWide ? 78 : 116));
}

function render({ model, el }) {
  const palette = model.get("palette"), data = model.get("data");
  let s, step = Infinity;
  const state = inStep(model, (values) => settle(values, data), (now) => {
    s = now;
    draw();
  });
  const { change } = state, speech = speaker(), controls = controlsFor(change);
  const { slider, choice } = controls;
  const steps = () => walk(s.order, s.union / 100, data);
  const play = player(() => (step = 0), (passed, calm) => {
    step = Math.floor(passed / (calm ? 800 : Math.min(6000 / steps().length, 800)));
    draw();
    return step < steps().length;
  }, () => {
    step = Infinity;
    draw();
  });
  const said = element("p", { class: "said" });
  const picture = element("div", { class: "drawn", tabindex: 0, role: "slider", onkeydown: press,
    "aria-label": "union of four lists, in the picture", "aria-valuemin": LOWEST,
    "aria-valuemax": HIGHEST });
  const kinds = new Map(data.recorded.map((run) => [run.lists, run.union]));
  const jumps = [...kinds].sort(([, a], [, b]) => a - b).map(([lists, union]) =>
    element("button", { type: "button", onclick: () => change({ union: Math.round(100 * union) }) },
      `${lists} lists: ${union.toFixed(2)}`));
  const groups = Object.keys(data.heads).map(Number).sort((a, b) => b - a);
  const root = figureRoot("orders", STYLE,
    element("div", { class: "bar" },
      choice("order", "order", ORDERS.map((order) => [order, data.told[order]])),
      choice("group", "group", groups.map((group) => [group, `${group} query heads a KV head`])),
      slider("union", "union, % of a list", LOWEST, HIGHEST), play.button),
    element("div", { class: "actions" }, "recorded:", ...jumps),
    said, speech.live, picture,
    element("p", {}, "Drag in the chart. The longest of an order's three bars counts. The sketch " +
      "has lists of 16 blocks that agree as much as the slider says."),
    element("div", { class: "actions" },
      ...savers(() => drawn(s, data, 860, palette), () => `orders_${s.order}_${s.union}`)));
  el.replaceChildren(root);

  function press(event) {
    const by = keyed(event, { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1,
      PageDown: -25, PageUp: 25, Home: -HIGHEST, End: HIGHEST });
    if (by === null) return;
    play.stop();
    change({ union: within(s.union + by, LOWEST, HIGHEST) });
  }
  drag(picture, (event) => {
    play.stop();
    const area = picture.getBoundingClientRect(), chart = chartOf(area.width);
    const share = (event.clientX - area.left - chart.x) / chart.w;
    change({ union: within(LOWEST + share * (HIGHEST - LOWEST), LOWEST, HIGHEST) });
  });

  function draw() {
    picture.innerHTML = drawn(s, data, Math.max(picture.clientWidth, 300), palette, step);
    const done = steps()[Math.min(step, steps().length) - 1];
    said.textContent = step === Infinity ? sentence(s, data)
      : `Step ${Math.min(step, steps().length)} of ${steps().length}, ${data.told[s.order]}: ` +
        `${done ? done.loads : 0} loads.`;
    speech.say(said.textContent);
    picture.setAttribute("aria-valuenow", s.union);
    picture.setAttribute("aria-valuetext", said.textContent);
    controls.tell(s);
  }
  return begin(root, state, speech, play);
}

export default { render };
