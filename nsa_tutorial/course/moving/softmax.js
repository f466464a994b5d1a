// Online softmax, chunk by chunk: a row of scores is read four at a time, and the old sum changes
// its unit whenever the maximum rises. Take the maximum away, lift the first chunk, and fp32 ends.
//
// The first half is arithmetic and needs no page; tests hold it against
// course/widgets/online_softmax.py. The second half draws.

// -- arithmetic --

export const CHUNK = 4;
export const SCORES = [2, 4, 1, 3, 3, 5, 2, 4, 1, 3, 4, 2, 6, 7, 4, 5, 3, 2, 5, 4, 7, 6, 8, 5];
export const CHUNKS = SCORES.length / CHUNK;
export const REFERENCES = ["running max", "chunk's own max", "no max"];
export const HIGHEST_LIFT = 160; // log2 units
const f = Math.fround; // every result is rounded to fp32, as a kernel's are

// The scores in log2 units, the first chunk lifted.
export const lifted = (lift) => SCORES.map((score, key) => score + (key < CHUNK ? lift : 0));

// The state after each chunk. A key's value is its number, so the output is the mean position of
// what is attended to; `exact` is that in fp64.
export function walk(lift, reference) {
  const scores = lifted(lift), moments = [];
  let scores_max = -Infinity, running_sum = 0, acc_o = 0, parts = [];
  for (let first = 0; first < scores.length; first += CHUNK) {
    const acc_s = scores.slice(first, first + CHUNK), before = scores_max;
    const own = Math.max(...acc_s);
    scores_max = { "running max": Math.max(before, own), "chunk's own max": own, "no max": 0 }[
      reference];
    const scores_scale = reference === "no max" ? 1 : f(2 ** (before - scores_max));
    const p = acc_s.map((score) => f(2 ** (score - scores_max)));
    const sum = p.reduce((a, b) => f(a + b), 0);
    parts = [...parts.map((part) => f(part * scores_scale)), sum];
    running_sum = f(f(running_sum * scores_scale) + sum);
    acc_o = f(f(acc_o * scores_scale) +
      p.reduce((total, power, i) => f(total + f(power * (first + i))), 0));
    const seen = scores.slice(0, first + CHUNK), top = Math.max(...seen);
    const weights = seen.map((score) => 2 ** (score - top));
    const exact = weights.reduce((total, weight, key) => total + weight * key, 0) /
      weights.reduce((a, b) => a + b, 0);
    const o = f(acc_o / running_sum);
    moments.push({ scores_max, scores_scale, parts, running_sum, acc_o, exact, o });
  }
  return moments;
}

export const isRight = ({ o, exact }) =>
  Number.isFinite(o) &&
  Math.abs(o - exact) <= Math.max(1e-5 * Math.max(Math.abs(o), Math.abs(exact)), 1e-5);

export function settle(state) {
  return bringInto(() => ({ step: { low: 1, high: CHUNKS }, reference: REFERENCES,
    lift: { low: 0, high: HIGHEST_LIFT } }), state);
}

// -- words --

// Three digits (four, never 1e+3); huge and tiny numbers as a power of two, its exponent cut.
export function number(x) {
  if (Number.isNaN(x)) return "NaN";
  const size = Math.abs(x);
  if (size === Infinity) return x < 0 ? "-inf" : "inf";
  if (size >= 999.5 && size < 1e4) return x.toFixed(0);
  if (x === 0) return "0";
  if (size > 1e-4 && size < 1e4) {
    const scale = 10 ** (2 - Math.floor(Math.log10(size)));
    return String(evenly(x * scale) / scale);
  }
  return `2^${Math.trunc(10 * Math.log2(x)) / 10}`;
}

export function sentence(s) {
  const now = walk(s.lift, s.reference)[s.step - 1], words = number;
  const from = s.reference === "no max" ? "nothing subtracted"
    : `scores_max ${words(now.scores_max)}, scores_scale ${words(now.scores_scale)}`;
  const told = `After chunk ${s.step} of ${CHUNKS}: ${from}, running_sum ` +
    `${words(now.running_sum)}, acc_o ${words(now.acc_o)}, so o = ${words(now.o)}`;
  return isRight(now) ? `${told}, which is right.`
    : `${told}, and ${words(now.exact)} would be right: something passed 2^128, where fp32 ends.`;
}

// -- drawing --

const STYLE = `
.nsa-softmax .drawn { cursor: ew-resize; touch-action: pan-y; }
.nsa-softmax .drawn svg { height: auto; }
.nsa-softmax .said { min-height: 2.8em; font-variant-numeric: tabular-nums; }
@container (max-width: 699px) { .nsa-softmax .said { min-height: 5.6em; } }
`;
const HIGH = 400;
const UNBROKEN = 10; // a lift up to which one axis shows all scores

// From a score to its height on the axis, and the axis' end: a chunk that is lifted far is brought
// nearer by a break.
function heights(lift) {
  const highest = Math.max(...SCORES);
  if (lift <= UNBROKEN) return [(score) => score, Math.max(highest, lift + 4) * 1.2];
  return [(score) => (score <= highest ? score : highest + 2 + score - lift), highest + 8];
}

