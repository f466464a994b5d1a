// What all figures share: elements, a style, controls, and a state in step with the model's.
// It stands before each figure's module, in one text with it.

const BASE = `
.nsa-moving { color: #1F2328; color-scheme: light; container-type: inline-size; font: 14px/1.4
  system-ui, sans-serif; max-width: 1080px; }
.nsa-moving * { box-sizing: border-box; }
.nsa-moving p { margin: 6px 0; }
.nsa-moving .bar, .nsa-moving .more { display: grid; gap: 4px 18px; align-items: center;
  grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); }
.nsa-moving .more { grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); }
@container (max-width: 500px) { .nsa-moving .bar { grid-template-columns: 1fr; } }
.nsa-moving label { display: flex; gap: 8px; align-items: center; min-height: 28px; }
.nsa-moving label span { white-space: nowrap; }
.nsa-moving label .value { min-width: 3ch; text-align: right; font-variant-numeric: tabular-nums; }
.nsa-moving input[type=range] { flex: 1; min-width: 60px; margin: 0; accent-color: #0072B2; }
.nsa-moving select { flex: 1; min-width: 60px; font: inherit; }
.nsa-moving button { font: inherit; color: inherit; background: #F3F4F6; border: 1px solid #848D97;
  border-radius: 6px; padding: 3px 10px; min-height: 30px; cursor: pointer; min-width: 64px;
  justify-self: start; }
.nsa-moving :focus-visible { outline: 3px solid #C75000; outline-offset: 2px; }
.nsa-moving summary { cursor: pointer; padding: 3px 0; }
.nsa-moving .said { min-height: 4.2em; }
.nsa-moving .unseen { position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); }
.nsa-moving :is(canvas, svg) { display: block; width: 100%; }
.nsa-moving .actions { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center;
  margin: 6px 0; }
.nsa-moving .swatch::before { content: ""; display: inline-block; width: 12px; height: 12px;
  margin-right: 6px; border: 1px solid #656D76; background: var(--colour); }
`;

function element(tag, facts = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(facts))
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A whole number from low to high; what is no number is `low`.
const within = (value, low, high) =>
  Math.min(Math.max(Math.round(Number(value)) || low, low), high);

// The next whole number; halves go to the even one, as Python's do.
const evenly = (x) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x));

// A state brought into range, and what had to move, in words. `ranges(s)` has by name
// `{ low, high }` or a list of what is allowed, given the names before it. A number that is not in
// its list becomes the next lower one there.
function bringInto(ranges, state) {
  const s = { ...state }, moved = [];
  for (const name of Object.keys(ranges(s))) {
    const allowed = ranges(s)[name];
    if (!Array.isArray(allowed)) s[name] = within(s[name], allowed.low, allowed.high);
    else if (!allowed.includes(s[name]))
      s[name] = allowed.filter((x) => x <= Math.round(Number(s[name]))).at(-1) ?? allowed[0];
    if (s[name] !== state[name]) moved.push(`${name} ${state[name]} becomes ${s[name]}`);
  }
  return { s, moved };
}

// A figure's own element. JupyterLab would take an arrow in it for a shortcut, and is told not to.
// With Control or another modifier, a key stays JupyterLab's: Control+S saves.
function figureRoot(name, style, ...children) {
  const facts = { class: `nsa-moving nsa-${name}` };
  const root = element("div", facts, element("style", {}, BASE + style), ...children);
  const kept = new WeakRef(root);
  const decide = (event) => {
    const isOwn = !(event.ctrlKey || event.metaKey || event.altKey);
    if (!kept.deref()) window.removeEventListener("keydown", decide, true);
    else if (kept.deref().contains(event.target))
      event.target.toggleAttribute("data-lm-suppress-shortcuts", isOwn);
  };
  window.addEventListener("keydown", decide, true);
  return root;
}

// A file for the reader to keep.
function download(address, name) {
  element("a", { href: address, download: name }).click();
}

