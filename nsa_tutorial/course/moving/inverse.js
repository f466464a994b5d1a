// A list and its inverse: the blocks that a query lists, and the queries that list a block. Point
// at a query or at a block, and see who adds what to its gradient, and in which order.
//
// The first half is arithmetic and needs no page; tests hold it against sparse/inverse_list.py. The
// second half draws.

// -- arithmetic --

export const WAYS = ["chunks of a block", "slots, by atomics"];
export const RUNS = 100;
const f = Math.fround; // sums are rounded to fp32, as a kernel's are

// The queries that list each block, one block after the other, ascending; and where each block's
// begin: those of block b are queries[bounds[b]] to queries[bounds[b + 1] - 1].
export function invert(lists, blocks) {
  const queries = [], bounds = [0];
  for (let block = 0; block < blocks; block++) {
    lists.forEach((list, query) => list.includes(block) && queries.push(query));
    bounds.push(queries.length);
  }
  return { queries, bounds };
}

// A block's queries in equal chunks of `length` to twice that, a program for each. Fewer are one.
export function chunks(queries, length) {
  const count = queries.length, parts = count && Math.max(Math.floor(count / length), 1);
  const end = (part) => Math.floor((count * part) / parts);
  return Array.from({ length: parts }, (_, part) => queries.slice(end(part), end(part + 1)));
}

// A number from 0 to 1 that depends on two numbers alone.
export function chance(a, b) {
  let x = Math.imul(a * 4096 + b + 1, 2654435761);
  x = Math.imul(x ^ (x >>> 15), 2246822519);
  x = Math.imul(x ^ (x >>> 13), 3266489917);
  return ((x ^ (x >>> 16)) >>> 0) / 2 ** 32;
}

// What stands for a query's part of one number of a block's d_k, in fp32.
export const partOf = (query, block) => f(2 * chance(query, block) - 1);

// The queries of a block in the order in which their programs finish, in one run.
export function arrivals(queries, block, run) {
  const when = (query) => chance(query, 64 + 64 * run + block);
  return [...queries].sort((a, b) => when(a) - when(b));
}

const added = (numbers) => numbers.reduce((sum, x) => f(sum + x), 0);

// Who adds: `rows` of queries, what each row sums to, and the sum.
export function sums(s, queries) {
  const rows = s.adds === WAYS[0] ? chunks(queries, s.length)
    : [arrivals(queries, s.block, s.run)];
  const shares = rows.map((row) => added(row.map((query) => partOf(query, s.block))));
  return { rows, shares, total: added(shares) };
}

// How many different sums the runs of this block give.
export function different(s, queries) {
  const found = Array.from({ length: RUNS }, (_, run) => sums({ ...s, run }, queries).total);
  return new Set(found).size;
}

export function settle(state, data) {
  const kinds = Object.keys(data.lists), tokens = data.lists[kinds[0]].length;
  return bringInto(() => ({
    lists: kinds,
    adds: WAYS,
    query: { low: 0, high: tokens - 1 },
    block: { low: 0, high: Math.ceil(tokens / data.block_size) - 1 },
    length: { low: 8, high: tokens },
    run: { low: 0, high: RUNS - 1 },
  }), state);
}

// -- words --

export const digits = (x) => x.toPrecision(9).replace("-", "−");

export function sentence(s, data) {
  const lists = data.lists[s.lists], mine = lists[s.query].filter((block) => block >= 0);
  const blocks = Math.ceil(lists.length / data.block_size);
  const { queries, bounds } = invert(lists, blocks);
  const its = queries.slice(bounds[s.block], bounds[s.block + 1]), n = its.length;
  const { rows, total } = sums(s, its);
  const first = `d_q of query ${s.query} is a sum over ` +
    (mine.length === 1 ? `block ${mine[0]}.` : `its ${mine.length} blocks, ${mine.join(", ")}.`);
  const second = ` d_k of block ${s.block} is a sum over the ` +
    (n === 1 ? "one query that lists it." : `${n} queries that list it`);
  if (n === 1) return `${first}${second}`;
  if (s.adds === WAYS[0]) {
    const sizes = rows.map((row) => row.length), most = Math.max(...sizes);
    const walk = rows.length === 1 ? "one program walks them"
      : `${rows.length} programs walk up to ${most} each, and their shares are added in order`;
    return `${first}${second}: ${walk}, so every run gives ${digits(total)}.`;
  }
  const runs = different(s, its);
  return `${first}${second}: ${n} programs add to it in turn, whenever they finish. This run ` +
    `gives ${digits(total)}, and ${RUNS} runs give ` +
    `${runs} different ${runs === 1 ? "sum" : "sums"}.`;
}

