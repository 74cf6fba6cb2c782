// What all views stand on: the data, elements, words, colours, and which view is shown.
// Everything that a file says becomes a text node or a picture, never markup.

let facts = null; // what Python has gathered
let step = null; // facts.step
const views = Object.create(null); // by name: {title, when, show}; an address names any
const redraws = new Set(); // pictures that are drawn again in another theme

const $ = (id) => document.getElementById(id);

/** An element; children that are texts become text nodes. */
function h(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name === "style") {
      for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    } else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function svg(tag, properties, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** A text from a file with what would steer its reader escaped: control and direction characters. */
function printable(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu, (character) => {
    return `\\u{${character.codePointAt(0).toString(16)}}`;
  });
}

const inShort = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** The same as an element that keeps its direction to itself. */
function named(text, properties) {
  return h("bdi", { class: "name", dir: "ltr", ...properties }, printable(text));
}

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

function bytes(count) {
  if (count < 1024) return `${Math.round(count)} B`;
  let amount = count / 1024;
  let power = 0;
  while (amount >= 1023.95 && power < UNITS.length - 1) {
    amount /= 1024;
    power += 1;
  }
  return `${amount.toFixed(1)} ${UNITS[power]}`;
}

const whole = (count) => Math.round(count).toLocaleString("en-US");
const counted = (count, what) => `${whole(count)} ${what}${count === 1 ? "" : "s"}`;
const percent = (part, all) => (all ? `${((100 * part) / all).toFixed(part && part / all < 0.1 ? 1 : 0)} %` : "–");
const shapeText = (shape) => `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`;
const product = (numbers) => numbers.reduce((all, each) => all * each, 1);
const largest = (numbers) => numbers.reduce((high, each) => Math.max(high, each), 0);
const sum = (numbers) => numbers.reduce((all, each) => all + each, 0);

function moment(seconds) {
  const date = new Date(seconds * 1000);
  return seconds && !Number.isNaN(date.getTime()) ? date.toISOString().slice(0, 19).replace("T", " ") + " UTC" : "at no date";
}

function amount(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return printable(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return whole(value);
  return size >= 1e-4 && size < 1e6 ? String(Number(value.toPrecision(5))) : value.toExponential(3);
}

// Colours. A canvas knows no variables of CSS: a probe tells what they are at the moment.

function ink(name) {
  const probe = $("tip");
  const before = probe.style.color;
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.style.color = before;
  return found;
}

/** What was chosen, or else what the system likes; on paper always light. */
function isDark() {
  const root = document.documentElement;
  if (root.classList.contains("print")) return false;
  return root.style.colorScheme ? root.style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
const HUES = [215, 165, 32, 350, 275, 95, 190, 55, 315, 130, 245, 10];

/** The colour of one of `count` that stand side by side: calm ones, or a ramp where there are many. */
function tint(number, count, strength = 1) {
  const dark = isDark();
  const many = count > HUES.length;
  const hue = many ? 165 + (190 * number) / count : HUES[number % HUES.length];
  const light = (dark ? 48 : 66) + (many ? (number % 2 ? 4 : -2) : 0);
  return `hsl(${hue} ${dark ? 38 : 46}% ${light}% / ${strength})`;
}

/** From pale to strong. */
function heat(share) {
  const dark = isDark();
  return `hsl(215 ${30 + 30 * share}% ${dark ? 22 + 40 * share : 90 - 42 * share}%)`;
}

const ROLES = ["param", "buffer", "optimizer", "other"];
const roleTint = (role) => tint(Math.max(0, ROLES.indexOf(role)), 4);

// What the pointer is on.

function tell(event, ...lines) {
  const tip = $("tip");
  if (!lines.length) {
    tip.hidden = true;
    return;
  }
  tip.replaceChildren(...lines.map((line) => h("div", null, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const below = event.clientY + 18 + box.height < innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${below ? event.clientY + 18 : Math.max(4, event.clientY - box.height - 12)}px`;
}

// The data: a JSON document, deflated, in an element that no browser runs.

async function unpacked() {
  const packed = Uint8Array.from(atob($("data").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// Which view is shown: `#overview`, `#tensor/12`. An inlined page may have no address to change.

let shown = "";

function go(where) {
  try {
    if (location.hash !== `#${where}`) location.hash = where;
  } catch {
    // the view changes all the same
  }
  show(where);
}

function show(where) {
  const [name, ...rest] = where.split("/");
  const view = views[name]?.when() ? name : "overview";
  if (where === shown) return;
  shown = where;
  redraws.clear();
  tell();
  $("main").replaceChildren(h("section", { class: view, "aria-label": views[view].title }, views[view].show(...rest)));
  for (const link of $("nav").children) {
    const current = link.dataset.view === (view === "tensor" ? "tensors" : view);
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
}

const link = (where, ...children) => h("a", { href: `#${where}`, onclick: (event) => follow(event, where) }, ...children);

function follow(event, where) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(where);
}

function redrawAll() {
  for (const draw of redraws) draw();
}

function theme() {
  document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
  again();
}

/** Build the view anew: its colours are another theme's. */
function again() {
  const where = shown;
  const top = scrollY;
  shown = "";
  show(where);
  scrollTo(0, top);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing) return;
  const names = Object.keys(views).filter((name) => views[name].key && views[name].when());
  if (event.key === "/") {
    event.preventDefault();
    if (!$("search")) go("tensors");
    $("search").focus();
  } else if (event.key === "t") theme();
  else if (/^[1-9]$/.test(event.key) && names[event.key - 1]) go(names[event.key - 1]);
}

function inNav(name, number) {
  const node = link(name, views[name].title);
  node.dataset.view = name;
  node.title = `Key ${number}`;
  return node;
}

async function begin() {
  facts = await unpacked();
  step = facts.step;
  prepare();
  const title = `step ${step.step}`;
  document.title = `${title} · ${printable(step.location)}`;
  $("title").append(h("h1", null, title), named(step.location, { class: "name quiet" }));
  const names = Object.keys(views).filter((name) => views[name].key && views[name].when());
  $("nav").append(...names.map((name, index) => inNav(name, index + 1)));
  $("footer").append(`ckptkit ${facts.ckptkit} · keys: 1–${names.length} views, / search, t theme, arrows inside of pictures`);
  $("theme").addEventListener("click", theme);
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", () => show(location.hash.slice(1) || "overview"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("print");
    redrawAll();
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("print");
    redrawAll();
  });
  show(location.hash.slice(1) || "overview");
  document.documentElement.dataset.ready = "yes";
}

begin();
