// The definition of a term, where the mouse or the keyboard is on it; and paper shows every fold.
"use strict";

function definitions() {
  const box = document.createElement("div");
  box.id = "definition";
  box.setAttribute("role", "tooltip");
  box.hidden = true;
  document.body.append(box);
  const show = (term) => {
    box.textContent = term.dataset.definition;
    box.hidden = false;
    const at = term.getBoundingClientRect();
    const left = Math.min(at.left, document.documentElement.clientWidth - box.offsetWidth - 8);
    box.style.left = `${Math.max(8, left) + window.scrollX}px`;
    box.style.top = `${at.bottom + 6 + window.scrollY}px`;
    term.setAttribute("aria-describedby", box.id);
  };
  const hide = (term) => {
    box.hidden = true;
    term.removeAttribute("aria-describedby");
  };
  for (const term of document.querySelectorAll("a.term")) {
    term.dataset.definition = term.title;
    term.removeAttribute("title");
    for (const name of ["mouseenter", "focus"]) term.addEventListener(name, () => show(term));
    for (const name of ["mouseleave", "blur"]) term.addEventListener(name, () => hide(term));
    term.addEventListener("keydown", (event) => event.key === "Escape" && hide(term));
  }
}

function folds() {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const fold of opened) fold.open = true;
  });
  addEventListener("afterprint", () => {
    for (const fold of opened) fold.open = false;
  });
}

addEventListener("DOMContentLoaded", () => {
  definitions();
  folds();
});
