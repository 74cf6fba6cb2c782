// Pictures that several views draw: a canvas that is drawn again when it has another width or theme,
// columns, bars, tables.

/**
 * A canvas of some height. `draw(context, width, height)` draws it; `at(x, y)` is what lies there,
 * a number, or null; `lines(number)` says it in words; arrows move on, Enter and a click pick.
 */
function picture({ height, draw, at, lines, move, pick, label, first = "\u00a0" }) {
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": label });
  const said = h("p", { class: "said quiet", "aria-live": "polite" }, first);
  let marked = null;
  let width = 0;
  const paint = () => {
    if (!width) return;
    const tall = typeof height === "function" ? height(width) : height;
    const dense = devicePixelRatio || 1;
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(tall * dense);
    canvas.style.height = `${tall}px`;
    const context = canvas.getContext("2d");
    context.scale(dense, dense);
    draw(context, width, tall, marked);
  };
  const mark = (number, event) => {
    if (number !== marked) {
      marked = number;
      paint();
    }
    const found = number === null ? [] : lines(number);
    said.textContent = found.join(" · ") || first;
    if (event) tell(event, ...found);
  };
  canvas.addEventListener("pointermove", (event) => mark(at(event.offsetX, event.offsetY, width), event));
  canvas.addEventListener("pointerleave", (event) => mark(null, event));
  canvas.addEventListener("blur", () => tell());
  canvas.addEventListener("click", () => marked !== null && pick?.(marked));
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (steps[event.key]) {
      event.preventDefault();
      mark(marked === null ? 0 : move(marked, ...steps[event.key]));
    } else if (event.key === "Enter" && marked !== null) pick?.(marked);
  });
  new ResizeObserver(([entry]) => {
    const wide = Math.floor(entry.contentRect.width);
    if (wide === width) return;
    width = wide;
    requestAnimationFrame(paint);
  }).observe(canvas);
  redraws.add(paint);
  return h("figure", { class: "picture" }, canvas, said);
}

/**
 * Columns side by side, stacked where there are several series ({name, tint, values}).
 * Of more than there are pixels each pixel shows the largest.
 */
function columns({ series, lines, label, height = 120, pick, most = 0 }) {
  const count = series[0].values.length;
  const totals = Array.from({ length: count }, (_, at) => sum(series.map(({ values }) => values[at] ?? 0)));
  const top = totals.reduce((high, total) => Math.max(high, total), most) || 1;
  const wide = (width) => Math.min(width / Math.max(count, 1), 72);
  return picture({
    height,
    label,
    lines,
    pick,
    first: count > 1 ? `${lines(0)[0]} … ${lines(count - 1)[0]}` : "\u00a0",
    draw(context, width, tall, marked) {
      const each = wide(width);
      const gap = each > 6 ? Math.min(each * 0.2, 4) : 0;
      if (marked !== null) {
        context.fillStyle = ink("hover");
        context.fillRect(marked * each, 0, Math.max(each, 1), tall);
      }
      for (let at = 0; at < count; at += 1) {
        let bottom = tall - 1;
        for (const { tint: colour, values } of series) {
          const size = ((values[at] ?? 0) / top) * (tall - 4);
          if (!size) continue;
          context.fillStyle = typeof colour === "function" ? colour(at) : colour;
          const drawn = Math.max(size, 1);
          context.fillRect(at * each + gap / 2, bottom - drawn, Math.max(each - gap, 1), drawn);
          bottom -= drawn;
        }
      }
      context.fillStyle = ink("line");
      context.fillRect(0, tall - 1, Math.min(width, each * count), 1);
    },
    at(x, _, width) {
      const found = Math.floor(x / wide(width));
      return found >= 0 && found < count ? found : null;
    },
    move: (marked, right, down) => Math.min(count - 1, Math.max(0, marked + right + down * 10)),
  });
}

/** A line of parts of a whole, with a legend. */
function stacked(rows) {
  const all = sum(rows.map((row) => row.value));
  const strip = h("div", { class: "strip", role: "img", "aria-label": rows.map((row) => `${row.name} ${percent(row.value, all)}`).join(", ") });
  const legend = h("ul", { class: "legend" });
  for (const row of rows) {
    const style = { width: `${all ? (100 * row.value) / all : 0}%`, background: row.tint };
    strip.append(h("div", { style, onpointermove: (event) => tell(event, row.name, row.text, percent(row.value, all)), onpointerleave: () => tell() }));
    legend.append(h("li", null, h("i", { style: { background: row.tint } }), `${row.name} `, h("b", null, row.text), h("span", { class: "quiet" }, ` ${percent(row.value, all)}`)));
  }
  return [strip, legend];
}

/** Names and values, such as those at the head of a view. */
function factList(rows) {
  return h(
    "dl",
    { class: "facts" },
    rows.filter(Boolean).map(([name, value, more]) => h("div", null, h("dt", null, name), h("dd", null, value, more ? h("small", null, more) : null))),
  );
}

const card = (title, ...children) => h("section", { class: "card" }, h("h2", null, title), children);

function table(head, rows, { numbers = [] } = {}) {
  const cell = (tag) => (value, at) => h(tag, numbers.includes(at) ? { class: "number" } : null, value);
  return h("div", { class: "scroll" }, h("table", { class: "rows" }, h("thead", null, h("tr", null, head.map(cell("th")))), h("tbody", null, rows.map((row) => h("tr", null, row.map(cell("td")))))));
}

/** The first rows of many, and a button that shows more of them. */
function some(rows, make, head, { most = 200, numbers = [] } = {}) {
  const shownTable = table(head, rows.slice(0, most).map(make), { numbers });
  if (rows.length <= most) return shownTable;
  let end = most;
  const more = h("button", { type: "button", class: "more" }, `${whole(rows.length - end)} more`);
  more.addEventListener("click", () => {
    const made = table([], rows.slice(end, end + 5 * most).map(make), { numbers });
    shownTable.querySelector("tbody").append(...made.querySelectorAll("tbody > tr"));
    end += 5 * most;
    if (end >= rows.length) more.remove();
    else more.textContent = `${whole(rows.length - end)} more`;
  });
  return [shownTable, more];
}
