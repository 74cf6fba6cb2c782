// The first view: what the step is, its mesh, where its bytes are, its packs and its run.

let sizes = null; // bytes of every array; 0 for the second names of tied ones

/** What follows from the columns and is asked for again and again. */
function prepare() {
  for (const kind of step.kinds) kind.bytes = product(kind.shape) * kind.itemsize;
  for (const kind of facts.plan?.kinds ?? []) kind.bytes = product(kind.shape) * kind.itemsize;
  sizes = Float64Array.from(step.kind, (kind, at) => (step.alias[at] < 0 ? step.kinds[kind].bytes : 0));
  step.members = step.folds.map(() => []);
  step.fold.forEach((fold, at) => step.members[fold].push(at));
  const order = new Intl.Collator("en", { numeric: true }).compare;
  for (const members of step.members) members.sort((a, b) => order(step.names[a], step.names[b]));
}

const meshOf = (strategy) => strategy ?? { text: "single", axes: [] };
const worldOf = (strategy) => product(meshOf(strategy).axes.map((axis) => axis[2]));
const strategyText = (strategy) => strategy?.text ?? "unknown";

/** What every rank holds in memory, in bytes; null where that would take too long to add up. */
function heldBytes(source, kinds) {
  if (source.held !== undefined) return source.held;
  const world = worldOf(source.strategy);
  const counts = new Map();
  kinds.forEach((kind, at) => {
    if (kind >= 0 && step.alias[at] < 0) counts.set(kind, (counts.get(kind) ?? 0) + 1);
  });
  source.held = counts.size * world > 4e7 ? null : new Float64Array(world);
  if (source.held) for (const [kind, count] of counts) layoutOf(source, kind).addSizes(source.held, count * source.kinds[kind].itemsize);
  return source.held;
}

/** The layer that an array belongs to, as [what is numbered, number]; null outside of layers. */
function layerOf(name) {
  const found = /^(?:[^/]*\/)?((?:[^./]+[./])*?)(\d{1,6})(?=[./])/.exec(name);
  return found ? [found[1].replace(/[./]$/, ""), Number(found[2])] : null;
}

/** The bytes of the arrays of each role, or of each dtype. */
function bytesBy(what) {
  const found = new Map();
  sizes.forEach((size, at) => {
    const key = step.kinds[step.kind[at]][what];
    found.set(key, (found.get(key) ?? 0) + size);
  });
  return found;
}

function byRole() {
  const found = bytesBy("role");
  return stacked(ROLES.filter((role) => found.has(role)).map((role) => ({ name: role, value: found.get(role), text: bytes(found.get(role)), tint: roleTint(role) })));
}

function byDtype() {
  const found = [...bytesBy("dtype")].sort((a, b) => b[1] - a[1]);
  return stacked(found.map(([name, value], at) => ({ name, value, text: bytes(value), tint: tint(at + 4, 12) })));
}

/** Layers in order, each with what `add` says of its arrays, and what is outside of them. */
function layers() {
  const found = new Map();
  step.names.forEach((name, at) => {
    const layer = layerOf(name);
    const key = layer ? layer.join("\0") : "";
    if (!found.has(key)) found.set(key, { layer, arrays: [] });
    found.get(key).arrays.push(at);
  });
  return [...found.values()].sort((a, b) => {
    if (!a.layer || !b.layer) return (a.layer ? 0 : 1) - (b.layer ? 0 : 1);
    return a.layer[0] < b.layer[0] ? -1 : a.layer[0] > b.layer[0] ? 1 : a.layer[1] - b.layer[1];
  });
}

const layerText = ({ layer }) => (layer ? `${printable(layer[0])} ${layer[1]}` : "outside of layers");

function byLayer() {
  const found = layers();
  const roles = ROLES.filter((role) => step.kinds.some((kind) => kind.role === role));
  const series = roles.map((role) => ({
    tint: roleTint(role),
    values: found.map(({ arrays }) => sum(arrays.filter((at) => step.kinds[step.kind[at]].role === role).map((at) => sizes[at]))),
  }));
  if (found.length < 2) return h("p", { class: "quiet" }, "No layers: no name has a number.");
  return columns({
    series,
    label: "Bytes of each layer",
    lines: (at) => [layerText(found[at]), ...roles.map((role, number) => `${role} ${bytes(series[number].values[at])}`)],
  });
}

function spread(values, what, { labelOf = (at) => `${what} ${at}`, tinted = null, scale = 0 } = {}) {
  const mean = sum(values) / values.length;
  const [least, most] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, 0]);
  return [
    columns({
      series: [{ tint: tinted ?? (() => tint(0, 1)), values }],
      label: `Bytes of each ${what}`,
      height: 90,
      most: scale,
      lines: (at) => [labelOf(at), bytes(values[at]), `${whole(values[at])} bytes`, `${(values[at] / (mean || 1)).toFixed(2)} times the mean`],
    }),
    factList([
      ["smallest", bytes(least)],
      ["mean", bytes(mean)],
      ["largest", bytes(most), mean ? `${(most / mean).toFixed(2)} times the mean` : ""],
      ["together", bytes(sum(values))],
    ]),
  ];
}

