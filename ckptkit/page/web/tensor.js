// One array: its shape cut by ranks and chunks, what a rank holds, what cuts it, what it is like.

/** The first ones of many. */
const firstOf = (list, most = 8) => (list.length > most ? [...list.slice(0, most), "…"] : list);

/** What an axis does to an array, in words. */
function placementWords([name, , size], placement, shape) {
  const unit = placement.unit ? `, in units of ${whole(placement.unit)}` : "";
  const blocks = placement.blocks ? `, each of its blocks ${firstOf(placement.blocks).map((block) => (typeof block === "number" ? whole(block) : block)).join(" + ")} for itself` : "";
  const words = {
    replicate: () => "each rank has all of it",
    shard: () => `cuts dim ${placement.dim} (${whole(shape[placement.dim])}) into ${size}${blocks}${unit}`,
    strided: () => `cuts dim ${placement.dim} into ${size}, after the axes to the right of it${unit}`,
    owner: () => `only rank ${placement.coord} of the axis has it`,
    stage: () => `only stage ${placement.coord} of the pipeline has it`,
  };
  return [`${name} ${size}`, h("code", null, inShort(placement.text, 80)), words[placement.kind]()];
}

/** The two dims that are drawn: those that are cut, else the last ones. */
function drawnDims(layout) {
  const dims = layout.dims.map((dim, at) => at);
  const wanted = [...dims].sort((a, b) => (layout.dims[b].cuts.length > 0) - (layout.dims[a].cuts.length > 0) || b - a).slice(0, 2);
  return wanted.sort((a, b) => a - b);
}

const NOTHING = { intervals: [[0, 1]], coords: {}, holders: 1 };

/** A plane through an array: the pieces downwards and across, and the ranks that hold each of both. */
class Plane {
  constructor(source, number) {
    this.kind = source.kinds[number];
    this.layout = layoutOf(source, number);
    this.drawn = drawnDims(this.layout);
    this.index = this.layout.shape.map(() => 0);
  }

  /** Along a dim that is drawn, or the only one where there is none. */
  along(which) {
    const dim = this.drawn.length === 2 ? this.drawn[which] : which ? this.drawn[0] : undefined;
    if (dim === undefined) return { length: 1, pieces: [NOTHING], borders: [] };
    return { dim, length: this.layout.shape[dim], pieces: this.layout.dims[dim].pieces(), borders: this.borders(dim) };
  }

  borders(dim) {
    const { shape, edges } = this.kind.chunks;
    if (edges) return edges[dim];
    if (!shape || this.kind.counts[dim] > 2000) return [];
    return Array.from({ length: Math.max(0, this.kind.counts[dim] - 1) }, (_, at) => (at + 1) * shape[dim]);
  }

  /** The coordinates of who holds a piece downwards and one across, where the plane lies. */
  coords(down, right) {
    const found = { ...down.coords, ...right.coords, ...Object.fromEntries(this.layout.holders) };
    this.layout.dims.forEach((dim, at) => {
      if (this.drawn.includes(at)) return;
      const piece = dim.pieces().find(({ intervals }) => intervals.some(([a, b]) => a <= this.index[at] && this.index[at] < b));
      Object.assign(found, piece?.coords);
    });
    return found;
  }

  /** How many ranks hold exactly what a rank holds. */
  holders(coords) {
    const { axes, dims, holders } = this.layout;
    const cutting = new Set(holders.map(([axis]) => axis));
    let count = 1;
    for (const dim of dims) {
      const key = dim.intervals(axes.map((_, axis) => coords[axis] ?? 0)).join(";");
      count *= dim.pieces().find(({ intervals }) => intervals.join(";") === key)?.holders ?? 0;
      for (const cut of dim.cuts) cutting.add(cut.axis);
    }
    return product(axes.map((axis, at) => (cutting.has(at) ? 1 : axis[2]))) * count;
  }
}

function boxText(box) {
  return `[${box.map(([a, b]) => `${a}:${b}`).join(", ")}]`;
}

