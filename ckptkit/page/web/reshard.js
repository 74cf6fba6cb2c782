// What a reshard would move: from packs to ranks, before and after.

/** Groups of packs or ranks that follow each other, in words. */
function groupWords(counts, what) {
  let first = 0;
  return counts.map((count) => {
    const last = first + count - 1;
    const file = what === "file" && count === 1 ? (step.files[first] ?? "pieces of files") : null;
    const text = file ? inShort(printable(file.split("/").at(-1)), 20) : count === 1 ? `${what} ${first}` : `${what}s ${whole(first)}–${whole(last)}`;
    first += count;
    return text;
  });
}

/** Ribbons from groups of packs to groups of ranks, as wide as what goes there. */
function flowPicture(flows) {
  const rows = flows.bytes;
  const left = groupWords(flows.sources, step.format ? "file" : "pack");
  const right = groupWords(flows.targets, "rank");
  const out = rows.map(sum);
  const into = right.map((_, target) => sum(rows.map((row) => row[target])));
  const all = sum(out);
  if (!all) return h("p", { class: "quiet" }, "No elements: nothing goes anywhere.");
  const [width, gap] = [720, 6];
  const height = Math.max(160, 22 * Math.max(left.length, right.length));
  const scale = (count) => (height - gap * (count - 1)) / all;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "flows", role: "img", "aria-label": `${bytes(all)} from ${counted(sum(flows.sources), "pack")} to ${counted(sum(flows.targets), "rank")}` });
  const starts = (totals, count) => {
    let y = 0;
    return totals.map((total) => {
      const at = y;
      y += total * scale(count) + gap;
      return at;
    });
  };
  const [ys, yt] = [starts(out, left.length), starts(into, right.length)];
  const [ds, dt] = [ys.map(() => 0), yt.map(() => 0)];
  const edge = 110;
  const ribbons = [];
  const light = (which, on) => ribbons.forEach((ribbon) => ribbon.node.classList.toggle("dim", on && !which(ribbon)));
  rows.forEach((row, source) => {
    row.forEach((value, target) => {
      if (!value) return;
      const [h1, h2] = [value * scale(left.length), value * scale(right.length)];
      const [y1, y2] = [ys[source] + ds[source], yt[target] + dt[target]];
      ds[source] += h1;
      dt[target] += h2;
      const [x1, x2, middle] = [edge + 8, width - edge - 8, width / 2];
      const path = `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}L${x2} ${y2 + h2}C${middle} ${y2 + h2} ${middle} ${y1 + h1} ${x1} ${y1 + h1}Z`;
      const words = [`${left[source]} to ${right[target]}`, `${bytes(value)}, ${percent(value, all)}`, counted(flows.chunks[source][target], "chunk")];
      const node = svg("path", { d: path, fill: tint(target, right.length, 0.55), class: "ribbon", onpointermove: (event) => tell(event, ...words), onpointerleave: () => tell() });
      ribbons.push({ node, source, target });
      drawing.append(node);
    });
  });
  const ends = (names, totals, y, x, anchor, side, count) => {
    names.forEach((name, at) => {
      const tall = Math.max(totals[at] * scale(count), 1);
      const tellIt = (event) => {
        light((ribbon) => ribbon[side] === at, true);
        if (event.clientX !== undefined) tell(event, name, bytes(totals[at]), percent(totals[at], all));
      };
      const leave = () => {
        light(null, false);
        tell();
      };
      const bar = svg("rect", { x: anchor === "end" ? x + 6 : x - 14, y: y[at], width: 8, height: tall, class: "end" });
      const text = svg("text", { x: anchor === "end" ? x : x + 2, y: y[at] + tall / 2, "text-anchor": anchor, "dominant-baseline": "middle" }, name);
      drawing.append(svg("g", { tabindex: 0, "aria-label": `${name}: ${bytes(totals[at])}`, onpointermove: tellIt, onfocus: tellIt, onpointerleave: leave, onblur: leave }, bar, text));
    });
  };
  ends(left, out, ys, edge - 6, "end", "source", left.length);
  ends(right, into, yt, width - edge + 6, "start", "target", right.length);
  return h("div", { class: "scroll" }, drawing);
}