// What is added after `step` steps, while it is played.
export function progress(s, queries, step) {
  const { rows } = sums(s, queries), done = rows.map((row) => Math.min(step, row.length));
  const longest = Math.max(...rows.map((row) => row.length));
  return { added: done.reduce((a, b) => a + b, 0),
    isDone: step >= longest + (rows.length > 1 ? rows.length : 0) };
}

// -- drawing --

const STYLE = `
.nsa-inverse .drawn { position: relative; }
.nsa-inverse .drawn svg { height: auto; }
.nsa-inverse .pick { position: absolute; cursor: pointer; touch-action: pan-y; }
.nsa-inverse .said { min-height: 5.6em; font-variant-numeric: tabular-nums; }
@container (min-width: 700px) { .nsa-inverse .said { min-height: 2.8em; } }
`;
const ROW = 22; // pixels of a program's row

// Where the two masks and the block's programs stand in a picture `wide` pixels wide.
export function places(wide, tokens, blocks) {
  const left = 34, isWide = wide >= 700;
  const mask = { x: left, y: 40, each: isWide ? 13 : 12, high: isWide ? 7.5 : 6 };
  const after = isWide ? left + blocks * mask.each + 56 : left;
  const turned = { x: after, y: isWide ? 40 : 40 + tokens * mask.high + 56,
    each: (wide - after - 6) / tokens, high: 12 };
  const strip = { x: turned.x, y: turned.y + blocks * turned.high + 44, wide: wide - after - 6,
    high: 14 };
  return { mask, turned, strip, programs: { x: turned.x, y: strip.y + 62, wide: strip.wide } };
}

// What was made before, by name.
const known = new Map();
const keep = (name, make) => known.get(name) ?? (known.set(name, make()), known.get(name));

