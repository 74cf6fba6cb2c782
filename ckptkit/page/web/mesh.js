// The ranks of a strategy as a picture: the last axes from left to right, those before downwards.

const MOST_ACROSS = 128;
const MOST_DRAWN = 1 << 17;

/** Where each rank is drawn: how many axes lie across, and how many cells that makes. */
function arrangement(axes) {
  const sizes = axes.map((axis) => axis[2]);
  const world = product(sizes);
  let across = 1;
  let first = sizes.length;
  while (first > 0 && (first === sizes.length || across * sizes[first - 1] <= Math.max(16, Math.sqrt(world) * 1.5))) {
    first -= 1;
    across *= sizes[first];
  }
  const wrap = across > MOST_ACROSS ? MOST_ACROSS : across;
  return { sizes, world, first, across, wrap, rows: Math.ceil(across / wrap) * (world / across) };
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
  const plan = arrangement(strategy.axes);
  const { sizes, world, first, across, wrap, rows } = plan;
  if (world > MOST_DRAWN) return h("p", { class: "quiet" }, "Too many ranks to draw.");
  const wraps = Math.ceil(across / wrap);
  let xs = null;
  let ys = null;
  const measure = (width) => {
    let cell = Math.min(34, Math.max(2, width / wrap));
    do {
      xs = offsets(wrap, wraps > 1 ? [] : sizes.slice(first), cell);
      cell *= 0.94;
    } while (xs[wrap] > width && cell > 1.5);
    cell /= 0.94;
    ys = offsets(rows, wraps > 1 ? [rows] : sizes.slice(0, first), Math.min(cell, 26));
    return ys[rows];
  };
  const place = (rank) => {
    const column = rank % across;
    return [column % wrap, Math.floor(rank / across) * wraps + Math.floor(column / wrap)];
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
    draw(context, width, tall, marked) {
      measure(width);
      const cell = Math.min(xs[1], ys[1]);
      const round = cell > 12 ? 3 : 0;
      const line = cell > 6 ? 2 : cell > 3 ? 1 : 0;
      context.font = `${Math.min(11, cell * 0.4)}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      for (let rank = 0; rank < world; rank += 1) {
        const [column, row] = place(rank);
        context.fillStyle = colour(rank);
        context.beginPath();
        context.roundRect(xs[column], ys[row], xs[1] - line, ys[1] - line, round);
        context.fill();
        if (cell >= 20) {
          context.fillStyle = ink("on-tint");
          context.fillText(String(rank), xs[column] + (xs[1] - line) / 2, ys[row] + (ys[1] - line) / 2);
        }
      }
      if (marked !== null) {
        const [column, row] = place(marked);
        context.strokeStyle = ink("ink");
        context.lineWidth = 2;
        context.strokeRect(xs[column] - 1, ys[row] - 1, xs[1] - line + 2, ys[1] - line + 2);
      }
    },
    at(x, y, width) {
      measure(width);
      const [column, row] = [find(xs, x), find(ys, y)];
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
  const { first, across, wrap } = arrangement(strategy.axes);
  const said = (axes) => axes.map(([name, kind, size]) => `${name === kind ? name : `${name} (${kind})`} ${size}`).join(" × ");
  const right = said(strategy.axes.slice(first));
  const down = said(strategy.axes.slice(0, first));
  const wrapped = across > wrap ? `, ${wrap} in a row` : "";
  if (!right) return "one rank";
  return `${right} from left to right${wrapped}${down ? `, ${down} from top to bottom` : ""}`;
}

/** A rank in words: its place on every axis. */
function rankWords(strategy, rank) {
  const coords = [];
  let rest = rank;
  for (let axis = strategy.axes.length - 1; axis >= 0; axis -= 1) {
    coords.unshift(`${strategy.axes[axis][0]} ${rest % strategy.axes[axis][2]}`);
    rest = Math.floor(rest / strategy.axes[axis][2]);
  }
  return [`rank ${rank}`, ...(coords.length ? [coords.join(" · ")] : [])];
}

/** The colour of a rank: its place on one axis, or on the last one. */
function rankTint(strategy, rank, axis = strategy.axes.length - 1) {
  if (axis < 0) return tint(0, 1);
  const inner = product(strategy.axes.slice(axis + 1).map((each) => each[2]));
  return tint(Math.floor(rank / inner) % strategy.axes[axis][2], strategy.axes[axis][2]);
}

// A rank that was picked is picked in all views.
let picked = 0;
