// Split-KV: one query, and its keys cut into parts. Each program leaves an output and a
// log-sum-exp, and a second kernel merges them. More parts take less time, and keep more of a GPU
// busy; a short text leaves some of them empty.
//
// The first half is arithmetic and needs no page; tests hold it against exact/online_softmax.py.
// The second half draws.

// -- arithmetic --

export const WAYS = ["exp(lse - lse_max)", "exp(lse)", "equal weights"];
export const TEXTS = [1, 2, 4, 8, 16, 32];
export const MOST_PARTS = 12;
export const HIGHEST_LIFT = 100;
const f = Math.fround; // results are rounded to fp32, as a kernel's are

// The keys of each part: equal shares, in whole steps; the last ones may be short, or empty.
export function cut(tokens, parts, step) {
  const share = Math.ceil(Math.ceil(tokens / parts) / step) * step;
  return Array.from({ length: parts }, (_, part) =>
    [Math.min(part * share, tokens), Math.min((part + 1) * share, tokens)]);
}

// What a program leaves. A key's value is its number, so o is the mean position of what is
// attended to. Without keys, o is 0 and lse is -inf.
export function partOf(scores, lift, [first, last]) {
  const mine = scores.slice(first, last).map((score) => score + lift);
  const scores_max = Math.max(...mine); // -inf without keys
  const p = mine.map((score) => f(Math.exp(score - scores_max)));
  const sum = p.reduce((a, b) => f(a + b), 0);
  const acc_o = p.reduce((total, power, i) => f(total + f(power * (first + i))), 0);
  return { first, last, lse: mine.length ? f(scores_max + Math.log(sum)) : -Infinity,
    o: mine.length ? f(acc_o / sum) : 0 };
}

// The parts' weights, by one of WAYS, and the output that they give.
export function merge(parts, way) {
  const lse_max = Math.max(...parts.map(({ lse }) => lse));
  const shift = lse_max === -Infinity ? 0 : lse_max;
  const weights = parts.map(({ lse }) => f({ [WAYS[0]]: Math.exp(lse - shift),
    [WAYS[1]]: Math.exp(lse), [WAYS[2]]: 1 }[way]));
  const total = weights.reduce((a, b) => f(a + b), 0);
  const sum = parts.reduce((acc, { o }, i) => f(acc + f(weights[i] * o)), 0);
  return { lse_max, weights, total, o: f(sum / total) };
}

// Parts, merge, what is right, and the programs of all texts.
export function look(s, data) {
  const { scores, step, heads, multiprocessors } = data;
  const parts = cut(s.tokens, s.parts, step).map((keys) => partOf(scores, s.lift, keys));
  const merged = merge(parts, s.weights);
  const right = partOf(scores, 0, [0, s.tokens]).o;
  const steps = Math.ceil((parts[0].last - parts[0].first) / step);
  const programs = s.texts * heads * s.parts;
  return { parts, merged, right, steps, alone: Math.ceil(s.tokens / step), programs,
    busy: Math.min(programs, multiprocessors),
    empty: parts.filter(({ lse }) => lse === -Infinity).length,
    isRight: Math.abs(merged.o - right) <= 1e-4 * right + 1e-4 };
}

export const settle = (state, data) => bringInto(() => ({
  tokens: { low: 1, high: data.scores.length },
  parts: { low: 1, high: MOST_PARTS },
  texts: TEXTS,
  weights: WAYS,
  lift: { low: 0, high: HIGHEST_LIFT },
}), state);

// -- words --

const many = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
export const number = (x, digits = 2) => (Number.isNaN(x) ? "NaN"
  : x === Infinity ? "inf" : x === -Infinity ? "−inf" : x.toFixed(digits).replace("-", "−"));

export function sentence(s, data) {
  const { merged, right, steps, alone, programs, busy, empty, isRight } = look(s, data);
  const who = s.parts === 1 ? "one program walks" : `${s.parts} programs walk`;
  const walk = `${who} ${many(s.tokens, "key")} in ${many(steps, "step")}` +
    (steps < alone ? `, not ${alone}` : "");
  const none = !empty ? ""
    : ` ${empty === 1 ? "One part is" : `${empty} parts are`} empty: lse −inf, weight 0.`;
  const result = isRight ? `o = ${number(merged.o)}, as without parts.`
    : `o = ${number(merged.o)}, and ${number(right)} would be right` +
      (s.weights === WAYS[1] ? ": exp(lse) is past the largest fp32."
        : empty ? ": a part counts by its sum of exp, and an empty one not at all."
          : ": a part counts by its sum of exp.");
  return `A KV head's ${walk}.${s.weights === WAYS[2] ? none.replace(", weight 0", "") : none} ` +
    `${result} ${many(s.texts, "text")} × ${data.heads} KV heads × ${many(s.parts, "part")} = ` +
    `${programs} programs, so ${busy} of ${data.multiprocessors} multiprocessors have work.`;
}