// The picture as SVG, `wide` pixels wide. Of what is added, the first `step` are.
function drawn(s, data, wide, palette, step = Infinity) {
  const lists = data.lists[s.lists], tokens = lists.length, shapes = [];
  const blocks = Math.ceil(tokens / data.block_size), at = places(wide, tokens, blocks);
  const { queries, bounds } = invert(lists, blocks);
  const its = queries.slice(bounds[s.block], bounds[s.block + 1]);
  const path = (d, facts) => d && shapes.push(`<path d="${d}" ${facts}/>`);
  const fill = (colour, share = 1) => `fill="${palette[colour]}" fill-opacity="${share}"`;
  const box = (x, y, w, h) =>
    `M${x.toFixed(1)} ${y.toFixed(1)}h${w.toFixed(1)}v${h}h${-w.toFixed(1)}z`;
  const write = (x, y, told, anchor = "start", colour = "text") => shapes.push(
    `<text x="${x}" y="${y}" fill="${palette[colour]}" text-anchor="${anchor}">${told}</text>`);

  // the mask, and its transpose
  for (const [place, isTurned] of [[at.mask, false], [at.turned, true]]) {
    const { x, y, each, high } = place;
    const cell = (query, block) => (isTurned
      ? box(x + query * each, y + block * high, each - 0.8, high - 1)
      : box(x + block * each, y + query * high, each - 1, high - 0.8));
    const all = keep(`${s.lists} ${wide} ${isTurned}`, () => {
      const groups = { none: "", pale: "" };
      for (let query = 0; query < tokens; query++)
        for (let block = 0; block < blocks; block++)
          groups[lists[query].includes(block) ? "pale" : "none"] += cell(query, block);
      return groups;
    });
    path(all.none, fill("masked", 0.3));
    path(all.pale, fill("key", 0.55));
    path(its.map((query) => cell(query, s.block)).join(""), fill("selected"));
    path(lists[s.query].map((block) => (block < 0 ? "" : cell(s.query, block))).join(""),
      fill("query"));
    const [columns, rows] = isTurned ? [tokens, blocks] : [blocks, tokens];
    const outline = (number, isRow, colour) => path(
      isRow ? box(x - 2, y + number * high - 2, columns * each + 3, high + 3)
        : box(x + number * each - 2, y - 2, each + 3, rows * high + 3),
      `fill="none" stroke="${palette[colour]}" stroke-width="1.5"`);
    outline(s.query, !isTurned, "query");
    outline(s.block, isTurned, "selected");
    for (let row = 0; row < rows; row += isTurned ? 4 : 8)
      write(x - 6, y + (row + 0.5) * high + 4, row, "end");
    for (let column = 0; column < columns; column += isTurned ? 8 : 4)
      write(x + (column + 0.5) * each, y + rows * high + 15, column, "middle");
    write(x, y - 22, isTurned ? "its transpose" : "the mask");
    write(x, y - 8, isTurned ? "a row for each block" : "a row for each query");
  }

  // all inverse lists, one after the other
  const unit = at.strip.wide / queries.length;
  const [first, end] = [bounds[s.block], bounds[s.block + 1]];
  write(at.strip.x, at.strip.y - 8,
    `queries, one block after the other: ${queries.length} entries`);
  let pale = "", lit = "", mine = "";
  for (let block = 0; block < blocks; block++) {
    const shape = box(at.strip.x + bounds[block] * unit, at.strip.y,
      Math.max((bounds[block + 1] - bounds[block]) * unit - 1.5, 0), at.strip.high);
    if (block === s.block) lit += shape;
    else pale += shape;
  }
  queries.forEach((query, entry) => {
    if (query === s.query)
      mine += box(at.strip.x + entry * unit, at.strip.y - 2, Math.max(unit, 2.5),
        at.strip.high + 4);
  });
  path(pale, fill("key", 0.55));
  path(lit, fill("selected"));
  path(mine, fill("query"));
  const middle = at.strip.x + ((first + end) / 2) * unit;
  const told = `bounds: ${first} to ${end}`, side = middle < at.strip.x + 60 ? "start"
    : middle > at.strip.x + at.strip.wide - 60 ? "end" : "middle";
  write(side === "start" ? at.strip.x : side === "end" ? at.strip.x + at.strip.wide : middle,
    at.strip.y + at.strip.high + 15, told, side);

  // who adds to the block
  const { rows, shares, total } = sums(s, its), { programs } = at, isAtomic = s.adds !== WAYS[0];
  const most = Math.max(...rows.map((row) => row.length), 1), room = isAtomic ? 0 : 92;
  const line = isAtomic ? Math.max(Math.floor(programs.wide / 21), 1) : most;
  const each = Math.min((programs.wide - room) / line, 24);
  write(programs.x, programs.y - 8, isAtomic
    ? `block ${s.block}: one after the other, as they finish`
    : `block ${s.block}: ${rows.length === 1 ? "one program" : `${rows.length} programs at once`}`);
  let y = programs.y;
  rows.forEach((row, part) => {
    row.forEach((query, i) => {
      const x = programs.x + (i % line) * each, top = y + Math.floor(i / line) * ROW;
      const colour = query === s.query ? "query" : "key";
      path(box(x, top, each - 1.5, ROW - 4),
        i < step ? fill(colour, query === s.query ? 0.45 : 0.55)
          : `fill="none" stroke="${palette.masked}"`);
      if (each >= 16) write(x + (each - 1.5) / 2, top + 13.5, query, "middle");
    });
    if (!isAtomic && step >= row.length)
      write(programs.x + row.length * each + 6, y + 13.5, digits(shares[part]));
    y += Math.max(Math.ceil(row.length / line), 1) * ROW;
  });
  const { isDone } = progress(s, its, step);
  const how = rows.length > 1 ? `${rows.length} shares, added in order: ` : "sum: ";
  write(programs.x, y + 14, isDone ? `${how}${digits(total)}` : "adding …");
  const highest = Math.max(y + 22, at.mask.y + tokens * at.mask.high + 24);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${wide}" height="${highest}" ` +
    `font-family="sans-serif" font-size="12" aria-hidden="true">${shapes.join("")}</svg>`;
}

