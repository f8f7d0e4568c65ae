// Measures every chart of every frame, and writes what is wrong into the page: "[[[charts|problem|problem]]]".
addEventListener('load', () => {
  const problems = [];
  let charts = 0;
  let labels = 0;
  const series = ['#0072B2', '#D55E00', '#00875F', '#B4508F', '#9A6B00', '#3F94CC', '#2F3439', '#858B93'];
  const known = [...series, '#FFFFFF', '#1B1F24', '#57606A', '#E1E4E8', 'none', null];
  for (const frame of document.querySelectorAll('iframe')) {
    const page = frame.contentDocument;
    const where = `at ${frame.width}`;
    // Everything is to be seen.
    for (const details of page.querySelectorAll('details')) details.open = true;
    const root = page.documentElement;
    if (root.scrollWidth > root.clientWidth) problems.push(`${where}: the page scrolls sideways: ${root.scrollWidth}`);
    if (page.title.includes('hurt') || page.querySelector('script, img')) problems.push(`${where}: a name became an element`);
    const shown = [...page.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width > 0);
    if (frame === document.querySelector('iframe')) charts = shown.length;
    if (shown.length !== charts) problems.push(`${where}: ${shown.length} charts are shown, not ${charts}`);
    for (const [number, svg] of shown.entries()) {
      const chart = `${where}: chart ${number + 1}`;
      const around = svg.getBoundingClientRect();
      const scale = around.width / svg.viewBox.baseVal.width;
      const name = element => `"${element.textContent.trim().slice(0, 60)}"`;
      const outside = (box, name) => {
        const slack = 0.75;
        if (box.left < around.left - slack || box.right > around.right + slack ||
            box.top < around.top - slack || box.bottom > around.bottom + slack) {
          problems.push(`${chart}: ${name} is outside: ${[box.left - around.left, box.top - around.top,
            box.right - around.left, box.bottom - around.top].map(Math.round)} of ${Math.round(around.width)} x ${Math.round(around.height)}`);
        }
      };
      if (svg.getAttribute('role') !== 'img' || !svg.getAttribute('aria-label')) problems.push(`${chart}: it is not described`);
      if (around.right > root.clientWidth + 1) problems.push(`${chart}: it is wider than the page, sideways`);
      const texts = [...svg.querySelectorAll('text')].filter(text => text.textContent.trim());
      labels += texts.length;
      if (texts.length < 2) problems.push(`${chart}: no labels`);
      const boxes = texts.map(text => text.getBoundingClientRect());
      texts.forEach((text, at) => {
        outside(boxes[at], name(text));
        const size = parseFloat(page.defaultView.getComputedStyle(text).fontSize) * scale;
        if (size < (frame.width < 340 ? 9.5 : 10.9)) problems.push(`${chart}: ${name(text)} is small: ${size.toFixed(1)} px`);
        for (let other = 0; other < at; other++) {
          const wide = Math.min(boxes[at].right, boxes[other].right) - Math.max(boxes[at].left, boxes[other].left);
          const high = Math.min(boxes[at].bottom, boxes[other].bottom) - Math.max(boxes[at].top, boxes[other].top);
          // The boxes of lines of text are higher than their letters.
          if (wide > 1.5 && high > 4 * scale) problems.push(`${chart}: ${name(text)} and ${name(texts[other])} overlap by ${wide.toFixed(1)} x ${high.toFixed(1)}`);
        }
      });
      const marks = [...svg.querySelectorAll('circle, polygon, rect')].filter(mark => series.includes(mark.getAttribute('fill')));
      // (A chart of the peaks alone has roofs.)
      const roofs = svg.querySelectorAll('[stroke="#1B1F24"]').length;
      if (marks.length + roofs === 0) problems.push(`${chart}: no marks`);
      if (svg.querySelectorAll('polyline, line').length === 0) problems.push(`${chart}: no axes`);
      for (const mark of svg.querySelectorAll('circle, polygon, rect, polyline, line')) outside(mark.getBoundingClientRect(), `a ${mark.nodeName}`);
      for (const part of svg.querySelectorAll('[fill], [stroke]')) {
        for (const colour of [part.getAttribute('fill'), part.getAttribute('stroke')]) {
          if (!known.includes(colour)) problems.push(`${chart}: the colour ${colour} has no rule`);
        }
      }
    }
  }
  const most = problems.slice(0, 60).map(encodeURIComponent);
  const text = [encodeURIComponent(`${charts} charts, ${labels} labels at all widths`), ...most].join('|');
  document.body.textContent = `[[[${text}]]]`;
});