function flowTable(flows) {
  const left = groupWords(flows.sources, step.format ? "file" : "pack");
  const right = groupWords(flows.targets, "rank");
  const rows = [];
  flows.bytes.forEach((row, source) => row.forEach((value, target) => value && rows.push([left[source], right[target], value, flows.chunks[source][target]])));
  rows.sort((a, b) => b[2] - a[2]);
  return h("details", null, h("summary", null, "As a table"), some(rows, ([from, to, value, chunks]) => [from, to, bytes(value), whole(chunks)], ["from", "to", "bytes", "chunks"], { most: 60, numbers: [2, 3] }));
}

/** Arrays by who decided how they are cut; layers are one, though each is in a stage of its own. */
function decisions(plan) {
  const found = new Map();
  plan.kind.forEach((kind, at) => {
    if (kind < 0 || step.alias[at] >= 0) return;
    const cut = cutText(plan, kind, false);
    const why = plan.whys[plan.why[at]].replace(/\blayer \d+/g, "its layer");
    const key = `${why}\0${cut}`;
    if (!found.has(key)) found.set(key, { why, cut, folds: new Set(), count: 0, size: 0 });
    const row = found.get(key);
    row.folds.add(step.fold[at]);
    row.count += 1;
    row.size += sizes[at];
  });
  return [...found.values()].map((row) => ({ ...row, folds: [...row.folds].sort((a, b) => a - b) })).sort((a, b) => b.size - a.size);
}

function showReshard() {
  const plan = facts.plan;
  const { flows } = plan;
  const before = heldBytes(step, step.kind);
  const after = heldBytes(plan, plan.kind);
  // Both on one scale, where both are to be seen then.
  const [low, high] = [largest(before ?? []), largest(after ?? [])].sort((a, b) => a - b);
  const most = high < 20 * low ? high : 0;
  const tintOf = (rank) => rankTint(plan.strategy, rank);
  const kept = plan.kept.filter((each, at) => each && step.alias[at] < 0);
  const keptBytes = sum(plan.kept.map((each, at) => (each ? sizes[at] : 0)));
  return [
    h("h2", { class: "big" }, `${strategyText(step.strategy)} → ${plan.strategy.text}`),
    factList([
      ["read", bytes(plan.bytes_read), `${plan.read_amplification.toFixed(2)} times each byte`],
      ["requests", whole(plan.requests), "at most"],
      ["write", bytes(plan.bytes_written), `${counted(plan.bytes_by_rank.length, "pack")}, ${counted(plan.chunks, "chunk")}`],
      ["largest pack", bytes(largest(plan.bytes_by_rank)), `rank ${plan.bytes_by_rank.indexOf(largest(plan.bytes_by_rank))}, ${plan.imbalance.toFixed(2)} times the mean`],
      ["chunks as they are", whole(kept.length), `arrays, ${bytes(keptBytes)}`],
      flows && flows.in_place !== null ? ["stays with its rank", bytes(flows.in_place), percent(flows.in_place, sum(flows.bytes.map(sum)))] : null,
    ]),
    card("From packs to ranks", flows ? [flowPicture(flows), flowTable(flows)] : h("p", { class: "quiet" }, "Too many boxes to follow each of them.")),
    h(
      "div",
      { class: "cards" },
      before ? card("What ranks hold before", spread([...before], "rank", { tinted: (rank) => rankTint(meshOf(step.strategy), rank), scale: most })) : null,
      after ? card("What ranks hold after", spread([...after], "rank", { tinted: tintOf, scale: most })) : null,
      card("Packs that are written", spread(plan.bytes_by_rank, "pack", { labelOf: (at) => `pack of rank ${at}`, tinted: tintOf })),
      card(
        "Who decided",
        some(
          decisions(plan),
          (row) => [row.cut, h("details", null, h("summary", null, counted(row.count, "array")), h("ul", { class: "names" }, row.folds.slice(0, 60).map((fold) => h("li", null, link(`tensor/${step.members[fold][0]}`, named(step.folds[fold]))))), row.folds.length > 60 ? h("p", { class: "quiet" }, `and ${whole(row.folds.length - 60)} rows more`) : null), bytes(row.size), printable(row.why)],
          ["cut", "arrays", "bytes", "why"],
          { most: 40, numbers: [2] },
        ),
      ),
    ),
  ];
}

views.reshard = { title: "Reshard", key: true, when: () => Boolean(facts.plan), show: showReshard };
