// The choice: one query's blocks, what summaries guess of each, and the list of the best n, found
// by halving a range of scores. Drag the query, or a threshold of your own.
//
// The first half is arithmetic, with that of heads.js, and needs no page; tests hold it against
// course/widgets/selection_kernels.py and sparse/block_selection.py. The second half draws.
//
// Symbols: as in heads.js. Bits are those of an fp32 score of at least 0, as an integer: they are
// ordered as the scores are.

// -- arithmetic --

export const SIZES = { block_size: 16, length: 8, stride: 4 };
export const INFINITY = 0x7f800000; // the bits of a forced block
export const HIDDEN = -1; // of a block of the future
export const MOST = 16; // places of a list
export const END = 31; // questions, at most
const FORCED = 4; // blocks of either kind

const word = new DataView(new ArrayBuffer(4));
export function bitsOf(score) {
  word.setFloat32(0, score);
  return word.getInt32(0);
}
export function valueOf(bits) {
  word.setInt32(0, bits);
  return word.getFloat32(0);
}

// What each block counts in the choice of query t, [NB]: the bits of `score(block)`.
export function bitsOfBlocks(s, t, NB, score) {
  const own = Math.floor(t / s.block_size);
  return Array.from({ length: NB }, (_, b) =>
    b > own ? HIDDEN : isForced(s, own, b) ? INFINITY : bitsOf(score(b)));
}

// The questions that lead to the best n: how many blocks have at least `middle`? It stops early, as
// the kernel does, where exactly n have.
export function questions(bits, n) {
  const found = [];
  let low = 0, high = 2 ** 31;
  while (high - low > 1) {
    const middle = low + Math.floor((high - low) / 2);
    const count = bits.filter((x) => x >= middle).length;
    found.push({ low, high, middle, count });
    if (count >= n) low = middle;
    else high = middle;
    if (count === n) break;
  }
  return found;
}

// The list that the questions end with, [n]: what lies above the range, and of what is equal the
// lower ids; ascending, then -1.
export function listed(bits, n, asked) {
  const { low, middle, count } = asked.at(-1), edge = count >= n ? middle : low;
  let room = n - bits.filter((x) => x > edge).length;
  const list = bits.flatMap((x, b) => (x > edge || (x === edge && room-- > 0) ? [b] : []));
  return [...list, ...Array(n - list.length).fill(-1)];
}

// How much of the attention each block gets, [NB]; its sum over the blocks of a list.
export function massOf(shares, NB, BS) {
  const mass = new Float64Array(NB);
  shares.forEach((share, key) => (mass[Math.floor(key / BS)] += share));
  return mass;
}
export const held = (mass, list) => list.reduce((sum, b) => sum + (b < 0 ? 0 : mass[b]), 0);

export function settle(state, N, groups) {
  return bringInto((s) => ({
    query: { low: 0, high: N - 1 },
    top_n: { low: 1, high: MOST },
    num_local: { low: 0, high: Math.min(FORCED, s.top_n) },
    num_initial: { low: 0, high: Math.min(FORCED, s.top_n - s.num_local) },
    group: { low: 0, high: groups - 1 },
    question: { low: 1, high: END },
    threshold: { low: 0, high: 2 ** 31 - 1 },
  }), state);
}

// What is drawn of a state: bits and guess of each block, the questions and how many are asked, the
// threshold, the blocks that reach it, the list where it is found, and the true attention.
export function look(s, heads, scores) {
  const t = s.query, n = s.top_n, BS = SIZES.block_size, NB = Math.ceil(heads.N / BS);
  const guess = Array.from({ length: NB }, (_, b) => scores[t * NB + b]);
  const bits = bitsOfBlocks({ ...s, ...SIZES }, t, NB, (b) => guess[b]);
  const asked = questions(bits, n), question = Math.min(s.question, asked.length);
  const threshold = s.threshold || asked[question - 1].middle;
  const mass = massOf(attention(heads, s.group, t), NB, BS);
  const isFound = !s.threshold && question === asked.length;
  const reach = bits.flatMap((x, b) => (x >= threshold ? [b] : []));
  const list = listed(bits, n, asked), free = { ...SIZES, top_n: n, num_initial: 0, num_local: 0 };
  const best = choose(free, t, (b) => mass[b]);
  return { own: Math.floor(t / BS), NB, guess, bits, asked, question, threshold, mass, isFound,
    reach, list, shown: isFound ? list.filter((b) => b >= 0) : reach, best };
}

