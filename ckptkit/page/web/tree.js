// All arrays as a tree; alike ones are one row, as `model.display` has folded them.

const tree = { words: "", order: "name", all: false, closed: new Set() };
const ROWS = 400;

/** The parts of a name that are levels of the tree; what is in braces is no level of its own. */
function partsOf(name) {
  const parts = [];
  let part = "";
  for (let at = 0; at < name.length; at += 1) {
    const end = name[at] === "{" ? name.indexOf("}", at) : -1;
    if (end > 0) {
      part += name.slice(at, end + 1);
      at = end;
      continue;
    }
    part += name[at];
    if (name[at] === "." || name[at] === "/") {
      parts.push(part);
      part = "";
    }
  }
  return part ? [...parts, part] : parts;
}

/** A pattern with * and ?, or words that all have to be in the name. */
function matcher(words) {
  const text = words.trim();
  if (!text) return null;
  if (/[*?]/.test(text)) {
    const pattern = text.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".");
    const anywhere = new RegExp(`(^|/)${pattern}$`, "su");
    return (name) => anywhere.test(name);
  }
  const wanted = text.toLowerCase().split(/\s+/);
  return (name) => {
    const low = name.toLowerCase();
    return wanted.every((word) => low.includes(word));
  };
}

/** How the axes cut a kind, in short: `fsdp 0 · tp 1`. */
function cutText(source, kind, stages = true) {
  const axes = source.strategy?.axes ?? [];
  const row = source.placements[source.kinds[kind].placements];
  const said = row.map((placement, axis) => {
    if (placement.kind === "replicate") return null;
    const text = { shard: `dim ${placement.dim}`, strided: `dim ${placement.dim}, strided`, owner: `rank ${placement.coord}`, stage: stages ? `stage ${placement.coord}` : "its stage" }[placement.kind];
    return `${axes[axis][0]}: ${text}`;
  });
  return said.filter(Boolean).join(" · ") || "whole";
}

/** The rows that are wanted: {name, arrays, size}, one for each fold, or for each array. */
function wantedRows() {
  const match = matcher(tree.words);
  const rows = [];
  step.members.forEach((members, fold) => {
    const arrays = match ? members.filter((at) => match(step.names[at])) : members;
    if (!arrays.length) return;
    const isWhole = arrays.length === members.length;
    if (!tree.all && isWhole) rows.push({ name: step.folds[fold], arrays, size: sum(arrays.map((at) => sizes[at])) });
    else for (const at of arrays) rows.push({ name: step.names[at], arrays: [at], size: sizes[at] });
  });
  if (tree.order === "size") rows.sort((a, b) => b.size - a.size);
  if (tree.order === "elements") rows.sort((a, b) => product(step.kinds[step.kind[b.arrays[0]]].shape) - product(step.kinds[step.kind[a.arrays[0]]].shape));
  return rows;
}

/** Groups and leaves in order, with their depth; a flat list where it is sorted by size. */
function treeLines(rows) {
  if (tree.order !== "name") return rows.map((row) => ({ ...row, depth: 0, text: row.name }));
  const totals = new Map();
  const split = rows.map((row) => partsOf(row.name));
  rows.forEach((row, number) => {
    let path = "";
    for (const part of split[number].slice(0, -1)) {
      path += part;
      const known = totals.get(path) ?? { size: 0, count: 0, leaves: 0 };
      known.size += row.size;
      known.count += row.arrays.length;
      known.leaves += 1;
      totals.set(path, known);
    }
  });
  const lines = [];
  const opened = new Set();
  rows.forEach((row, number) => {
    let path = "";
    let text = "";
    let depth = 0;
    let hidden = false;
    const parts = split[number].slice(0, -1);
    parts.forEach((part, level) => {
      path += part;
      text += part;
      const { size, count, leaves } = totals.get(path);
      // A group of one row, or with one group in it that has all of its rows, is no line of its own.
      if (leaves < 2 || (level > 0 && leaves === totals.get(path + parts[level + 1])?.leaves)) return;
      if (!hidden && !opened.has(path)) {
        opened.add(path);
        lines.push({ group: path, text, depth, size, count });
      }
      text = "";
      depth += 1;
      hidden ||= tree.closed.has(path);
    });
    if (!hidden) lines.push({ ...row, depth, text: text + split[number].at(-1) });
  });
  return lines;
}

