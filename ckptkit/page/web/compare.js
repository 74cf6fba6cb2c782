// What differs from another step: names, shapes, dtypes, values, strategies side by side.

const WHAT = { only_a: "only here", only_b: "only there", shape: "shape", dtype: "dtype", values: "values", semantics: "meaning", value: "value" };

// Without a number, as to a NaN, it is as far as can be: so `ckpt diff` orders them.
const distance = (diff, at) => (typeof diff.most[at] === "number" ? diff.most[at] : Infinity);
const formText = (form) => (form ? `${form[1]} ${shapeText(form[0])}` : "–");

/** The largest difference of each layer. */
function layerDistances(diff) {
  const found = new Map();
  diff.name.forEach((name, at) => {
    if (diff.what[at] !== "values") return;
    const layer = layerOf(name);
    const key = layer ? layer.join("\0") : "";
    const known = found.get(key) ?? { layer, most: 0, far: 0, count: 0, arrays: 0 };
    const far = distance(diff, at);
    known.most = Math.max(known.most, Number.isFinite(far) ? far : 0);
    known.far = Math.max(known.far, far);
    known.count += diff.count[at];
    known.arrays += 1;
    found.set(key, known);
  });
  return [...found.values()].sort((a, b) => (a.layer?.[0] ?? "~").localeCompare(b.layer?.[0] ?? "~") || (a.layer?.[1] ?? 0) - (b.layer?.[1] ?? 0));
}

function side(title, head) {
  return card(
    title,
    factList([["step", String(head.step)], ["strategy", strategyText(head.strategy), counted(worldOf(head.strategy), "rank")], ["size", bytes(sum(head.packs)), counted(head.packs.length, head.format ? "file" : "pack")], ["saved", moment(head.time), printable(head.format ?? head.writer)]]),
    named(head.location, { class: "name quiet" }),
    head.strategy ? meshPicture(head.strategy, { colour: (rank) => rankTint(head.strategy, rank), lines: (rank) => rankWords(head.strategy, rank) }) : null,
    head.strategy ? h("p", { class: "quiet" }, meshWords(head.strategy)) : null,
  );
}

function differenceRow(diff, at, places) {
  const name = diff.name[at];
  const values = diff.what[at] === "values";
  return [
    places.has(name) ? link(`tensor/${places.get(name)}`, named(name)) : named(name),
    WHAT[diff.what[at]],
    values ? formText(diff.a[at]) : h("span", null, formText(diff.a[at]), h("span", { class: "quiet" }, " → "), formText(diff.b[at])),
    values ? `${whole(diff.count[at])} of ${whole(diff.of[at])}` : "",
    values ? (diff.most[at] === null ? "no number" : amount(diff.most[at])) : "",
    values ? `[${diff.first[at].join(", ")}]` : "",
  ];
}

function showCompare() {
  const { diff } = facts;
  const places = new Map(step.names.map((name, at) => [name, at]));
  const order = diff.name.map((_, at) => at);
  const rank = (at) => (diff.what[at] === "values" ? 1 : 0);
  order.sort((a, b) => rank(a) - rank(b) || distance(diff, b) - distance(diff, a) || diff.count[b] - diff.count[a]);
  const counts = Object.keys(WHAT).map((what) => [what, diff.what.filter((each) => each === what).length]).filter(([, count]) => count);
  const perLayer = layerDistances(diff);
  const same = !diff.name.length && !diff.objects_differ;
  const [differing, what] = diff.name.length ? [diff.name.length, "array"] : [diff.objects_differ, "value"];
  return [
    h("h2", { class: "big" }, same ? "The same state" : `${counted(differing, what)} ${differing === 1 ? "differs" : "differ"}`),
    factList([["arrays compared", whole(diff.array_count), bytes(diff.bytes)], ...counts.map(([what, count]) => [WHAT[what], whole(count)]), ["values that are no arrays", whole(diff.object_count), `${whole(diff.objects_differ)} differ`]]),
    h("div", { class: "cards" }, side("Here", step), side("There", diff.other)),
    diff.name.length
      ? card("What differs, the largest difference first", some(order, (at) => differenceRow(diff, at, places), ["name", "what", "dtype and shape", "elements", "largest", "first at"], { most: 100, numbers: [3, 4] }))
      : null,
    perLayer.length
      ? card("The largest difference of each layer", columns({ series: [{ tint: () => tint(0, 1), values: perLayer.map((each) => each.most) }], label: "The largest difference of each layer", lines: (at) => [layerText(perLayer[at]), `largest ${Number.isFinite(perLayer[at].far) ? amount(perLayer[at].far) : "no finite number"}`, `${counted(perLayer[at].count, "element")} in ${counted(perLayer[at].arrays, "array")}`] }))
      : null,
    diff.objects.length ? card("Values", some(diff.objects, ([name, what, a, b]) => [named(name), WHAT[what], what === "only_b" ? "–" : printable(a), what === "only_a" ? "–" : printable(b)], ["name", "what", "here", "there"], { most: 60 })) : null,
  ];
}

views.compare = { title: "Compare", key: true, when: () => Boolean(facts.diff), show: showCompare };