// An SVG as the file that it is, or as pixels, two for each of its own.
function saveAs(kind, svg, name) {
  const address = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  const done = () => setTimeout(() => URL.revokeObjectURL(address), 1000);
  if (kind === "SVG") {
    download(address, `${name}.svg`);
    return done();
  }
  const image = new Image();
  image.onload = () => {
    const drawn = element("canvas", { width: 2 * image.width, height: 2 * image.height });
    drawn.getContext("2d").drawImage(image, 0, 0, drawn.width, drawn.height);
    download(drawn.toDataURL("image/png"), `${name}.png`);
    done();
  };
  image.src = address;
}

// Two buttons that save what `svg()` gives, under the name that `name()` gives.
const savers = (svg, name) => ["PNG", "SVG"].map((kind) =>
  element("button", { type: "button", onclick: () => saveAs(kind, svg(), name()) },
    `Save ${kind}`));

const rgb = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
const hex = (parts) => `#${parts.map((x) => Math.round(x).toString(16).padStart(2, "0")).join("")}`;
// So much of a colour on white.
const mix = (colour, share) => hex(rgb(colour).map((x) => share * x + (1 - share) * 255));

const escaped = (x) => String(x).replace(/[&<]/g, (c) => (c === "&" ? "&amp;" : "&lt;"));

// Shapes of a picture in the colours of `palette`, in pixels; `svg` makes it of them.
function sheet(palette) {
  const shapes = [], add = (shape) => shapes.push(shape);
  const ink = (name) => palette[name] ?? name;
  return {
    box: (x, y, w, h, colour, more = "") => add(`<rect x="${x}" y="${y}" width="${w}" ` +
      `height="${Math.max(h, 0)}" fill="${ink(colour)}" ${more}/>`),
    write: (x, y, told, anchor = "middle", colour = "text", more = "") =>
      add(`<text x="${x}" y="${y}" fill="${ink(colour)}" text-anchor="${anchor}" ${more}>` +
        `${escaped(told)}</text>`),
    line: (path, colour = "line", wide = 1, more = "") =>
      add(`<path d="${path}" stroke="${ink(colour)}" stroke-width="${wide}" fill="none" ${more}/>`),
    area: (path, colour, more = "") => add(`<path d="${path}" fill="${ink(colour)}" ${more}/>`),
    dot: (x, y, r, colour, more = "") =>
      add(`<circle cx="${x}" cy="${y}" r="${r}" fill="${ink(colour)}" ${more}/>`),
    svg: (wide, high) =>
      `<svg xmlns="http://www.w3.org/2000/svg" width="${wide}" height="${high}" ` +
      `font-family="sans-serif" font-size="12" aria-hidden="true">${shapes.join("")}</svg>`,
  };
}

// Pictures, one below the other on white, as one.
function stacked(...svgs) {
  const sizes = svgs.map((svg) =>
    /width="([\d.]+)" height="([\d.]+)"/.exec(svg).slice(1).map(Number));
  const wide = Math.max(...sizes.map(([w]) => w)), high = sizes.reduce((sum, [, h]) => sum + h, 0);
  let y = 0;
  const parts = svgs.map((svg, i) => {
    const placed = svg.replace("<svg ", `<svg y="${y}" `);
    y += sizes[i][1];
    return placed;
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${wide}" height="${high}" role="img">` +
    `<rect width="100%" height="100%" fill="#fff"/>${parts.join("")}</svg>`;
}

// Controls by name: each calls `change({ name: value })`, and `tell(state)` sets them all.
function controlsFor(change) {
  const all = [];
  const add = (name, told, made, how, read, write) => {
    made.addEventListener(how, () => change({ [name]: read() }));
    const value = element("span", { class: "value" });
    all.push({ name, made, write, value: made.type === "range" ? value : null });
    const label = element("label", {}, element("span", {}, told), made);
    if (made.type === "range") label.append(value);
    return label;
  };
  return {
    // `values`, if given, are what the slider's steps stand for
    slider(name, told, low, high, values = null) {
      const facts = { type: "range", min: low, max: high, "aria-label": told };
      const made = element("input", facts);
      return add(name, told, made, "input",
        () => (values ? values[made.value] : Number(made.value)),
        (value) => (made.value = values ? values.indexOf(value) : value));
    },
    choice(name, told, options) {
      const list = options.map(([value, text]) => element("option", { value }, text));
      const made = element("select", { "aria-label": told }, ...list);
      return add(name, told, made, "change",
        () => options.find(([value]) => String(value) === made.value)[0],
        (value) => (made.value = value));
    },
    flag(name, told) {
      const made = element("input", { type: "checkbox", "aria-label": told });
      return add(name, told, made, "change", () => made.checked, (on) => (made.checked = on));
    },
    tell(state, most = {}) {
      for (const { name, made, write, value } of all) {
        if (name in most) made.max = most[name];
        write(state[name]);
        if (value) value.textContent = state[name].toLocaleString("en");
      }
    },
  };
}

// A sentence that is read out once it has stood for a moment.
function speaker() {
  const live = element("p", { class: "unseen", role: "status", "aria-live": "polite" });
  let waiting;
  return {
    live,
    say: (text) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => (live.textContent = text), 500);
    },
    end: () => clearTimeout(waiting),
  };
}