// -- words --

const many = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

// A score in few characters.
export const short = (x) =>
  x === 0 || x >= 1e-3 ? String(Number(x.toPrecision(2))) : x.toExponential(0);

export function sentence(s, now) {
  const { asked, question, threshold, reach, list, mass, best, isFound, own } = now;
  const n = s.top_n, percent = (x) => `${Math.round(100 * x)}%`;
  const told = `Query ${s.query} sees ${many(own + 1, "block")} and lists ${n}. `;
  const reached = `${many(reach.length, "block")} ${reach.length === 1 ? "reaches" : "reach"} ` +
    short(valueOf(threshold));
  if (s.threshold) {
    const over = reach.length - n;
    return `${told}Your threshold: ${reached}, ` + (over > 0 ? `${over} too many. Go right.`
      : over < 0 ? `${-over} too few. ${own < n ? "It sees no more." : "Go left."}`
        : "as many as the list has places.");
  }
  const at = `${told}Question ${question} of ${asked.length}: ${reached}`;
  if (!isFound)
    return `${at}, ${reach.length > n ? "more" : "fewer"} than ${n}: the range keeps its ` +
      `${reach.length > n ? "upper" : "lower"} half.`;
  const ids = list.filter((b) => b >= 0);
  const how = asked.at(-1).count === n ? "" : ", and the range is down to one number";
  return `${at}${how}. The list ${ids.join(", ")} holds ${percent(held(mass, list))} of its ` +
    `attention, the best ${many(best.length, "block")} ${percent(held(mass, best))}.`;
}

// -- drawing --

const STYLE = `
.nsa-choice .body { display: grid; gap: 4px 26px; grid-template-columns: minmax(0, 1fr); }
@container (min-width: 660px) {
  .nsa-choice .body { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
}
.nsa-choice .drawn { cursor: ew-resize; touch-action: pan-y; user-select: none; }
.nsa-choice .drawn svg { height: auto; }
.nsa-choice .said { min-height: 2.8em; font-variant-numeric: tabular-nums; }
@container (max-width: 699px) { .nsa-choice .said { min-height: 5.6em; } }
`;
const LEFT = 34; // where both pictures begin, beside their axes
const RIGHT = 8;
const ROWS = 8; // questions that are shown, the latest ones
const TALL = 272;
const SIDE = 118; // of the words beside a question
const LEAST = bitsOf(1e-4), LARGEST = bitsOf(30); // the ends of the axis of scores

// Guess and truth of each block, `wide` pixels wide; what is listed is shaded.
function drawnBlocks(s, now, wide, palette) {
  const { NB, own, guess, mass, shown, reach } = now, each = (wide - LEFT - RIGHT) / NB;
  const { box, write, line, area, svg } = sheet(palette), x = (b) => LEFT + b * each;
  for (const b of shown)
    box(x(b), 22, each, 216, b === own ? "own block" : "selected",
      `opacity="${b === own ? 0.45 : 0.22}"`);
  if (own < NB - 1)
    box(x(own + 1), 22, x(NB) - x(own + 1), 216, "masked", 'opacity="0.45"');
  const sum = guess.reduce((a, b) => a + b, 0) || 1;
  const shares = guess.map((g) => g / sum);
  for (const [told, values, foot, colour] of [
    ["guess from the summaries, share of all blocks", shares, 116, "compressed"],
    ["true attention", [...mass], 238, "text"],
  ]) {
    write(LEFT, foot - 102, told, "start");
    const top = Math.max(...values, 0.01);
    values.forEach((value, b) => {
      const tall = (value / top) * 84;
      if (tall > 0.2) box(x(b) + 0.18 * each, foot - tall, 0.64 * each, tall, colour);
    });
    line(`M${LEFT} ${foot}H${x(NB)}`);
    write(LEFT - 4, foot - 78, `${Math.round(100 * top)}%`, "end");
  }
  const step = each > 17 ? 1 : 4;
  for (let b = 0; b < NB; b += step)
    write(x(b) + each / 2, 254, b, "middle", "text",
      reach.includes(b) && step === 1 ? 'font-weight="bold"' : "");
  const at = LEFT + ((s.query + 0.5) / (NB * SIZES.block_size)) * (x(NB) - LEFT);
  line(`M${at} 22V238`, "query", 1.5);
  area(`M${at} 258l-6 10h12z`, "query");
  return svg(wide, TALL);
}