// The picture as SVG, `wide` pixels wide.
function drawn(s, wide, palette) {
  const now = walk(s.lift, s.reference).slice(0, s.step), scores = lifted(s.lift);
  const left = 26, each = (wide - left - 4) / SCORES.length, per = each * CHUNK;
  const { box, write, line, svg } = sheet(palette);
  const kind = (chunk) => (chunk + 1 < s.step ? "key" : chunk + 1 === s.step ? "query" : "masked");

  // scores, and what they are measured from
  const [place, end] = heights(s.lift), foot = 170, unit = 146 / end;
  write(left, 14, "scores, log2 units", "start");
  scores.forEach((score, key) => {
    const chunk = Math.floor(key / CHUNK), x = left + key * each, tall = place(score) * unit;
    box(x + 0.12 * each, foot - tall, 0.76 * each, tall, kind(chunk));
    if (each >= 11 * String(score).length - 2)
      write(x + each / 2, foot + 14, score);
    if (s.lift > UNBROKEN && key < CHUNK)
      box(x, foot - (Math.max(...SCORES) + 1.8) * unit, each, 5, "#ffffff");
  });
  if (s.lift > UNBROKEN) write(left - 10, foot - (Math.max(...SCORES) + 1.2) * unit, "≈");
  if (s.reference !== "no max")
    now.forEach(({ scores_max }, chunk) => {
      const y = foot - place(scores_max) * unit;
      line(`M${left + chunk * per} ${y}h${per}`, "text", 2.5);
    });

  // the denominator after each chunk, cut into what each chunk contributes to it now
  const floor = 344, room = 120, usual = walk(s.lift, "running max");
  const most = 1.25 * Math.max(...usual.map((moment) => moment.running_sum));
  write(left, 206, "running_sum after each chunk", "start");
  now.forEach((moment, chunk) => {
    const x = left + chunk * per, inner = 0.16 * per, middle = x + per / 2;
    const told = number(moment.running_sum), beyond = moment.running_sum >= most;
    if (!Number.isFinite(moment.running_sum)) {
      box(x + inner, floor - room, per - 2 * inner, room, "none",
        `stroke="${palette.faint}" stroke-dasharray="5 4"`);
      write(middle, floor - room / 2, told);
    } else {
      let y = floor;
      const scale = room / (beyond ? moment.running_sum : most);
      moment.parts.forEach((part, of) => {
        y -= part * scale;
        box(x + inner, y, per - 2 * inner, part * scale, of === chunk ? "query" : "key",
          'stroke="#ffffff"');
      });
      write(middle, Math.max(y - 5, 220), `${told}${beyond ? " ↑" : ""}`);
    }
    write(middle, floor + 18, `× ${number(moment.scores_scale)}`);
    write(middle, floor + 35, `+ ${number(moment.parts.at(-1))}`);
  });
  for (const y of [foot, floor])
    line(`M${left} ${y}H${wide - 4}`);
  return svg(wide, HIGH);
}

function render({ model, el }) {
  const palette = model.get("palette");
  let s;
  const state = inStep(model, settle, (now) => {
    s = now;
    draw();
  });
  const { change } = state, speech = speaker(), controls = controlsFor(change);
  const { slider, choice } = controls;
  let first = 0;
  const play = player(() => (first = s.step < CHUNKS ? s.step : 1), (passed, calm) => {
    const step = first + Math.floor(passed / (calm ? 1600 : 900));
    if (step !== s.step) change({ step: Math.min(step, CHUNKS) });
    return step <= CHUNKS;
  }, () => draw());
  const said = element("p", { class: "said" });
  const picture = element("div", { class: "drawn", tabindex: 0, role: "slider", onkeydown: press,
    "aria-label": "chunks read, in the picture", "aria-valuemin": 1, "aria-valuemax": CHUNKS });
  const names = [["read before", "key"], ["just read", "query"], ["not read yet", "masked"]];
  const legend = names.map(([told, name]) =>
    element("span", { class: "swatch", style: `--colour:${palette[name]}` }, told));
  const root = figureRoot("softmax", STYLE,
    element("div", { class: "bar" }, slider("step", "chunks read", 1, CHUNKS),
      choice("reference", "measured from", REFERENCES.map((name) => [name, name])),
      slider("lift", "lift of chunk 1", 0, HIGHEST_LIFT), play.button),
    said, speech.live, picture,
    element("p", {}, "× scores_scale: the old sum changes its unit (blue). + scores_sum: the " +
      "chunk's own terms (orange). The line is what scores are measured from."),
    element("div", { class: "actions" }, ...legend,
      ...savers(() => drawn(s, 820, palette), () => `softmax_chunk${s.step}`)));
  el.replaceChildren(root);

  function press(event) {
    const by = keyed(event, { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1,
      Home: -CHUNKS, End: CHUNKS });
    if (by === null) return;
    play.stop();
    change({ step: within(s.step + by, 1, CHUNKS) });
  }
  drag(picture, (event) => {
    play.stop();
    const box = picture.getBoundingClientRect(), across = (event.clientX - box.left - 26);
    const step = Math.floor((across / (box.width - 30)) * CHUNKS) + 1;
    change({ step: within(step, 1, CHUNKS) });
  });

  function draw() {
    picture.innerHTML = drawn(s, Math.max(picture.clientWidth, 300), palette);
    said.textContent = sentence(s);
    speech.say(said.textContent);
    picture.setAttribute("aria-valuenow", s.step);
    picture.setAttribute("aria-valuetext", said.textContent);
    controls.tell(s);
  }
  return begin(root, state, speech, play);
}

export default { render };