function tensorPicture(plane, strategy, onPick) {
  const [down, right] = [plane.along(0), plane.along(1)];
  const across = right.pieces.length;
  const count = down.pieces.length * across;
  const tall = (width) => (plane.drawn.length < 2 ? 64 : Math.max(90, Math.min(width * 0.9, 420, (width * down.length) / Math.max(right.length, 1))));
  const rectangles = (down_, right_, width, height, use) => {
    for (const [a, b] of down_.intervals) {
      for (const [c, d] of right_.intervals) {
        const x = (c / right.length) * width;
        const y = (a / down.length) * height;
        use(x, y, ((d - c) / right.length) * width, ((b - a) / down.length) * height);
      }
    }
  };
  const crossing = (number) => [down.pieces[Math.floor(number / across)], right.pieces[number % across]];
  const rankOf = (number) => plane.layout.rankOf(plane.coords(...crossing(number)));
  const figure = picture({
    height: tall,
    label: `The array of shape ${shapeText(plane.layout.shape)}, cut into ${counted(plane.layout.parts, "part")}`,
    draw(context, width, height, marked) {
      context.fillStyle = ink("hover");
      context.fillRect(0, 0, width, height);
      down.pieces.forEach((below, row) => {
        right.pieces.forEach((beside, column) => {
          context.fillStyle = tint(row * across + column, count);
          rectangles(below, beside, width, height, (x, y, w, tall_) => context.fillRect(x, y, w, tall_));
        });
      });
      context.strokeStyle = ink("chunk");
      context.lineWidth = 1;
      context.beginPath();
      if (down.borders && down.borders.length < height / 4) for (const at of down.borders) line(0, Math.round((at / down.length) * height) + 0.5, width, null);
      if (right.borders && right.borders.length < width / 4) for (const at of right.borders) line(Math.round((at / right.length) * width) + 0.5, 0, null, height);
      context.stroke();
      function line(x, y, x2, y2) {
        context.moveTo(x, y);
        context.lineTo(x2 ?? x, y2 ?? y);
      }
      const outlined = (colour, wide, below, beside) => {
        context.strokeStyle = colour;
        context.lineWidth = wide;
        rectangles(below, beside, width, height, (x, y, w, tall_) => context.strokeRect(x + wide / 2, y + wide / 2, Math.max(1, w - wide), Math.max(1, tall_ - wide)));
      };
      const own = plane.layout.part(picked < plane.layout.world ? picked : 0);
      const runs = (which) => ({ intervals: which.dim === undefined ? [[0, 1]] : own.runs[which.dim] });
      if (own.boxes && count > 1) outlined(ink("ink"), 2.5, runs(down), runs(right));
      if (marked !== null && marked < count) outlined(ink("accent"), 2, ...crossing(marked));
      const label = (text, x, y, w, tall_) => {
        if (w < 28 || tall_ < 14) return;
        context.fillStyle = ink("on-tint");
        context.fillText(text, x + w / 2, y + tall_ / 2);
      };
      if (count > 64 || count < 2) return;
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "center";
      context.textBaseline = "middle";
      for (let number = 0; number < count; number += 1) {
        rectangles(...crossing(number), width, height, (x, y, w, tall_) => label(String(rankOf(number)), x, y, w, tall_));
      }
    },
    at(x, y, width) {
      const row = (y / tall(width)) * down.length;
      const column = (x / width) * right.length;
      const inside = ({ intervals }, at) => intervals.some(([a, b]) => a <= at && at < b);
      const i = down.pieces.findIndex((piece) => inside(piece, row));
      const j = right.pieces.findIndex((piece) => inside(piece, column));
      return i < 0 || j < 0 ? null : i * across + j;
    },
    lines(number) {
      const coords = plane.coords(...crossing(number));
      const rank = plane.layout.rankOf(coords);
      const others = plane.holders(coords) - 1;
      const part = plane.layout.part(rank);
      const boxes = boxesOf(part, 3).map(boxText);
      return [`${rankWords(strategy, rank).join(" · ")}${others > 0 ? ` and ${whole(others)} more` : ""}`, `part ${shapeText(part.shape)}, ${bytes(part.size * plane.kind.itemsize)}`, `${boxes.join(" ")}${part.boxes > 3 ? ` +${part.boxes - 3}` : ""}`];
    },
    move: (marked, rightwards, downwards) => Math.min(count - 1, Math.max(0, marked + rightwards + downwards * across)),
    pick: (number) => onPick(rankOf(number)),
  });
  return count ? figure : h("p", { class: "quiet" }, "No elements: there is nothing to draw.");
}