// The scores on an axis of their bits, the threshold, the ranges so far, and the list.
function drawnQuestions(s, now, wide, palette) {
  const { bits, asked, question, threshold, isFound, list, own } = now, n = s.top_n;
  const { box, write, line, dot, svg } = sheet(palette), end = wide - SIDE;
  const x = (value) =>
    LEFT + ((Math.min(Math.max(value, LEAST), LARGEST) - LEAST) / (LARGEST - LEAST)) * (end - LEFT);
  write(LEFT, 14, "score of each block, on an axis of its bits", "start");
  const foot = 54 + ROWS * 16;
  const ticks = [1e-3, 0.01, 0.1, 1, 10].filter((_, i) => end - LEFT > 220 || i % 2);
  for (const tick of ticks) {
    line(`M${x(bitsOf(tick))} 22V${foot + 4}`, "masked");
    write(x(bitsOf(tick)), foot + 16, tick);
  }
  bits.forEach((value, b) => {
    if (value === HIDDEN || value === INFINITY) return;
    dot(x(value), 32, 5, value >= threshold ? "selected" : "compressed", 'stroke="#ffffff"');
  });
  const forced = bits.filter((value) => value === INFINITY).length;
  if (forced) {
    dot(end + 10, 32, 5, "own block");
    write(end + 22, 36, `∞: ${many(forced, "block")} forced`, "start");
  }
  const shown = s.threshold ? [] : asked.slice(0, question).slice(-ROWS);
  shown.forEach((past, row) => {
    const y = 46 + row * 16, left = x(past.low), latest = past === asked[question - 1];
    box(left, y, Math.max(x(past.high) - left, 2), 12, latest ? "query" : "masked");
    if (past.middle > LEAST && past.middle < LARGEST)
      line(`M${x(past.middle)} ${y - 1}v14`, "text");
    write(LEFT - 6, y + 10, question - shown.length + row + 1, "end");
    const sign = past.count > n ? "→" : past.count < n ? "←" : "✓";
    write(end + 6, y + 10, `${sign} ${past.count} reach ${short(valueOf(past.middle))}`, "start");
  });
  if (s.threshold) {
    line(`M${x(threshold)} 20V${foot}`, "query", 2.5);
    dot(x(threshold), foot - 10, 8, "query", 'stroke="#ffffff" stroke-width="2"');
    write(end + 6, foot - 6, `${now.reach.length} reach ${short(valueOf(threshold))}`, "start");
  } else line(`M${x(threshold)} 22V42`, "query", 2.5);
  line(`M${LEFT} ${foot}H${end}`);

  // the list, a box for each place
  const each = Math.min((wide - LEFT - RIGHT) / n, 30), y = foot + 40;
  write(LEFT, y - 6, isFound ? "the list" : `the list: ${many(n, "place")}`, "start");
  list.forEach((b, slot) => {
    const colour = !isFound ? "#ffffff" : b < 0 ? "masked" : b === own ? "own block" : "selected";
    box(LEFT + slot * each, y, each - 2, 22, colour, `stroke="${palette.line}"`);
    if (isFound)
      write(LEFT + slot * each + each / 2 - 1, y + 15, b, "middle",
        ...(colour === "selected" ? ["#ffffff", `data-on="${palette.selected}"`] : []));
  });
  return svg(wide, TALL);
}