function render({ model, el }) {
  const palette = model.get("palette"), data = model.get("data");
  let s, step = Infinity, over = null;
  const state = inStep(model, (values) => settle(values, data), (now) => {
    s = now;
    draw();
  });
  const { change } = state, speech = speaker(), controls = controlsFor(change);
  const { slider, choice } = controls;
  const tokens = Object.values(data.lists)[0].length, blocks = Math.ceil(tokens / data.block_size);
  const play = player(() => (step = 0), (passed, calm) => {
    step = Math.floor(passed / (calm ? 800 : 250));
    draw();
    return !told().isDone;
  }, () => {
    step = Infinity;
    draw();
  });
  const said = element("p", { class: "said" });
  const shown = element("div"), pick = (name, told, most) => element("div", { class: "pick",
    tabindex: 0, role: "slider", "aria-label": told, "aria-valuemin": 0, "aria-valuemax": most - 1,
    onkeydown: (event) => press(event, name) });
  const ofQueries = pick("query", "query, in the mask", tokens);
  const ofBlocks = pick("block", "block, in the transpose", blocks);
  const picture = element("div", { class: "drawn" }, shown, ofQueries, ofBlocks);
  const again = element("button", { type: "button",
    onclick: () => change({ run: (s.run + 1) % RUNS }) }, "Another run");
  const names = [["the query, and its list", "query"], ["the block, and its queries", "selected"]];
  const legend = names.map(([told, name]) =>
    element("span", { class: "swatch", style: `--colour:${palette[name]}` }, told));
  const root = figureRoot("inverse", STYLE,
    element("div", { class: "bar" }, slider("query", "query", 0, tokens - 1),
      slider("block", "block", 0, blocks - 1),
      choice("lists", "lists", Object.keys(data.lists).map((kind) => [kind, kind])), play.button),
    element("details", {}, element("summary", {}, "chunks, and who adds"),
      element("div", { class: "more" }, slider("length", "queries of a chunk, at least", 8, tokens),
        choice("adds", "added by", WAYS.map((way) => [way, way])))),
    said, speech.live, picture,
    element("p", {}, "Point at a row of either mask. Below the transpose: the inverse lists of " +
      "all blocks, and who adds the queries' parts to one number of the block's d_k. Random " +
      "numbers stand for the parts."),
    element("div", { class: "actions" }, ...legend, again,
      ...savers(() => drawn(s, data, 860, palette), () => `inverse_block${s.block}`)));
  el.replaceChildren(root);

  const wide = () => Math.max(picture.clientWidth, 300);
  const values = () => ({ ...s, ...over });
  const its = () => {
    const { queries, bounds } = invert(data.lists[s.lists], blocks), { block } = values();
    return queries.slice(bounds[block], bounds[block + 1]);
  };
  const told = () => progress(values(), its(), step);

  // Up and down in the mask move the query, and to the sides the block; in the transpose, all
  // arrows move the block.
  function press(event, name) {
    const by = keyed(event, { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1,
      Home: -tokens, End: tokens });
    if (by === null) return;
    over = null;
    const isAcross = ["ArrowLeft", "ArrowRight"].includes(event.key);
    const moves = isAcross ? "block" : name, most = moves === "query" ? tokens : blocks;
    change({ [moves]: within(s[moves] + by, 0, most - 1) });
  }

  // A mouse that passes shows a row, and one that is pressed keeps it.
  for (const [target, name, count] of [[ofQueries, "query", tokens], [ofBlocks, "block", blocks]]) {
    const place = (event) => {
      const area = target.getBoundingClientRect();
      return within(((event.clientY - area.top) / area.height) * count - 0.5, 0, count - 1);
    };
    drag(target, (event) => {
      over = null;
      change({ [name]: place(event) });
    });
    target.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "mouse" || event.buttons) return;
      over = { [name]: place(event) };
      draw();
    });
    target.addEventListener("pointerleave", () => {
      if (!over) return;
      over = null;
      draw();
    });
  }

  function draw() {
    const now = values(), at = places(wide(), tokens, blocks);
    shown.innerHTML = drawn(now, data, wide(), palette, step);
    for (const [target, { x, y, each, high }, columns, rows] of [
      [ofQueries, at.mask, blocks, tokens], [ofBlocks, at.turned, tokens, blocks]])
      Object.assign(target.style, { left: `${x}px`, top: `${y}px`, width: `${columns * each}px`,
        height: `${rows * high}px` });
    said.textContent = step === Infinity ? sentence(now, data)
      : `Step ${step}: ${told().added} of ${its().length} parts are added to block ${now.block}.`;
    speech.say(said.textContent);
    ofQueries.setAttribute("aria-valuenow", now.query);
    ofBlocks.setAttribute("aria-valuenow", now.block);
    for (const target of [ofQueries, ofBlocks])
      target.setAttribute("aria-valuetext", said.textContent);
    again.hidden = now.adds === WAYS[0];
    controls.tell(s);
  }
  return begin(root, state, speech, play);
}

export default { render };