// The state that is drawn, in step with the model's. `settle(values)` gives it as `s`, brought into
// range, and what `moved`, in words; `show(s, moved)` draws it.
function inStep(model, settle, show) {
  const names = Object.keys(model.get("start"));
  const read = () => Object.fromEntries(names.map((name) => [name, model.get(name)]));
  let { s, moved } = settle(read()), saving, sending = false;
  const send = () => {
    sending = true;
    for (const name of names) model.set(name, s[name]);
    sending = false;
    model.save_changes();
  };
  const listen = () => {
    const now = read();
    if (sending || names.every((name) => now[name] === s[name])) return;
    ({ s, moved } = settle(now));
    show(s, moved);
    if (moved.length) send();
  };
  for (const name of names) model.on(`change:${name}`, listen);
  return {
    names,
    draw: () => show(s, moved),
    change(values) {
      ({ s, moved } = settle({ ...s, ...values }));
      show(s, moved);
      clearTimeout(saving);
      saving = setTimeout(send, 60);
    },
    end() {
      clearTimeout(saving);
      for (const name of names) model.off(`change:${name}`, listen);
    },
  };
}

// How far a key goes, by `moves`; null for a key that is not among them. Those are the figure's.
function keyed(event, moves) {
  if (!(event.key in moves)) return null;
  event.preventDefault();
  event.stopPropagation();
  return moves[event.key];
}

// Calls `move(event)` while a pointer is held down on `target`. Where a finger may scroll the page,
// it moves nothing before it has gone sideways or has been lifted.
function drag(target, move) {
  let held = null, from = null; // `from`: where a finger began that may yet scroll
  target.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    held = event.pointerId;
    target.setPointerCapture(held);
    const mayScroll = event.pointerType === "touch" &&
      getComputedStyle(target).touchAction !== "none";
    from = mayScroll ? [event.clientX, event.clientY] : null;
    if (!from) move(event);
  });
  target.addEventListener("pointermove", (event) => {
    if (event.pointerId !== held) return;
    if (from && Math.abs(event.clientX - from[0]) <= Math.abs(event.clientY - from[1])) return;
    from = null;
    move(event);
  });
  target.addEventListener("pointerup", (event) => event.pointerId === held && move(event));
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"])
    target.addEventListener(end, () => (held = null));
}

// A button that calls `step(milliseconds, calm)` until it returns false: each frame, or each 800 ms
// where motion is unwelcome.
function player(began, step, ended) {
  let waiting = null;
  const button = element("button", { type: "button" }, "Play");
  const stop = () => {
    if (waiting === null) return;
    cancelAnimationFrame(waiting);
    clearTimeout(waiting);
    waiting = null;
    button.textContent = "Play";
    ended();
  };
  button.addEventListener("click", () => {
    if (waiting !== null) return stop();
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches, start = performance.now();
    const next = () => {
      if (!step(performance.now() - start, calm)) return stop();
      waiting = calm ? setTimeout(next, 800) : requestAnimationFrame(next);
    };
    button.textContent = "Stop";
    waiting = 0;
    began();
    next();
  });
  return { button, stop };
}

// Draws a figure, and again when its width changes; returns what ends it.
function begin(root, state, speech, play) {
  const watch = new ResizeObserver(state.draw);
  watch.observe(root);
  state.draw();
  return () => {
    play.stop();
    watch.disconnect();
    speech.end();
    state.end();
  };
}