function heldList(plane, strategy) {
  const rank = Math.min(picked, plane.layout.world - 1);
  const part = plane.layout.part(rank);
  const boxes = boxesOf(part, 24);
  return [
    factList([
      ["rank", `${rank}`, rankWords(strategy, rank)[1] ?? ""],
      ["holds", part.boxes ? shapeText(part.shape) : "nothing of it", part.boxes ? `${bytes(part.size * plane.kind.itemsize)} in ${part.boxes === 1 ? "1 box" : `${whole(part.boxes)} boxes`}` : ""],
    ]),
    boxes.length ? h("p", { class: "boxes" }, boxes.map((box) => h("code", null, boxText(box))), part.boxes > boxes.length ? ` and ${whole(part.boxes - boxes.length)} more` : null) : null,
  ];
}

/** The picture of an array before or after, its rank, its plane. */
function cutCard(source, number, title, why) {
  const strategy = meshOf(source.strategy);
  const plane = new Plane(source, number);
  const kind = source.kinds[number];
  const box = h("div");
  const told = h("div", { class: "told" });
  const rank = h("input", { type: "number", min: 0, max: plane.layout.world - 1, value: Math.min(picked, plane.layout.world - 1), "aria-label": "Rank" });
  const draw = () => {
    box.replaceChildren(tensorPicture(plane, strategy, choose));
    told.replaceChildren(...heldList(plane, strategy).filter(Boolean));
  };
  const choose = (chosen) => {
    picked = Math.min(Math.max(0, Math.floor(chosen) || 0), plane.layout.world - 1);
    rank.value = picked;
    draw();
  };
  rank.addEventListener("input", () => choose(Number(rank.value)));
  const planes = plane.layout.shape.map((length, dim) => {
    if (plane.drawn.includes(dim)) return null;
    const at = h("input", { type: "number", min: 0, max: Math.max(0, length - 1), value: 0, "aria-label": `Index of dim ${dim}` });
    at.addEventListener("input", () => {
      plane.index[dim] = Math.min(Math.max(0, Math.floor(Number(at.value)) || 0), length - 1);
      draw();
    });
    return h("label", null, `dim ${dim} at `, at);
  });
  draw();
  const overlaps = plane.layout.dims.some((dim) => sum(dim.pieces().map(({ intervals }) => lengthOf(intervals))) > dim.length);
  const [down, right] = plane.drawn.length === 2 ? plane.drawn : [undefined, plane.drawn[0]];
  const says = [down === undefined ? null : `dim ${down} (${whole(kind.shape[down])}) downwards`, right === undefined ? null : `dim ${right} (${whole(kind.shape[right])}) across`].filter(Boolean).join(", ");
  const chunk = kind.chunks.shape ? `chunks of ${shapeText(kind.chunks.shape)}` : "of several lengths";
  const rules = strategy.axes.map((axis, at) => placementWords(axis, source.placements[kind.placements][at], kind.shape));
  return card(
    title,
    h("div", { class: "line" }, h("label", null, "rank ", rank), planes, h("span", { class: "quiet" }, `${says}${says ? "; " : ""}colours are parts, lines are chunks`)),
    box,
    told,
    overlaps ? h("p", { class: "quiet" }, "Parts overlap: some blocks are shared by more ranks than others. Each place has the colour of the last part that has it.") : null,
    factList([["parts", whole(plane.layout.parts), `the first ${shapeText(plane.layout.part(plane.layout.firstRank).shape)}`], ["chunks", whole(product(kind.counts)), chunk]]),
    h("h2", null, "What cuts it"),
    rules.length ? table(["axis", "placement", "what it does"], rules) : h("p", { class: "quiet" }, step.strategy ? "One rank: nothing cuts it." : "Nothing is known of what cuts it."),
    why ? h("p", null, "Decided by: ", h("b", null, printable(why))) : null,
  );
}

