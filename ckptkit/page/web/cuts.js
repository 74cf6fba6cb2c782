// Which boxes a rank holds: the arithmetic of ckptkit/model/cut.py and layout.py. Placements are
// shipped, boxes are not: 8,192 ranks have millions.

const lengthOf = (intervals) => sum(intervals.map(([start, stop]) => stop - start));

/** How many neighbours hold the same piece: more ranks than heads. */
function groupOf(cut, length) {
  const units = Math.floor(length / cut.unit);
  return cut.unit > 1 && units > 0 && units < cut.size ? Math.floor(cut.size / units) : 1;
}

function spanOf(cut, block, coord) {
  const group = groupOf(cut, block);
  const units = Math.floor(block / cut.unit);
  const length = group > 1 ? cut.unit : Math.ceil(units / cut.size) * cut.unit;
  const place = Math.floor(coord / group);
  return [Math.min(place * length, block), Math.min((place + 1) * length, block)];
}

/** What the rank at a coordinate gets of some intervals. */
function pieceOf(cut, intervals, coord) {
  const found = [];
  let base = 0;
  for (const block of cut.blocks ?? [lengthOf(intervals)]) {
    const [start, stop] = spanOf(cut, block, coord);
    let before = 0;
    for (const [a, b] of intervals) {
      const low = Math.max(base + start - before, 0);
      const high = Math.min(base + stop - before, b - a);
      if (low < high) {
        const last = found.at(-1);
        if (last && last[1] === a + low) last[1] = a + high;
        else found.push([a + low, a + high]);
      }
      before += b - a;
    }
    base += block;
  }
  return found;
}

/** The coordinates of a rank, or of anything that is numbered through axes of these sizes. */
function coordsOf(sizes, number) {
  const found = [];
  for (let axis = sizes.length - 1; axis >= 0; axis -= 1) {
    found.unshift(number % sizes[axis]);
    number = Math.floor(number / sizes[axis]);
  }
  return found;
}

/** One dim of a tensor, and the axes that cut it, in the order in which they do. */
class Dim {
  constructor(number, length, axes, placements) {
    this.length = length;
    this.cuts = [];
    this.known = new Map();
    this.sizes = new Map();
    for (let axis = axes.length - 1; axis >= 0; axis -= 1) {
      const placement = placements[axis];
      if (placement.dim !== number) continue;
      const cut = { axis, size: axes[axis][2], blocks: placement.blocks ?? null, unit: placement.unit ?? 1 };
      if (placement.kind === "shard") this.cuts.unshift(cut);
      else this.cuts.push(cut);
    }
  }

  intervals(coords) {
    const key = this.cuts.map((cut) => coords[cut.axis]).join();
    if (!this.known.has(key)) {
      let found = this.length ? [[0, this.length]] : [];
      for (const cut of this.cuts) found = pieceOf(cut, found, coords[cut.axis]);
      this.known.set(key, found);
    }
    return this.known.get(key);
  }

  /** How long its intervals are together; of many ranks, so they are looked up. */
  size(coords) {
    let key = 0;
    for (const cut of this.cuts) key = key * cut.size + coords[cut.axis];
    if (!this.sizes.has(key)) this.sizes.set(key, lengthOf(this.intervals(coords)));
    return this.sizes.get(key);
  }

  /** Every different piece that is not empty: its intervals, and the first coordinates that hold it. */
  pieces() {
    if (this.distinct) return this.distinct;
    const found = new Map();
    const order = [...this.cuts].sort((a, b) => a.axis - b.axis);
    const sizes = order.map((cut) => cut.size);
    const total = product(sizes);
    for (let number = 0; number < total; number += 1) {
      const coords = {};
      coordsOf(sizes, number).forEach((coord, at) => {
        coords[order[at].axis] = coord;
      });
      const intervals = this.intervals(coords);
      const key = intervals.join(";");
      if (intervals.length && !found.has(key)) found.set(key, { intervals, coords, holders: 0 });
      if (intervals.length) found.get(key).holders += 1;
    }
    this.distinct = [...found.values()];
    return this.distinct;
  }
}

/** How tensors of one shape and some placements lie on the ranks of a mesh. */
class Layout {
  constructor(shape, axes, placements) {
    this.shape = shape;
    this.axes = axes;
    this.sizes = axes.map((axis) => axis[2]);
    this.world = product(this.sizes);
    this.dims = shape.map((length, dim) => new Dim(dim, length, axes, placements));
    this.holders = [];
    placements.forEach((placement, axis) => {
      if (placement.kind === "owner" || placement.kind === "stage") this.holders.push([axis, placement.coord]);
    });
  }

  rankOf(coords) {
    return this.sizes.reduce((rank, size, at) => rank * size + (coords[at] ?? 0), 0);
  }

  holds(coords) {
    return this.holders.every(([axis, coord]) => coords[axis] === coord);
  }

  get firstRank() {
    return this.rankOf(Object.fromEntries(this.holders));
  }

  /** What a rank holds: the shape of its part, and per dim the intervals that its boxes are made of. */
  part(rank) {
    const coords = coordsOf(this.sizes, rank);
    const runs = this.dims.map((dim) => dim.intervals(coords));
    const shape = runs.map(lengthOf);
    if (!this.holds(coords)) return { shape: shape.length ? [0, ...shape.slice(1)] : [], runs, boxes: 0, size: 0 };
    return { shape, runs, boxes: product(runs.map((run) => run.length)), size: product(shape) };
  }

  /** How many different parts there are. */
  get parts() {
    return product(this.dims.map((dim) => dim.pieces().length));
  }

  /** The number of elements of every rank, added to what is there already, times a factor. */
  addSizes(totals, factor) {
    const cut = this.dims.filter((dim) => dim.cuts.length);
    const plain = product(this.dims.filter((dim) => !dim.cuts.length).map((dim) => dim.length)) * factor;
    if (!plain) return;
    for (let rank = 0; rank < this.world; rank += 1) {
      const coords = coordsOf(this.sizes, rank);
      if (!this.holds(coords)) continue;
      let size = plain;
      for (const dim of cut) size *= dim.size(coords);
      totals[rank] += size;
    }
  }
}

const layouts = new Map();

/** The layout of a kind of the step (`source`) or of the plan. */
function layoutOf(source, number) {
  const key = `${source === step ? "s" : "p"}${number}`;
  if (!layouts.has(key)) {
    const kind = source.kinds[number];
    const axes = source.strategy?.axes ?? [];
    layouts.set(key, new Layout(kind.shape, axes, source.placements[kind.placements]));
  }
  return layouts.get(key);
}

/** A list of the boxes of a part, as many as are wanted. */
function boxesOf(part, most) {
  const found = [];
  if (!part.boxes) return found;
  const at = part.runs.map(() => 0);
  while (found.length < most) {
    found.push(part.runs.map((run, dim) => run[at[dim]]));
    let dim = at.length - 1;
    while (dim >= 0 && at[dim] + 1 === part.runs[dim].length) {
      at[dim] = 0;
      dim -= 1;
    }
    if (dim < 0) break;
    at[dim] += 1;
  }
  return found;
}