// -- drawing --

const STYLE = `
.nsa-split .drawn { cursor: ew-resize; touch-action: pan-y; }
.nsa-split .drawn svg { height: auto; }
.nsa-split .said { min-height: 7em; font-variant-numeric: tabular-nums; }
@container (min-width: 700px) { .nsa-split .said { min-height: 2.8em; } }
`;
const LEFT = 50;
const ROW = 27;

// The picture as SVG, `wide` pixels wide. `step` steps are done; after the last one, the merge.
function drawn(s, data, wide, palette, step = Infinity) {
  const { parts, merged, steps, alone, busy, programs } = look(s, data), { scores } = data;
  const { box, write, line, svg } = sheet(palette), N = scores.length;
  const low = Math.min(...scores) - 0.4, high = Math.max(...scores);
  const square = (x, y, w, h) => `M${x.toFixed(1)} ${y.toFixed(1)}h${w}v${h}h-${w}z`;
  const fill = (shape, colour) =>
    shape && line(shape, "none", 0, `style="fill:${palette[colour]}"`);
  const bars = (x, y, each, tall, [first, last], from, colour) => {
    let shape = "";
    for (let key = first; key < last; key++) {
      const h = (tall * (scores[key] - low)) / (high - low);
      shape += square(x + (key - from) * each, y + tall - h, (each * 0.8).toFixed(1), h.toFixed(1));
    }
    fill(shape, colour);
  };

  // the cache, and where it is cut
  const each = (wide - LEFT - 6) / N;
  write(LEFT, 14, `scores of the ${s.tokens} keys in the cache`, "start");
  bars(LEFT, 22, each, 46, [0, s.tokens], 0, "key");
  bars(LEFT, 22, each, 46, [s.tokens, N], 0, "masked");
  line(`M${LEFT} 68H${wide - 6}`);
  for (const { first, last } of parts)
    if (first && last > first) line(`M${LEFT + first * each - 0.5} 22v50`, "text", 1.5);
  const end = LEFT + s.tokens * each;
  line(`M${end} 18v58`, "query", 2.5);
  line(`M${end} 84l-6 -8h12z`, "query", 1, `style="fill:${palette.query}"`);

  // a row for each program
  const isWide = wide >= 600, [forLse, forBar, forO] = isWide ? [64, 140, 60] : [50, 66, 42];
  const results = wide - 6 - forLse - forBar - forO, unit = (results - LEFT - 8) / N, top = 128;
  const isDone = step > steps, most = Math.max(...merged.weights.filter(Number.isFinite), 1e-30);
  write(LEFT, top - 8, isWide ? "a program for each part, all at once: time goes to the right"
    : "a program each: time →", "start");
  if (steps < alone) {
    const x = LEFT + s.tokens * unit;
    line(`M${x} ${top}v${parts.length * ROW - 8}`, "line", 1, 'stroke-dasharray="4 4"');
    const told = isWide ? `${many(steps, "step")}; without parts, it would take ${alone}`
      : `not ${alone}`;
    const room = 6.5 * told.length + 12, rows = LEFT + parts[0].last * unit;
    const isLeft = x - room > rows, y = top + parts.length * ROW - 12;
    if (isLeft) write(x - 6, y, told, "end");
    else if (x + room < results) write(x + 6, y, told, "start");
  }
  write(results + forLse - 8, top - 8, "lse", "end");
  write(results + forLse, top - 8, "weight", "start");
  write(wide - 6, top - 8, "o", "end");
  parts.forEach(({ first, last, lse, o }, part) => {
    const y = top + part * ROW, read = Math.min(first + step * data.step, last);
    write(LEFT - 6, y + 15, isWide ? `part ${part}` : part, "end");
    bars(LEFT, y, unit, ROW - 7, [first, read], first, "key");
    bars(LEFT, y, unit, ROW - 7, [read, last], first, "masked");
    line(`M${LEFT} ${y + ROW - 6.5}h${Math.max((last - first) * unit, 2)}`);
    if (step >= steps) {
      write(results + forLse - 8, y + 15, number(lse), "end");
      write(wide - 6, y + 15, number(o, 1), "end");
    }
    if (!isDone) return;
    const weight = merged.weights[part], share = Number.isFinite(weight) ? weight / most : 1;
    box(results + forLse, y + 3, Math.max(share * (forBar - 46), weight ? 1 : 0), ROW - 12, "query",
      Number.isFinite(weight) ? "" : 'opacity="0.35"');
    write(results + forLse + share * (forBar - 46) + 4, y + 15,
      weight > 1e4 && weight < Infinity ? weight.toExponential(0).replace("e+", "e")
        : number(weight), "start");
  });

  // the merge, and the multiprocessors
  let y = top + parts.length * ROW + 12;
  line(`M${LEFT} ${y - 10}H${wide - 6}`);
  write(isWide ? results + forLse - 8 : LEFT, y + 6, isDone
    ? `sum of weight × o, over ${number(merged.total)}:`.replace("over", "divided by")
    : step >= steps ? "the merge follows" : "adding up …", isWide ? "end" : "start");
  if (isDone) write(wide - 6, y + 6, number(merged.o), "end", "text", 'font-weight="bold"');
  y += 30;
  write(LEFT, y, `${programs} programs: ${busy} of ${data.multiprocessors} multiprocessors have ` +
    "work", "start");
  const columns = isWide ? 66 : 44, side = Math.min((wide - LEFT - 6) / columns, 11);
  const some = (first, last) => Array.from({ length: last - first }, (_, i) => first + i)
    .map((i) => square(LEFT + (i % columns) * side, y + 8 + Math.floor(i / columns) * side,
      (side - 1.5).toFixed(1), (side - 1.5).toFixed(1))).join("");
  fill(some(0, busy), "selected");
  fill(some(busy, data.multiprocessors), "masked");
  return svg(wide, Math.ceil(y + 14 + Math.ceil(data.multiprocessors / columns) * side));
}

