// A figure on a page without a kernel: a model that holds its state, and an address that names it.
//
// `#masks?query=410&window=64` sets what differs from the figure's start. Other anchors are left
// alone.

export function startOnPage(name, values, render, el) {
  const { start } = values, heard = {}, now = { ...values };
  let writing;

  const mine = () => location.hash.startsWith(`#${name}?`);
  const typed = (key, text) =>
    typeof start[key] === "string" ? text
      : typeof start[key] === "boolean" ? text === "true"
        : Number.isFinite(Number(text)) && text ? Number(text) : start[key];
  function readAddress() {
    const found = new URLSearchParams(mine() ? location.hash.slice(name.length + 2) : "");
    const changed = [];
    for (const key of Object.keys(start)) {
      const value = found.has(key) ? typed(key, found.get(key)) : values[key];
      if (value !== now[key]) changed.push(key);
      now[key] = value;
    }
    for (const key of changed) (heard[`change:${key}`] ?? []).forEach((does) => does());
  }
  // browsers let a page change its address a hundred times in half a minute
  function writeAddress() {
    const differs = Object.keys(start).filter((key) => now[key] !== values[key]);
    if (!differs.length && !mine()) return;
    const told = new URLSearchParams(differs.map((key) => [key, now[key]]));
    try {
      history.replaceState(null, "", `#${name}?${told}`);
    } catch {
      // a frame without an address of its own
    }
  }

  if (mine()) readAddress();
  addEventListener("hashchange", () => mine() && readAddress());
  return render({
    el,
    model: {
      get: (key) => now[key],
      set: (key, value) => {
        if (now[key] === value) return;
        now[key] = value;
        (heard[`change:${key}`] ?? []).forEach((does) => does());
      },
      on: (event, does) => (heard[event] ??= []).push(does),
      off: (event, does) => (heard[event] = (heard[event] ?? []).filter((f) => f !== does)),
      save_changes: () => {
        clearTimeout(writing);
        writing = setTimeout(writeAddress, 300);
      },
    },
  });
}