/** The range of a bar of the histogram, in words. */
function barText(at, half, power) {
  if (at === half) return `near 0: below 2^${power - half}`;
  const exponent = power - half + Math.abs(at - half);
  return `${at < half ? "−" : ""}2^${exponent - 1} to ${at < half ? "−" : ""}2^${exponent}`;
}

function statisticsCard(at) {
  const row = facts.statistics?.[step.alias[at] >= 0 ? step.alias[at] : at];
  if (!row) return null;
  const [least, most, mean, zeros, nans, infinite, power, histogram] = row;
  const half = (histogram.length - 1) / 2;
  const { shape, dtype } = step.kinds[step.kind[at]];
  const numbers = product(shape) * (dtype.startsWith("complex") ? 2 : 1); // both parts count
  return card(
    "What its numbers are like",
    factList([["min", amount(least)], ["max", amount(most)], ["mean", amount(mean)], ["zeros", whole(zeros), percent(zeros, numbers)], ["NaN", whole(nans)], ["infinite", whole(infinite)]]),
    histogram.length
      ? columns({ series: [{ values: histogram, tint: (bar) => (bar === half ? ink("line") : tint(0, 1)) }], label: "Histogram by powers of two", height: 110, lines: (bar) => [barText(bar, half, power), `${(histogram[bar] / 9.99).toFixed(1)} % of the highest bar`] })
      : h("p", { class: "quiet" }, zeros ? "All that are finite are zero." : "No finite number."),
    histogram.length ? h("p", { class: "quiet" }, "Each bar is a power of two: large negative numbers left, near zero in the middle, large positive ones right.") : null,
  );
}

function showTensor(given) {
  const at = Number(given);
  if (!Number.isInteger(at) || at < 0 || at >= step.names.length) return h("p", { class: "alarm" }, "No such array.");
  const kind = step.kinds[step.kind[at]];
  const members = step.members[step.fold[at]];
  const place = members.indexOf(at);
  const turn = (by, text) => {
    const next = members[place + by];
    return h("button", { type: "button", disabled: next === undefined, onclick: () => go(`tensor/${next}`) }, text);
  };
  const of = step.of[at];
  const plan = facts.plan;
  const after = plan && plan.kind[at] >= 0 ? cutCard(plan, plan.kind[at], `After: ${plan.strategy.text}`, plan.whys[plan.why[at]]) : null;
  return [
    h("div", { class: "line" }, h("h2", { class: "big" }, named(step.names[at])), members.length > 1 ? h("span", { class: "line" }, turn(-1, "‹ before"), h("span", { class: "quiet" }, `${whole(place + 1)} of ${whole(members.length)} alike`), turn(1, "next ›")) : null),
    factList([
      ["shape", shapeText(kind.shape), counted(product(kind.shape), "element")],
      ["dtype", kind.dtype],
      ["size", bytes(kind.bytes), `${whole(kind.bytes)} bytes`],
      ["role", kind.role, of !== -1 && kind.role === "optimizer" ? ["of ", named(typeof of === "number" ? step.names[of] : of)] : ""],
      step.alias[at] >= 0 ? ["tied to", link(`tensor/${step.alias[at]}`, named(step.names[step.alias[at]]))] : null,
      step.theirs?.[at] ? ["in its files", named(step.theirs[at])] : null,
    ]),
    h("div", { class: "cards" }, cutCard(step, step.kind[at], after ? `Before: ${strategyText(step.strategy)}` : `Cut by ${strategyText(step.strategy)}`), after, statisticsCard(at)),
    link("tensors", "‹ all arrays"),
  ];
}

views.tensor = { title: "Array", key: false, when: () => true, show: showTensor };
