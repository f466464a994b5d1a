// What a reader could not read or name on a page: a list of sentences.
() => {
  const found = new Set();
  const parts = (colour) => (colour.match(/[\d.]+/g) ?? []).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  // the first ground that is not transparent, on the way up
  const grounds = new Map([[null, [255, 255, 255]]]);
  const ground = (element) => {
    if (!grounds.has(element)) {
      const [r, g, b, alpha = 1] = parts(getComputedStyle(element).backgroundColor);
      grounds.set(element, alpha > 0.95 ? [r, g, b] : ground(element.parentElement));
    }
    return grounds.get(element);
  };
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true }) || element.closest("script, style, mjx-container, .nsa-moving, kbd, .search-button__kbd-shortcut")) continue;
    const style = getComputedStyle(element);
    const [low, high] = [light(parts(style.color).slice(0, 3)), light(ground(element))].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    if (contrast < least) {
      const where = `${element.tagName.toLowerCase()}.${element.className}`;
      found.add(`contrast ${contrast.toFixed(2)} of ${where} "${text.slice(0, 30)}"`);
    }
  }
  for (const one of document.querySelectorAll("main a[href], main button, main input, main summary")) {
    const name = one.textContent.trim() || one.labels?.[0]?.textContent || one.ariaLabel || one.title || one.placeholder;
    if (!name && one.checkVisibility({ visibilityProperty: true, opacityProperty: true })) found.add(`no name: ${one.outerHTML.slice(0, 80)}`);
  }
  for (const one of document.querySelectorAll("main img")) {
    if (!one.alt) found.add(`no text: ${one.outerHTML.slice(0, 80)}`);
  }
  return [...found];
}