function treeRow(line, most) {
  const bar = h("div", { class: "bar", style: { width: `${Math.max((100 * line.size) / most, line.size ? 0.5 : 0)}%` } });
  const indent = { style: { "padding-left": `${0.4 + line.depth * 1.1}rem` } };
  if (line.group) {
    const closed = tree.closed.has(line.group);
    const row = h("tr", { class: "group", tabindex: -1, "aria-expanded": String(!closed) }, h("th", { scope: "row", ...indent }, closed ? "▸ " : "▾ ", named(line.text)), h("td", { class: "quiet" }, counted(line.count, "array")), h("td", { class: "shape" }), h("td", { class: "cut" }), h("td", { class: "wide" }, bar), h("td", { class: "number" }, bytes(line.size)));
    row.line = line;
    return row;
  }
  const at = line.arrays[0];
  const kind = step.kinds[step.kind[at]];
  bar.style.background = roleTint(kind.role);
  const many = line.arrays.length > 1 ? h("span", { class: "many" }, `${whole(line.arrays.length)} ×`) : null;
  const tied = step.alias[at] >= 0 ? h("span", { class: "quiet" }, "= ", named(step.names[step.alias[at]])) : cutText(step, step.kind[at]);
  const row = h("tr", { class: "leaf", tabindex: -1 }, h("th", { scope: "row", ...indent }, named(line.text), many), h("td", null, kind.dtype), h("td", { class: "shape" }, shapeText(kind.shape)), h("td", { class: "cut" }, tied), h("td", { class: "wide" }, bar), h("td", { class: "number" }, step.alias[at] >= 0 ? "" : bytes(line.size)));
  row.line = line;
  return row;
}

function showTree() {
  const body = h("tbody");
  const status = h("p", { class: "quiet", "aria-live": "polite" });
  const more = h("button", { type: "button", class: "more" }, "more rows");
  let lines = [];
  let end = 0;
  let most = 1;
  const extend = () => {
    body.append(...lines.slice(end, end + ROWS).map((line) => treeRow(line, most)));
    end = Math.min(lines.length, end + ROWS);
    more.hidden = end >= lines.length;
    more.textContent = `${whole(lines.length - end)} more rows`;
    if (body.firstChild && !body.querySelector('[tabindex="0"]')) body.firstChild.tabIndex = 0;
  };
  const fill = (focus) => {
    const rows = wantedRows();
    lines = treeLines(rows);
    most = Math.max(largest(lines.map((line) => line.size)), 1);
    end = 0;
    body.replaceChildren();
    extend();
    const count = sum(rows.map((row) => row.arrays.length));
    const size = sum(rows.map((row) => row.size));
    status.textContent = `${counted(count, "array")} in ${counted(rows.length, "row")}, ${bytes(size)}`;
    if (focus) [...body.rows].find((row) => row.line.group === focus)?.focus();
  };
  const act = (row) => {
    if (!row) return;
    const { group, arrays } = row.line;
    if (!group) return go(`tensor/${arrays[0]}`);
    if (!tree.closed.delete(group)) tree.closed.add(group);
    return fill(group);
  };
  body.addEventListener("click", (event) => act(event.target.closest("tr")));
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const next = { ArrowDown: row?.nextElementSibling, ArrowUp: row?.previousElementSibling }[event.key];
    if (next) {
      event.preventDefault();
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      act(row);
    } else if (row?.line.group && ((event.key === "ArrowLeft") !== tree.closed.has(row.line.group)) && ["ArrowLeft", "ArrowRight"].includes(event.key)) act(row);
  });
  const search = h("input", { id: "search", type: "search", placeholder: "Search: words, or a pattern with * and ?   ( / )", "aria-label": "Search arrays", value: tree.words, spellcheck: "false", autocomplete: "off" });
  search.addEventListener("input", () => {
    tree.words = search.value;
    fill();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "Enter") {
      event.preventDefault();
      body.firstChild?.focus();
    }
  });
  const order = h("select", { id: "order", "aria-label": "Order" }, ["name", "size", "elements"].map((name) => h("option", { value: name, selected: name === tree.order }, `by ${name}`)));
  order.addEventListener("change", () => {
    tree.order = order.value;
    fill();
  });
  const all = h("input", { type: "checkbox", id: "all", checked: tree.all });
  all.addEventListener("change", () => {
    tree.all = all.checked;
    fill();
  });
  more.addEventListener("click", extend);
  fill();
  return [
    h("div", { class: "line tools" }, search, order, h("label", null, all, " every row")),
    status,
    h("div", { class: "scroll" }, h("table", { class: "rows tree" }, h("thead", null, h("tr", null, ["name", "dtype", "shape", "cut", "", "bytes"].map((name) => h("th", name === "bytes" ? { class: "number" } : null, name)))), body)),
    more,
  ];
}

views.tensors = { title: "Arrays", key: true, when: () => true, show: showTree };