function packs() {
  if (!step.packs.length) return null;
  const labelOf = (at) => (step.files ? printable(step.files[at] ?? `file ${at}`) : at < worldOf(step.strategy) ? `pack of rank ${at}` : "groups.zip");
  return card(step.format ? counted(step.packs.length, "file") : counted(step.packs.length, "pack"), spread(step.packs, step.format ? "file" : "pack", { labelOf }));
}

function mesh() {
  const strategy = step.strategy;
  if (!strategy) return card("Strategy", h("p", { class: "quiet" }, "Unknown: the files do not say how they were written."));
  const held = heldBytes(step, step.kind);
  const most = held ? Math.max(largest(held), 1) : 1;
  let axis = strategy.axes.length - 1;
  const choice = h("select", { "aria-label": "Colour" }, strategy.axes.map(([name], at) => h("option", { value: at, selected: at === axis }, `colour: ${name}`)), held ? h("option", { value: -2 }, "colour: bytes held") : null);
  const box = h("div");
  const told = h("div", { class: "told" });
  const about = (rank) => {
    picked = rank;
    const coords = coordsOf(strategy.axes.map((axis) => axis[2]), rank);
    told.replaceChildren(factList([["rank", whole(rank)], ...strategy.axes.map(([name], at) => [name, String(coords[at])]), held ? ["holds", bytes(held[rank])] : null, step.packs[rank] !== undefined && !step.format ? ["its pack", bytes(step.packs[rank])] : null]));
  };
  const draw = () => {
    box.replaceChildren(
      meshPicture(strategy, {
        colour: (rank) => (axis === -2 ? heat(held[rank] / most) : rankTint(strategy, rank, axis)),
        lines: (rank) => [...rankWords(strategy, rank), ...(held ? [`holds ${bytes(held[rank])}`] : [])],
        pick: about,
      }),
    );
  };
  choice.addEventListener("change", () => {
    axis = Number(choice.value);
    draw();
  });
  draw();
  about(Math.min(picked, worldOf(strategy) - 1));
  return card(`Strategy ${strategy.text}`, h("div", { class: "line" }, h("span", { class: "quiet" }, `${counted(worldOf(strategy), "rank")}: ${meshWords(strategy)}`), strategy.axes.length ? choice : null), box, told);
}

function timeline() {
  const run = facts.run;
  if (!run?.length) return null;
  const texts = [...new Set(run.map((info) => info.strategy))];
  return card(
    `${counted(run.length, "step")} of the run`,
    columns({
      series: [{ values: run.map((info) => info.bytes), tint: (at) => (run[at].committed ? tint(texts.indexOf(run[at].strategy), texts.length) : ink("line")) }],
      label: "Bytes of the steps of the run",
      height: 80,
      lines: (at) => [`step ${run[at].step}${run[at].here ? ", shown here" : ""}`, bytes(run[at].bytes), printable(run[at].strategy || "–"), moment(run[at].time), run[at].committed ? "committed" : "not committed"],
    }),
    some(
      [...run].reverse(),
      (info) => [`${info.step}`, moment(info.time), bytes(info.bytes), printable(info.strategy || "–"), `${info.committed ? "committed" : "not committed"}${info.problem ? `, but: ${printable(info.problem)}` : ""}${info.here ? " · shown here" : ""}`],
      ["step", "saved", "size", "strategy", "state"],
      { most: 12, numbers: [0, 2] },
    ),
  );
}

function values() {
  const rows = [...step.details.map(([name, text]) => [named(name), "", named(text)]), ...step.objects.map(([name, how, text]) => [named(name), how === "replicated" ? "" : how.replace("_", " "), named(text)])];
  if (!rows.length) return null;
  const left = step.object_count - step.objects.length;
  return card("Values", some(rows, (row) => row, ["name", "", "value"], { most: 40 }), left > 0 ? h("p", { class: "quiet" }, `and ${whole(left)} more`) : null);
}

views.overview = {
  title: "Overview",
  key: true,
  when: () => true,
  show: () => {
    const stored = sum(step.packs);
    return [
      factList([
        ["size", bytes(stored), `in ${counted(step.packs.length, step.format ? "file" : "pack")}`],
        ["arrays", whole(step.names.length), bytes(sum(sizes))],
        ["strategy", strategyText(step.strategy), step.strategy ? counted(worldOf(step.strategy), "rank") : ""],
        ["saved", moment(step.time), step.format ? `${step.format}, which has no checksums` : printable(step.writer)],
      ]),
      h("div", { class: "cards" }, mesh(), card("Bytes by role", byRole(), h("h2", null, "by dtype"), byDtype()), card("Bytes by layer", byLayer()), packs(), timeline(), values()),
    ];
  },
};