function render({ model, el }) {
  const palette = model.get("palette"), data = model.get("data"), N = data.scores.length;
  let s, step = Infinity;
  const state = inStep(model, (values) => settle(values, data), (now) => {
    s = now;
    draw();
  });
  const { change } = state, speech = speaker(), controls = controlsFor(change);
  const { slider, choice } = controls;
  const play = player(() => (step = 0), (passed, calm) => {
    step = Math.floor(passed / (calm ? 1600 : 400));
    draw();
    return step <= look(s, data).steps + 1;
  }, () => {
    step = Infinity;
    draw();
  });
  const said = element("p", { class: "said" });
  const picture = element("div", { class: "drawn", tabindex: 0, role: "slider", onkeydown: press,
    "aria-label": "tokens in the cache, in the picture", "aria-valuemin": 1, "aria-valuemax": N });
  const names = [["read", "key"], ["not read yet, or not there", "masked"], ["weight", "query"],
    ["multiprocessors with work", "selected"]];
  const legend = names.map(([told, name]) =>
    element("span", { class: "swatch", style: `--colour:${palette[name]}` }, told));
  const root = figureRoot("split", STYLE,
    element("div", { class: "bar" }, slider("parts", "parts", 1, MOST_PARTS),
      slider("tokens", "tokens", 1, N), slider("texts", "texts", 0, TEXTS.length - 1, TEXTS),
      play.button),
    element("details", {}, element("summary", {}, "how the parts are merged"),
      element("div", { class: "more" }, choice("weights", "weights", WAYS.map((way) => [way, way])),
        slider("lift", "added to every score", 0, HIGHEST_LIFT))),
    said, speech.live, picture,
    element("p", {}, "Drag the end of the cache. A key's value is its number, so an output says " +
      "where the query looks. The scores are those of a trained head."),
    element("div", { class: "actions" }, ...legend,
      ...savers(() => drawn(s, data, 820, palette), () => `split_${s.parts}_parts`)));
  el.replaceChildren(root);

  function press(event) {
    const by = keyed(event, { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1,
      PageDown: -8, PageUp: 8, Home: -N, End: N });
    if (by === null) return;
    play.stop();
    change({ tokens: within(s.tokens + by, 1, N) });
  }
  drag(picture, (event) => {
    play.stop();
    const area = picture.getBoundingClientRect();
    const share = (event.clientX - area.left - LEFT) / (area.width - LEFT - 6);
    change({ tokens: within(share * N, 1, N) });
  });

  function draw() {
    picture.innerHTML = drawn(s, data, Math.max(picture.clientWidth, 300), palette, step);
    const { steps } = look(s, data);
    said.textContent = step === Infinity ? sentence(s, data)
      : step < steps ? `Step ${step} of ${steps}: each program has read up to ` +
        `${step * data.step} keys.`
        : "All programs are done. Now the second kernel merges what they left.";
    speech.say(said.textContent);
    picture.setAttribute("aria-valuenow", s.tokens);
    picture.setAttribute("aria-valuetext", said.textContent);
    controls.tell(s);
  }
  return begin(root, state, speech, play);
}

export default { render };
