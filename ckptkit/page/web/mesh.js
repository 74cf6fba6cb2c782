// The ranks of a strategy as a picture: the last axes from left to right, those before downwards.

const MOST_ACROSS = 128;
const MOST_DOWN = 48;
const MOST_DRAWN = 1 << 17;

/**
 * Where each rank is drawn: how many axes lie across, how many cells that makes, in rows of `wrap`.
 * Many rows become blocks of `tall` rows side by side.
 */
function arrangement(axes) {
  const sizes = axes.map((axis) => axis[2]);
  const world = product(sizes);
  let across = 1;
  let first = sizes.length;
  // The last axis lies across, and those before it while there is room, and one is left to go down.
  const fits = (size) => size <= Math.sqrt(world) * 2 && size < world;
  while (first > 0 && (first === sizes.length || fits(across * sizes[first - 1]))) {
    first -= 1;
    across *= sizes[first];
  }
  const wrap = Math.min(across, MOST_ACROSS);
  const wraps = Math.ceil(across / wrap);
  const rows = wraps * (world / across);
  const tall = rows > MOST_DOWN && wraps === 1 ? Math.min(rows, Math.max(MOST_DOWN / 2, Math.ceil(Math.sqrt(world) * 0.7))) : rows;
  return { sizes, world, first, across, wrap, wraps, rows, tall, blocks: Math.ceil(rows / tall) };
}

/** Pixels before the cell of a number, with a gap where an axis inside of others begins anew. */
function offsets(count, sizes, cell) {
  const gap = cell > 8 ? 6 : cell > 4 ? 3 : 1;
  const found = new Float64Array(count + 1);
  for (let at = 1; at <= count; at += 1) {
    let inner = 1;
    let extra = 0;
    for (let axis = sizes.length - 1; axis > 0; axis -= 1) {
      inner *= sizes[axis];
      if (at % inner === 0) extra += gap;
    }
    found[at] = found[at - 1] + cell + (at < count ? extra : 0);
  }
  return found;
}

/** The picture; `colour(rank, coords)` fills a cell, `lines(rank)` says what it is. */
function meshPicture(strategy, { colour, lines, pick, label = "The mesh of ranks" }) {
  const { sizes, world, first, across, wrap, wraps, rows, tall, blocks } = arrangement(strategy.axes);
  if (world > MOST_DRAWN) return h("p", { class: "quiet" }, "Too many ranks to draw.");
  let xs = null;
  let ys = null;
  let apart = 0; // from block to block
  const measure = (width) => {
    const room = (width - 8 * (blocks - 1)) / blocks;
    let cell = Math.min(34, Math.max(1, room / wrap));
    for (;;) {
      xs = offsets(wrap, wraps > 1 ? [] : sizes.slice(first), cell);
      if (xs[wrap] <= room || cell < 1) break;
      cell *= 0.94;
    }
    ys = offsets(tall, wraps > 1 || blocks > 1 ? [] : sizes.slice(0, first), Math.min(Math.max(cell, 2), 26));
    apart = xs[wrap] + 8;
    return ys[tall];
  };
  const place = (rank) => {
    const column = rank % across;
    const row = Math.floor(rank / across) * wraps + Math.floor(column / wrap);
    return [Math.floor(row / tall) * apart + xs[column % wrap], ys[row % tall]];
  };
  const rankAt = (column, row) => Math.floor(row / wraps) * across + (row % wraps) * wrap + column;
  const find = (edges, at) => {
    let low = 0;
    let high = edges.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (edges[middle + 1] > at) high = middle;
      else low = middle + 1;
    }
    return low;
  };
  return picture({
    height: measure,
    label: `${label}: ${strategy.text}`,
    lines,
    pick,
    draw(context, width, _, marked) {
      measure(width);
      const cell = Math.min(xs[1], ys[1]);
      const round = cell > 12 ? 3 : 0;
      const line = cell > 6 ? 2 : cell > 3 ? 1 : 0;
      context.font = `${Math.min(11, cell * 0.4)}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      for (let rank = 0; rank < world; rank += 1) {
        const [x, y] = place(rank);
        context.fillStyle = colour(rank);
        context.beginPath();
        context.roundRect(x, y, xs[1] - line, ys[1] - line, round);
        context.fill();
        if (cell >= 20) {
          context.fillStyle = ink("on-tint");
          context.fillText(String(rank), x + (xs[1] - line) / 2, y + (ys[1] - line) / 2);
        }
      }
      if (marked !== null) {
        const [x, y] = place(marked);
        context.strokeStyle = ink("ink");
        context.lineWidth = 2;
        context.strokeRect(x - 1, y - 1, xs[1] - line + 2, ys[1] - line + 2);
      }
    },
    at(x, y, width) {
      measure(width);
      const block = Math.min(blocks - 1, Math.floor(x / apart));
      const [column, row] = [find(xs, x - block * apart), block * tall + find(ys, y)];
      const rank = rankAt(column, row);
      return column < wrap && row < rows && rank < world ? rank : null;
    },
    move(rank, right, down) {
      const next = rank + right + down * wrap;
      return next >= 0 && next < world ? next : rank;
    },
  });
}

/** How the picture is to be read. */
function meshWords(strategy) {
  const { first, across, wrap, blocks, tall } = arrangement(strategy.axes);
  const said = (axes) => axes.map(([name, kind, size]) => `${name === kind ? name : `${name} (${kind})`} ${size}`).join(" × ");
  const right = said(strategy.axes.slice(first));
  const down = said(strategy.axes.slice(0, first));
  const wrapped = across > wrap ? `, ${wrap} in a row` : "";
  if (!right) return "one rank";
  return `${right} from left to right${wrapped}${down ? `, ${down} from top to bottom${blocks > 1 ? ` in blocks of ${tall}` : ""}` : ""}`;
}

/** A rank in words: its place on every axis. */
function rankWords(strategy, rank) {
  const coords = coordsOf(strategy.axes.map((axis) => axis[2]), rank);
  const said = strategy.axes.map(([name], axis) => `${name} ${coords[axis]}`);
  return [`rank ${rank}`, ...(said.length ? [said.join(" · ")] : [])];
}

/** The colour of a rank: its place on one axis, or on the last one. */
function rankTint(strategy, rank, axis = strategy.axes.length - 1) {
  if (axis < 0) return tint(0, 1);
  const inner = product(strategy.axes.slice(axis + 1).map((each) => each[2]));
  return tint(Math.floor(rank / inner) % strategy.axes[axis][2], strategy.axes[axis][2]);
}

// A rank that was picked is picked in all views.
let picked = 0;