function render({ model, el }) {
  const heads = decode(model.get("data")), palette = model.get("palette"), { N } = heads;
  let s, now;
  const state = inStep(model, (values) => settle(values, N, heads.groups.length), (...told) => {
    [s] = told;
    draw();
  });
  const known = heads.groups.map(() => null);
  const scores = () => (known[s.group] ??= importance(heads, { ...SIZES, group: s.group }));
  // the last question stays the last one when the query moves
  const change = (values) => {
    const last = values.question >= now.asked.length ? { question: END } : {};
    state.change({ ...("question" in values ? { threshold: 0 } : {}), ...values, ...last });
  };
  const speech = speaker(), controls = controlsFor(change), { slider, choice } = controls;
  let first = 1;
  const restart = () => (first = now.question < now.asked.length ? now.question : 1);
  const play = player(restart, (passed, calm) => {
    const question = first + Math.floor(passed / (calm ? 1600 : 900));
    if (question !== now.question || s.threshold) change({ question });
    return question < now.asked.length;
  }, () => draw());
  const part = (told, most, onkeydown) => element("div", { class: "drawn", tabindex: 0,
    role: "slider", onkeydown, "aria-label": told, "aria-valuemin": 0, "aria-valuemax": most });
  const above = part("the query, in the picture of the blocks", N - 1, pressAbove);
  const below = part("a threshold of your own, blocks that reach it", 32, pressBelow);
  const said = element("p", { class: "said" });
  const go = (by, told) => element("button", { type: "button", onclick: () => {
    play.stop();
    change({ question: within(now.question + by, 1, END) });
  } }, told);
  const names = [["listed", "selected"], ["own block", "own block"], ["not listed", "compressed"],
    ["later", "masked"]];
  const legend = names.map(([told, name]) =>
    element("span", { class: "swatch", style: `--colour:${palette[name]}` }, told));
  const root = figureRoot("choice", STYLE,
    element("div", { class: "bar" }, slider("query", "query", 0, N - 1),
      slider("top_n", "places", 1, MOST), slider("question", "question", 1, END)),
    element("div", { class: "actions" }, play.button, go(-1, "Back"), go(1, "Next")),
    element("details", {}, element("summary", {}, "more"), element("div", { class: "more" },
      slider("num_initial", "first blocks, forced", 0, FORCED),
      slider("num_local", "latest blocks, forced", 0, FORCED),
      choice("group", "head group", heads.groups.map((group, i) => [i, group.label])))),
    said, speech.live, element("div", { class: "body" }, above, below),
    element("div", { class: "actions" }, ...legend,
      ...savers(() => stacked(drawnBlocks(s, now, 520, palette),
        drawnQuestions(s, now, 520, palette)), () => `choice_query${s.query}`)));
  el.replaceChildren(root);

  function pressAbove(event) {
    const by = keyed(event, { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1,
      PageDown: -SIZES.block_size, PageUp: SIZES.block_size, Home: -N, End: N });
    if (by === null) return;
    play.stop();
    change({ query: within(s.query + by, 0, N - 1) });
  }
  // to the next block on either side
  function pressBelow(event) {
    const by = keyed(event, { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 });
    if (by === null) return;
    play.stop();
    const others = now.bits.filter((x) => x >= 0 && x < INFINITY).sort((a, b) => a - b);
    const next = by < 0 ? others.filter((x) => x < now.threshold).at(-1)
      : others.find((x) => x >= now.threshold);
    if (next !== undefined) change({ threshold: Math.max(by < 0 ? next : next + 1, 1) });
  }
  drag(above, (event) => {
    play.stop();
    const box = above.getBoundingClientRect(), wide = box.width - LEFT - RIGHT;
    change({ query: within(((event.clientX - box.left - LEFT) / wide) * N - 0.5, 0, N - 1) });
  });
  drag(below, (event) => {
    play.stop();
    const box = below.getBoundingClientRect(), wide = box.width - SIDE - LEFT;
    const share = Math.min(Math.max((event.clientX - box.left - LEFT) / wide, 0), 1);
    change({ threshold: Math.round(LEAST + share * (LARGEST - LEAST)) });
  });

  function draw() {
    now = look(s, heads, scores());
    above.innerHTML = drawnBlocks(s, now, Math.max(above.clientWidth, 300), palette);
    below.innerHTML = drawnQuestions(s, now, Math.max(below.clientWidth, 300), palette);
    said.textContent = sentence(s, now);
    speech.say(said.textContent);
    above.setAttribute("aria-valuenow", s.query);
    above.setAttribute("aria-valuetext", said.textContent);
    below.setAttribute("aria-valuenow", now.reach.length);
    below.setAttribute("aria-valuetext", said.textContent);
    controls.tell({ ...s, question: now.question }, { question: now.asked.length,
      num_local: Math.min(FORCED, s.top_n), num_initial: Math.min(FORCED, s.top_n - s.num_local) });
  }
  return begin(root, state, speech, play);
}

export default { render };
