// The page of `tokenmill view`: asks the server for answers as JSON and draws them.
//
//   hash of the address -> route() -> a function of PAGES -> elements
//
// All that comes from a store becomes text nodes, never markup. The address says everything that is
// shown, so going back and forth works, and so does a link to a document.

const token = new URLSearchParams(location.search).get("token") ?? "";
const kept = JSON.parse(document.getElementById("kept")?.textContent ?? "null");
const $ = (query, within = document) => within.querySelector(query);

// --- Words --------------------------------------------------------------------------------------

const whole = (number) => number.toLocaleString("en-US");

/** Three digits and a unit, as the command line writes them. */
function scaled(number, units, gap = "") {
  for (const unit of units) {
    if (Math.abs(number) < 999.5 || unit === units.at(-1)) {
      const digits = Math.abs(number) >= 99.5 ? 0 : 1;
      return number.toFixed(digits).replace(/\.0$/, "") + gap + unit;
    }
    number /= 1000;
  }
}
const compact = (number) => scaled(number, ["", "k", "M", "B", "T"]);
const size = (bytes) => scaled(bytes, ["B", "kB", "MB", "GB", "TB"], " ");
const percent = (part, of) => (!of || !part ? "0%" : part < 0.0005 * of ? "<0.1%" : `${((100 * part) / of).toFixed(1)}%`);
const some = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

// --- Elements -----------------------------------------------------------------------------------

/** An element; strings among its children are text. */
function el(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else if (key === "style") for (const [of, is] of Object.entries(value)) made.style.setProperty(of, is);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return made;
}

const card = (title, kind, ...children) =>
  el("section", { class: `card ${kind}` }, title && el("h2", {}, title), ...children);
const note = (...words) => el("p", { class: "note" }, ...words);
const tile = (value, name) =>
  el("div", { class: "tile" }, el("div", { class: "value" }, value), el("div", { class: "soft" }, name));
const facts = (pairs) =>
  el("dl", { class: "facts" }, pairs.filter(([, is]) => is != null && is !== "")
    .map(([name, is]) => [el("dt", {}, name), el("dd", {}, typeof is === "object" ? is : String(is))]));
const button = (words, onclick, more = {}) => el("button", { type: "button", class: "plain", onclick, ...more }, words);
const field = (name, input, kind = "") => el("label", { class: `field ${kind}` }, name, input);

function choice(options, chosen, onchange) {
  const made = el("select", { onchange: () => onchange(made.value) },
    options.map(([value, words]) => el("option", { value, selected: String(value) === String(chosen ?? "") }, words)));
  return made;
}

/** A table whose headings sort it; a column is {name, of, show, left}. */
function table(columns, rows, { sort = null, down = true, most = Infinity } = {}) {
  const body = el("tbody");
  const head = el("tr");
  function draw() {
    const ordered = [...rows];
    if (sort !== null) {
      const of = columns[sort].of;
      const sign = down ? -1 : 1;
      ordered.sort((a, b) => sign * (typeof of(a) === "string" ? of(a).localeCompare(of(b)) : (of(a) ?? -1) - (of(b) ?? -1)));
    }
    body.replaceChildren(...ordered.slice(0, most).map((row) => el("tr", {}, columns.map((column, place) =>
      el(place ? "td" : "th", { class: column.left ? "name" : "", scope: place ? null : "row" },
        column.show ? column.show(row) : String(column.of(row) ?? ""))))));
    head.replaceChildren(...columns.map((column, place) => el("th",
      { scope: "col", class: column.left ? "name" : "", "aria-sort": place === sort ? (down ? "descending" : "ascending") : null },
      el("button", { type: "button", onclick: () => { down = place === sort ? !down : !column.left; sort = place; draw(); } },
        column.name + (place === sort ? (down ? " ↓" : " ↑") : "")))));
  }
  draw();
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), body));
}

// --- Charts -------------------------------------------------------------------------------------

const colour = (name) => {
  const probe = el("i", { style: { color: `var(--${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};
const charts = new Set();

/** Ends of an axis: with 0 unless it says nothing there. */
function span(low, high, zero) {
  if (low == null) return [0, 1];
  const room = 0.06 * (high - (zero ? Math.min(0, low) : low) || Math.abs(high) || 1);
  return [zero ? Math.min(0, low) : low - room, high + room];
}

/** Of the ticks of a logarithmic axis the powers of ten. */
const decades = (_, ticks) => ticks.map((tick) => (Number.isInteger(Math.log10(tick)) ? tick : null));

/** Distances of ticks where what is counted comes one by one. */
const WHOLE = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

/** Lines, or bars, over a common x; null is a gap. `label` says to a screen reader what it shows. */
function chart({ label, x, lines, bars = false, logX = false, logY = false, height = 230, showX = compact, showY = compact, xName = "x", zero = true, steps = false }) {
  const at = el("div", { class: "chart", role: "img", "aria-label": label });
  const axis = () => ({ stroke: colour("soft"), font: "12px system-ui", grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } });
  function draw() {
    const series = lines.map((line, place) => ({
      label: line.name,
      stroke: colour(`c${(place % 7) + 1}`),
      width: 1.8,
      spanGaps: false,
      value: (_, value) => (value == null ? "–" : showY(value)),
      points: { show: line.values.length < 25 && !bars },
      dash: line.dash ? [6, 4] : undefined,
      ...(bars ? { fill: colour("c1"), width: 0, paths: uPlot.paths.bars({ size: [0.86, 80], radius: 0.12 }) } : {}),
    }));
    const plot = new uPlot({
      width: Math.max(at.clientWidth, 120),
      height,
      padding: [10, 18, 0, 0],
      cursor: { y: false, points: { size: 7 } },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, ...(bars ? { range: [-0.6, x.length - 0.4] } : {}) },
        y: { distr: logY ? 3 : 1, ...(logY ? {} : { range: (_, low, high) => span(low, high, zero) }) },
      },
      axes: [
        { ...axis(), grid: { show: false }, size: 32, space: 56, ...(steps ? { incrs: WHOLE } : {}), ...(logX ? { filter: decades } : {}), values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : showX(tick))),
          ...(bars ? { splits: () => x.filter((place) => place % Math.ceil(x.length / Math.max(2, at.clientWidth / 60)) === 0) } : {}) },
        { ...axis(), size: 56, ...(bars ? { incrs: WHOLE } : {}), ...(logY ? { filter: decades, grid: { ...axis().grid, filter: decades } } : {}), values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : showY(tick))) },
      ],
      series: [{ label: xName, value: (_, value) => (value == null ? "–" : showX(value)) }, ...series],
    }, [x, ...lines.map((line) => line.values)], at);
    return plot;
  }
  at.update = (newX, newLines) => {
    x = newX;
    lines = newLines;
    if (drawn.plot) drawn.plot.setData([x, ...lines.map((line) => line.values)]);
  };
  const drawn = { at, redraw() { drawn.plot?.destroy(); drawn.plot = at.clientWidth ? draw() : null; }, plot: null };
  new ResizeObserver(() => {
    if (drawn.plot) drawn.plot.setSize({ width: Math.max(at.clientWidth, 120), height });
    else drawn.redraw();
  }).observe(at);
  charts.add(drawn);
  return at;
}

// --- Questions ----------------------------------------------------------------------------------

async function ask(what, given = {}) {
  const asked = Object.entries(given).filter(([, value]) => value != null && value !== "");
  const query = new URLSearchParams(asked).toString();
  if (kept) {
    const known = [what, query].filter(Boolean).join("?");
    if (!(known in kept)) throw new Error("This page was written to a file, and this is not in it.");
    return kept[known];
  }
  const answer = await fetch(`api/${what}?${query}`, { headers: { Authorization: `Bearer ${token}` } });
  const found = answer.headers.get("content-type") === "application/json" ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw Object.assign(new Error(found.error), { hint: found.hint });
  return found;
}

const problem = (error) =>
  el("div", { class: "problem", role: "alert" }, el("strong", {}, "This cannot be shown. "), error.message,
    error.hint && el("p", { class: "soft" }, error.hint));

/** A place that is filled when the answer is there. */
function later(promise, draw, at = el("div")) {
  if (!at.firstChild) at.append(el("p", { class: "soft" }, "…"));
  promise.then((found) => at.replaceChildren(...[draw(found)].flat()), (error) => at.replaceChildren(problem(error)));
  return at;
}

// --- Overview -----------------------------------------------------------------------------------

const share = (part, of) => [percent(part, of), el("span", { class: "share", "aria-hidden": "true" }, el("i", { style: { width: `${of ? (100 * part) / of : 0}%` } }))];
const sampled = (seen, of, noun) => (seen < of ? note(`A sample: ${compact(seen)} of ${compact(of)} ${noun}, evenly spread.`) : null);

/** A link to some documents; a page that is a file has not all of them. */
const listOf = (given, words) => (kept ? words : el("a", { href: link("documents", given) }, words));

async function overview({ of = "0" }) {
  const found = await ask("overview", { of });
  const store = about.stores[of];
  const { totals } = found;
  const lost = totals.rejected;
  return [
    el("div", { class: "head" }, el("h1", {}, store.name, store.so_far && [" ", el("span", { class: "badge" }, "so far: its build goes on")]), el("p", { class: "soft small mono" }, store.path)),
    el("div", { class: "tiles" },
      tile(compact(totals.documents), "documents"),
      tile(compact(totals.tokens), "tokens"),
      tile(found.bytes_per_token ? found.bytes_per_token.toFixed(2) : "–", "bytes of text per token"),
      tile(size(found.token_bytes), `of ids (${found.identity.ids})`),
      tile(compact(found.identity.vocabulary), `ids in the vocabulary (${found.identity.tokenizer})`),
      tile(compact(lost), lost === 1 ? "row rejected" : "rows rejected")),
    el("div", { class: "grid" },
      card("Sources", "two-thirds", sources(found.sources, totals, of)),
      card("Splits", "third", table([
        { name: "split", left: true, of: (row) => row[0], show: ([name]) => listOf({ of, split: name }, name) },
        { name: "documents", of: (row) => row[1].documents, show: (row) => whole(row[1].documents) },
        { name: "tokens", of: (row) => row[1].tokens, show: (row) => whole(row[1].tokens) },
      ], Object.entries(found.splits)), el("h2", { class: "gap" }, "Every row"), accounting(totals)),
      card("Tokens per document", "half", found.lengths ? lengths(found.lengths) : "There is no document."),
      card("How often tokens are there", "half", later(ask("frequencies", { of }), zipf)),
      found.columns.length > 0 && card("Columns", "", columns(found.columns, of)),
      card("Rejected rows", "", later(ask("rejects", { of }), rejects)),
      card("How it was made", "half", facts(Object.entries(found.identity).filter(([name]) => !name.includes("fingerprint"))),
        engines(found.engines)),
      card("Options", "half", facts(Object.entries(found.config).map(([name, is]) => [name, is === null ? null : el("code", {}, typeof is === "string" ? is : JSON.stringify(is))])),
        facts(Object.entries(found.identity).filter(([name]) => name.includes("fingerprint")).map(([name, is]) => [name, el("code", { class: "small" }, is)])))),
  ];
}

/** The folder that all paths have in common, with its slash. */
function commonFolder(paths) {
  let common = paths[0] ?? "";
  for (const path of paths) while (!path.startsWith(common)) common = common.slice(0, -1);
  return common.slice(0, common.lastIndexOf("/") + 1);
}

function sources({ rows, of: all }, totals, of) {
  const folder = commonFolder(rows.map((row) => row.path));
  const shown = table([
    { name: "file", left: true, of: (row) => row.path, show: (row) => listOf({ of, source: row.number }, el("bdi", { title: row.path }, row.path.slice(folder.length))) },
    { name: "documents", of: (row) => row.documents, show: (row) => whole(row.documents) },
    { name: "tokens", of: (row) => row.tokens, show: (row) => compact(row.tokens) },
    { name: "of all tokens", of: (row) => row.tokens, show: (row) => share(row.tokens, totals.tokens) },
    { name: "bytes/token", of: (row) => row.bytes_per_token, show: (row) => (row.bytes_per_token ? `${row.is_sample ? "≈ " : ""}${row.bytes_per_token.toFixed(2)}` : "–") },
    { name: "rejected", of: (row) => row.rejected, show: (row) => whole(row.rejected) },
  ], rows, { sort: 2, most: 100 });
  const notes = folder.length > 1 ? [`All are in ${folder}.`] : [];
  if (all > 100) notes.push(`The largest 100 of ${whole(all)} files.`);
  if (rows.some((row) => row.is_sample)) notes.push("≈: of the first unit of a file.");
  return [shown, notes.length ? note(notes.join(" ")) : null].filter(Boolean);
}

/** What documents were given beside what they are: `tokenmill annotate`. */
const columns = (found, of) => table([
  { name: "column", left: true, of: (row) => row.name, show: (row) => listOf({ of, where: `${row.name} is not null` }, row.name) },
  { name: "of", left: true, of: (row) => row.type },
  { name: "documents with a value", of: (row) => row.documents - row.missing, show: (row) => whole(row.documents - row.missing) },
  { name: "without", of: (row) => row.missing, show: (row) => whole(row.missing) },
  { name: "different values", of: (row) => row.values, show: (row) => (row.values ? whole(row.values) : "–") },
], found);

function accounting(totals) {
  const parts = [["read", totals.rows], ["documents", totals.documents], ["of rows in several pieces", totals.pieces],
    ["empty", totals.empty], ["rejected", totals.rejected], ["left out by a condition", totals.filtered],
    ["left out by a limit", totals.skipped]];
  return facts(parts.filter(([name, number]) => number || name === "read").map(([name, number]) => [name, whole(number)]));
}

function lengths(found) {
  const bins = found.histogram;
  const x = bins.map((_, place) => place);
  const name = (place) => (bins[place] ? compact(bins[place].low) : "");
  return [
    chart({ label: "Documents by their tokens, in powers of two", x, bars: true, xName: "tokens from", showX: name,
      lines: [{ name: "documents", values: bins.map((bin) => bin.documents) }] }),
    facts([["shortest", whole(found.shortest)], ["half have at most", whole(found.percentiles[50])], ["mean", whole(Math.round(found.mean))],
      ["99% have at most", whole(found.percentiles[99])], ["longest", whole(found.longest)]]),
    sampled(found.documents, found.of, "documents"),
  ].filter(Boolean);
}

function zipf(found) {
  return [
    chart({ label: "How often a token is there, by its rank", x: found.ranks, logX: true, logY: true, xName: "rank", lines: [{ name: "times", values: found.counts }] }),
    el("p", { class: "small soft gap" }, `${whole(found.seen)} of ${whole(found.vocabulary)} ids are there. The most frequent:`),
    el("div", { class: "chips" }, found.top.slice(0, 28).map((each) =>
      el("span", { class: "chip", title: `id ${each.id}: ${whole(each.count)} times` }, el("b", {}, el("bdi", {}, spaced(each.text))), percent(each.count, found.tokens)))),
    sampled(found.tokens, found.of, "tokens"),
  ].filter(Boolean);
}

/** Text of one token in which nothing is invisible. */
const spaced = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

function rejects(found) {
  if (!found.of) return [el("p", { class: "soft" }, "None: every row that was read is a document, was empty, or was left out as asked.")];
  const place = (row) => `${row.file} · row ${whole(row.row)}`;
  return [
    facts(Object.entries(found.reasons).map(([reason, number]) => [reason, whole(number)])),
    el("details", { open: found.of <= 10 }, el("summary", {}, `The first ${found.rows.length} rows`),
      table([
        { name: "where", left: true, of: place, show: (row) => el("bdi", {}, place(row)) },
        { name: "why", left: true, of: (row) => row.reason, show: (row) => [row.reason, el("div", { class: "soft small" }, row.detail)] },
        { name: "the row", left: true, of: (row) => row.raw ?? "", show: (row) => (row.raw === null ? el("span", { class: "soft" }, "not to be had") : el("code", {}, el("bdi", {}, row.raw.slice(0, 400)))) },
      ], found.rows)),
    found.seen < found.of ? note(`Reasons are of ${whole(found.seen)} of ${whole(found.of)} rows.`) : null,
  ].filter(Boolean);
}

const engines = (found) => found.map((engine) => note(
  `Ids by ${engine.name} ${engine.version}, checked against ${engine.reference} ${engine.reference_version} on ${some(engine.checked_documents, "document")}: `,
  engine.mismatches ? `${whole(engine.mismatches)} differed, and their units were encoded again.` : "all equal."));

// --- Documents ----------------------------------------------------------------------------------

let listed = null; // the list that is shown, by what was asked for

async function documents(given) {
  const { of = "0", split = "", source = "", least = "", most = "", text = "", where = "", first = "" } = given;
  const asked = { of, split, source, least, most, text, where, first };
  const key = JSON.stringify(asked);
  if (listed?.key !== key) listed = makeList(key, asked);
  if (!listed.at.isConnected) {
    listed.detail = el("div", { class: "detail" });
    listed.page = el("div", { class: "browse" }, listed.at, listed.detail);
  }
  await listed.ready;
  const number = given.n ?? listed.numbers[0];
  listed.mark(number);
  listed.detail.replaceChildren(number === undefined ? el("div", { class: "card soft" }, "No document is like this.") : await detail({ of, split, n: number, at: given.at ?? 0 }));
  return [listed.page];
}

function makeList(key, asked) {
  const store = about.stores[asked.of];
  const rows = el("ol", { "aria-label": "Documents" });
  const end = el("p", { class: "end", role: "status" });
  const made = { key, numbers: [], next: asked.first || 0, busy: false, stopped: false };
  const filter = (changed) => go("documents", { ...asked, ...changed });
  const number = (name, value) => el("input", { type: "number", min: 0, inputmode: "numeric", value, placeholder: "any", onchange: (event) => filter({ [name]: event.target.value }) });
  const search = el("input", { type: "search", id: "search", value: asked.text, placeholder: "Text that is in it", onchange: (event) => filter({ text: event.target.value }) });
  const form = el("form", { onsubmit: (event) => { event.preventDefault(); filter({ text: search.value }); } }, el("div", { class: "fields" },
    field("Search", search, "wide"),
    field("Where", el("input", { type: "search", id: "where", value: asked.where, placeholder: "tokens > 500 and " + (store.columns[7] ? `${store.columns[7]} == …` : "folder like '%en%'"), title: `A condition on: ${store.columns.join(", ")}`, spellcheck: "false", onchange: (event) => filter({ where: event.target.value }) }), "wide"),
    field("Split", choice([["", "all"], ...store.splits.map((name) => [name, name])], asked.split, (split) => filter({ split, first: "" })), "half"),
    field("Source", choice([["", "all"], ...store.sources.map((path, place) => [place, path])], asked.source, (source) => filter({ source, first: "" })), "half"),
    field("Tokens, at least", number("least", asked.least)),
    field("at most", number("most", asked.most)),
    field("From number", number("first", asked.first))));
  made.at = el("section", { class: "card list", "aria-label": "List of documents" }, kept ? null : form, rows, end);

  const line = (each) => {
    made.numbers.push(each.number);
    const show = () => go("documents", { ...asked, n: each.number });
    return el("li", {}, el("button", { type: "button", "data-n": each.number, onclick: show },
      el("span", { class: "about" }, el("b", {}, `#${whole(each.number)}`), el("span", {}, `${whole(each.tokens)} tokens · ${each.split}`)),
      el("span", { class: "begin", dir: "auto" }, each.text || "(empty)")));
  };
  /** One more part of the list: as many as come in one answer. */
  async function more() {
    if (made.busy || made.next === null) return;
    made.busy = true;
    try {
      const { split, source, least, most, text, where, of } = asked;
      const found = await ask("documents", { of, split, source, least, most, text, where, first: made.next, count: kept ? "" : 50 });
      rows.append(...found.documents.map(line));
      made.next = found.next;
      const seen = found.next ?? found.end;
      const looked = kept ? ` of ${whole(found.end)}, evenly spread` : text || least || most || where ? `, looked at ${percent(seen - found.begin, found.end - found.begin)}` : ` of ${whole(found.end - found.begin)}`;
      end.replaceChildren(`${whole(made.numbers.length)} shown${looked}`,
        found.next === null || kept ? "" : el("span", {}, " · ", button("More", more)));
      made.any = found.documents.length > 0;
    } catch (error) {
      made.next = null;
      end.replaceChildren(problem(error));
    }
    made.busy = false;
  }
  /** Search on until there is something to see, or the end; another list stops it. */
  async function fill() {
    do await more(); while (listed === made && made.next !== null && made.numbers.length < 20 && !kept);
  }
  rows.addEventListener("scroll", () => { if (rows.scrollTop + rows.clientHeight > rows.scrollHeight - 300) more(); });
  made.ready = new Promise((resolve) => { setTimeout(async () => { await more(); resolve(); fill(); }); });
  made.mark = (number) => {
    $("[aria-current]", rows)?.removeAttribute("aria-current");
    const chosen = $(`[data-n="${Number(number)}"]`, rows);
    chosen?.setAttribute("aria-current", "true");
    chosen?.scrollIntoView({ block: "nearest" });
  };
  made.step = async (by) => {
    const now = Number($("[aria-current]", rows)?.dataset.n ?? -1);
    let place = made.numbers.indexOf(now) + by;
    if (place >= made.numbers.length) await more();
    place = Math.min(Math.max(place, 0), made.numbers.length - 1);
    if (made.numbers[place] !== now) go("documents", { ...asked, n: made.numbers[place] });
  };
  return made;
}

const looks = { ids: false, mask: true };

async function detail({ of, split, n, at }) {
  let found;
  try {
    found = await ask("document", { of, split, number: n, first: at || "" });
  } catch (error) {
    return problem(error);
  }
  const turn = (first) => go("documents", { ...route().given, n, at: first });
  const shown = found.ids.length;
  const parts = shown < found.tokens && (kept ? note(`The first ${whole(shown)} tokens of it are in this file.`) : el("div", { class: "turn small" },
    button("‹ before", () => turn(Math.max(0, found.first - shown)), { disabled: found.first === 0, id: "before" }),
    button("after ›", () => turn(found.first + shown), { disabled: found.first + shown >= found.tokens, id: "after" }),
    el("span", { class: "soft" }, `tokens ${whole(found.first)} to ${whole(found.first + shown)} of ${whole(found.tokens)}`)));
  const tokens = el("div", { class: `tokens ${looks.ids ? "ids" : ""}`, dir: "auto", id: "tokens" }, pieces(found));
  const toggle = (name, words) => el("label", { class: "small" }, el("input", { type: "checkbox", checked: looks[name], onchange: (event) => {
    looks[name] = event.target.checked;
    tokens.classList.toggle("ids", looks.ids);
    if (name === "mask") tokens.replaceChildren(...pieces(found));
  } }), words);
  return el("article", { class: "card" },
    el("div", { class: "head" }, el("h1", {}, `Document ${whole(found.number)}`), el("p", { class: "soft small" }, `of ${whole(found.of)} in ${split || "all splits"}`)),
    facts([
      ["from", el("bdi", { class: "mono" }, found.path)],
      ["row", whole(found.row) + (found.line ? ` (line ${whole(found.line)})` : "") + (found.piece === null ? "" : `, piece ${found.piece + 1} of ${found.pieces}`)],
      ["split", found.split],
      ["tokens", whole(found.tokens)],
      ["count for the loss", found.counted === null ? null : `${whole(found.counted)} (${percent(found.counted, found.tokens)})`],
      ["answer", found.answer],
      ...Object.entries(found.columns),
    ]),
    el("div", { class: "turn" }, toggle("ids", "ids"), found.counts && toggle("mask", "loss mask"), kept ? null : rowButton({ of, split, n })),
    parts,
    el("div", { class: "sides" },
      el("section", {}, el("h3", {}, "Text"), el("div", { class: "text", dir: "auto", id: "text" }, found.text)),
      el("section", {}, el("h3", {}, found.counts && looks.mask ? "Tokens: those without colour do not count for the loss" : "Tokens"), tokens)));
}

function pieces(found) {
  const special = new Set(found.special);
  return found.ids.flatMap((id, place) => {
    const text = found.texts[place];
    const off = looks.mask && found.counts && !found.counts[place];
    const kinds = ["t", special.has(place) && "special", off && "off"].filter(Boolean).join(" ");
    const words = text.replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
    const made = el("span", { class: kinds, title: `id ${id}` }, el(text.includes("\\") ? "bdi" : "span", {}, words), el("small", {}, String(id)));
    return text.includes("\n") ? [made, "\n"] : [made];
  });
}

function rowButton({ of, split, n }) {
  const at = button("Show the row", async () => {
    try {
      const found = await ask("row", { of, split, number: n });
      const words = found.text === null ? `It is not to be had: ${found.why}` : found.text;
      at.replaceWith(el("details", { open: true, class: "small" }, el("summary", {}, `As its file has it${found.cut ? `, the first part of ${size(found.bytes)}` : ""}`), el("pre", { dir: "auto", id: "row" }, words)));
    } catch (error) {
      at.replaceWith(problem(error));
    }
  });
  return at;
}

// --- Batches ------------------------------------------------------------------------------------

const PACKINGS = [["concat", "concat: end to end"], ["best-fit", "best-fit: whole documents"], ["pad", "pad: one to a row"]];
const SHUFFLES = [["full", "full"], ["block", "block"], ["nearby", "nearby"], ["none", "none"]];

async function batches(given) {
  if (!about.stores.length) return [el("div", { class: "card soft" }, "There is no store.")];
  const one = given.of ?? "0";
  const splits = about.stores[one].splits;
  const usual = { step: 0, seq_len: 2048, packing: "concat", shuffle: "full", ranks: 2, rows: 4, seed: 0, balance: "",
    split: splits.includes("train") || !splits.length ? "train" : splits[0],
    weights: about.stores.map((_, place) => (String(place) === one ? 1 : 0)).join() };
  const asked = { ...usual, ...given };
  delete asked.of;
  const rows = el("div");
  const waste = el("div");
  const slider = el("input", { type: "range", min: 0, max: 1, value: asked.step, id: "step", "aria-label": "Step", oninput: () => change({ step: slider.value }) });
  const exact = el("input", { type: "number", min: 0, value: asked.step, "aria-label": "Step, as a number", onchange: () => change({ step: exact.value || 0 }) });
  const number = (name, more = {}) => el("input", { type: "number", min: 1, value: asked[name], id: name, onchange: (event) => change({ [name]: event.target.value, step: 0 }), ...more });
  const pick = (name, options) => choice(options, asked[name], (value) => change({ [name]: value, step: 0 }));
  let busy = false;
  let again = false;

  /** Draw the rows of a step; while an answer is awaited only the newest wish counts. */
  async function draw() {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const found = await ask("batch", asked);
      slider.max = Math.max(found.steps_of_epoch - 1, Number(asked.step));
      slider.value = exact.value = asked.step;
      rows.replaceChildren(...drawRanks(found, asked));
    } catch (error) {
      rows.replaceChildren(problem(error));
    }
    busy = false;
    if (again) { again = false; draw(); }
  }
  function compare() {
    const store = Math.max(0, asked.weights.split(",").findIndex((weight) => Number(weight)));
    later(ask("packings", { store, seq_len: asked.seq_len, split: asked.split }), (found) => drawWaste(found, asked.packing), waste);
  }
  function change(changed) {
    const length = String(changed.seq_len ?? asked.seq_len) !== String(asked.seq_len);
    Object.assign(asked, changed);
    history.replaceState(null, "", link("batches", { ...(one === "0" ? {} : { of: one }), ...asked }) );
    draw();
    if (length || "split" in changed || "weights" in changed || "packing" in changed) compare();
  }
  stepBatch = (by) => change({ step: Math.max(0, Number(asked.step) + by) });
  const weights = about.stores.length > 1 && about.stores.map((store, place) =>
    field(`weight of ${store.name}`, el("input", { type: "number", min: 0, step: "any", value: asked.weights.split(",")[place] ?? 0, onchange: (event) => {
      const all = about.stores.map((_, at) => asked.weights.split(",")[at] ?? "0");
      all[place] = event.target.value || "0";
      change({ weights: all.join(), step: 0 });
    } })));
  draw();
  compare();
  return [
    el("div", { class: "head" }, el("h1", {}, "Batches"), el("p", { class: "soft small" }, "The rows that a Loader with these options gives to each rank")),
    el("form", { class: "card", onsubmit: (event) => event.preventDefault() }, el("div", { class: "fields" },
      field("Sequence length", number("seq_len")), field("Packing", pick("packing", PACKINGS)), field("Shuffle", pick("shuffle", SHUFFLES)),
      splits.length > 1 && field("Split", pick("split", splits.map((name) => [name, name]))),
      field("Ranks", number("ranks")), field("Rows per rank", number("rows")), field("Seed", number("seed", { min: 0 })), weights,
      el("label", { class: "small" }, el("input", { type: "checkbox", id: "balance", checked: asked.balance === "true", onchange: (event) => change({ balance: event.target.checked ? "true" : "" }) }), "balance attention")),
    el("div", { class: "slide" }, el("span", { class: "soft small" }, "Step"), slider, exact)),
    el("div", { class: "grid gap" }, el("section", { class: "card two-thirds" }, rows), card("What each packing would waste", "third", waste)),
  ];
}
let stepBatch = () => {};

function drawRanks(found, asked) {
  const most = Math.max(...found.ranks.map((each) => each.load));
  return found.ranks.map((each) => el("section", { class: "rank" },
    el("h2", {}, `Rank ${each.rank}`, el("span", { class: "load", title: `${whole(each.pairs)} pairs of tokens look at each other` },
      el("span", { class: "share", "aria-hidden": "true" }, el("i", { class: each.load === most && most > 1.05 ? "most" : "", style: { width: `${(100 * each.load) / Math.max(most, 1)}%` } })),
      ` attention ${each.load.toFixed(2)} of the mean`)),
    each.rows.map((row) => drawRow(row, found.places, asked)))).concat(
    el("p", { class: "note" }, `Step ${whole(found.step)} of ${whole(found.steps_of_epoch)} in an epoch of ${whole(found.rows_of_epoch)} rows. Length is to scale; hatched places are padding.`));
}

function drawRow(row, places, { split }) {
  const bar = el("div", { class: "row" }, row.parts.map(([number, first, tokens, at]) => {
    const size = { left: `${(100 * at) / places}%`, width: `${(100 * tokens) / places}%` };
    if (number < 0) return el("span", { class: "padding", style: size, title: `padding: ${whole(tokens)} places` });
    const words = `document ${whole(number)}, tokens ${whole(first)} to ${whole(first + tokens)}`;
    return el("a", { class: "part", style: { ...size, "--hue": `var(--c${(number % 7) + 1})` }, title: words, "aria-label": words,
      href: link("documents", { of: row.of === 0 ? "" : row.of, split, n: number, at: first || "" }) }, tokens > places / 14 ? `#${number}` : "");
  }));
  const name = about.stores.length > 1 ? ` · ${about.stores[row.of].name}` : "";
  return el("div", { class: "packed" }, el("span", { class: "soft small" }, `row ${whole(row.row)}${row.epoch ? `, epoch ${row.epoch}` : ""}${name}`), bar);
}

function drawWaste(found, packing) {
  if (!found.packings.length) return "There is no document.";
  const share = (part) => (part === 0 ? "–" : part < 0.0005 ? "< 0.1%" : percent(part, 1));
  return [
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["packing", "rows", "padding", "dropped", "split"].map((name, place) => el("th", { scope: "col", class: place ? "" : "left" }, name)))),
      el("tbody", {}, found.packings.map((each) => el("tr", { class: each.name === packing ? "chosen" : "" }, el("th", { scope: "row", class: "left" }, each.name),
        [compact(each.rows), share(each.padding), share(each.dropped), share(each.split)].map((words) => el("td", {}, words))))))),
    note("Padding of all places in rows, dropped of all tokens, split of all documents.", found.documents < found.of ? ` Computed on ${compact(found.documents)} of ${compact(found.of)} documents.` : ""),
  ];
}

// --- Runs and builds: what may be going on ------------------------------------------------------

/** Ask again every other second for as long as the page is shown. */
function live(draw, milliseconds = 2000) {
  const mine = turn;
  setTimeout(async () => {
    if (mine !== turn) return;
    if (!document.hidden) await draw().catch(() => {});
    live(draw, milliseconds);
  }, milliseconds);
}

/** Lines over different places as columns over all of them; what is undefined is no gap. */
function joined(lines) {
  const x = [...new Set(lines.flatMap((line) => line.x))].sort((one, other) => one - other);
  return { x, lines: lines.map((line) => {
    const at = new Map(line.x.map((place, number) => [place, line.y[number]]));
    return { ...line, values: x.map((place) => at.get(place)) };
  }) };
}

const METRICS = [
  ["Loss", { loss: "training", val_loss: "validation" }, (value) => value.toFixed(value < 1 ? 3 : 2)],
  ["Tokens per second", { tokens_per_second: "" }, compact],
  ["Time waiting for data", { wait_share: "" }, (value) => `${(100 * value).toFixed(value < 0.1 ? 2 : 0)}%`],
  ["Wait for data, milliseconds", { wait_p50_ms: "median", wait_p99_ms: "99% below" }, compact],
  ["Share of the device's peak (MFU)", { mfu: "" }, (value) => `${(100 * value).toFixed(0)}%`],
  ["Memory", { memory_bytes: "" }, size],
  ["Norm of the gradient", { grad_norm: "" }, compact],
  ["Learning rate", { lr: "" }, (value) => (value ? value.toExponential(1) : "0")],
];

/** What is drawn: the metrics that all runs may have, and the tokens of each source of mixtures. */
const metricsOf = (found) => {
  const sources = new Set(found.flatMap((run) => Object.keys(run.lines).filter((name) => name.startsWith("tokens/"))));
  const names = Object.fromEntries([...sources].map((name) => [name, name.slice("tokens/".length)]));
  return sources.size ? [...METRICS, ["Tokens of each source", names, compact]] : METRICS;
};

async function runs() {
  const hidden = new Set();
  const look = () => Promise.all(about.runs.map((_, of) => ask("run", { of })));
  let found = await look();
  const drawn = [];
  const latest = el("div", { class: "scroll" });
  const linesOf = (names) => joined(found.flatMap((run, place) => (hidden.has(place) ? [] : Object.entries(names).filter(([name]) => run.lines[name]).map(([name, words]) => (
    { name: [found.length > 1 && run.name, words].filter(Boolean).join(", ") || name, x: run.lines[name][0], y: run.lines[name][1], of: place })))));
  const at = el("div", { class: "grid gap" });
  function tell() {
    latest.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ["run", "step", "loss", "tokens", "tokens/s", "waiting"].map((name, place) => el("th", { scope: "col", class: place ? "" : "left" }, name)))),
      el("tbody", {}, found.map((run, place) => {
        const { step, loss, tokens, tokens_per_second: rate, wait_share: wait } = run.last;
        const shown = found.length > 1 && el("input", { type: "checkbox", checked: !hidden.has(place), "aria-label": `Show ${run.name}`, onchange: () => { hidden.has(place) ? hidden.delete(place) : hidden.add(place); draw(); } });
        return el("tr", {}, el("th", { scope: "row", class: "left" }, shown, el("bdi", {}, run.name)), [whole(step ?? 0), loss?.toFixed(3), tokens && compact(tokens), rate && compact(rate), wait == null ? null : percent(wait, 1)].map((words) => el("td", {}, words ?? "–")));
      }))));
  }
  function draw() {
    drawn.length = 0;
    at.replaceChildren(...metricsOf(found).flatMap(([title, names, showY]) => {
      const { x, lines } = linesOf(names);
      if (!lines.length) return [];
      const made = chart({ label: `${title} over steps`, x, lines, xName: "step", steps: true, showY, zero: title !== "Loss" });
      drawn.push([made, names]);
      return [card(title, "half", made)];
    }));
  }
  tell();
  draw();
  const mine = turn;
  async function grow() {
    do {
      found = await look();
      tell();
      if (metricsOf(found).filter(([, names]) => linesOf(names).lines.length).length > drawn.length) draw();
      for (const [made, names] of drawn) { const { x, lines } = linesOf(names); made.update(x, lines); }
    } while (mine === turn && found.some((run) => run.unread)); // a long run comes in parts
  }
  if (found.some((run) => run.unread)) setTimeout(grow);
  live(grow);
  return [el("div", { class: "head" }, el("h1", {}, "Training runs"), el("p", { class: "soft small" }, "by their metrics.jsonl, as it grows")), el("section", { class: "card" }, latest), at];
}

async function builds() {
  const drawn = about.builds.map(() => new Map());
  const places = about.builds.map(() => el("div", { class: "build" }));
  async function draw() {
    const found = await Promise.all(about.builds.map((_, of) => ask("build", { of })));
    found.forEach((build, place) => {
      const parts = drawn[place];
      const known = [...parts.keys()].join();
      const charted = build.charts.filter((each) => each.lines.some((line) => line.x.length));
      // Charts and lists stay where they are: only their content is new.
      for (const each of charted) {
        const content = joined(each.lines);
        if (parts.has(each.title)) parts.get(each.title).update(content.x, content.lines);
        else parts.set(each.title, chart({ label: `${each.title}, over seconds`, xName: "seconds", ...content, showY: compact }));
      }
      for (const [name, content] of Object.entries(build.units ? buildParts(build) : { said: timelineTiles(build) })) {
        if (!parts.has(name)) parts.set(name, el("div", { class: name === "said" ? "tiles" : "" }));
        const seen = name === "rejects" ? JSON.stringify([build.reasons, build.rejects]) : null;
        if (seen === null || parts.get(name).dataset.seen !== seen) parts.get(name).replaceChildren(...[content].flat().filter(Boolean));
        if (seen !== null) parts.get(name).dataset.seen = seen;
      }
      if (known === [...parts.keys()].join()) return;
      const lists = [["Units", "units"], ["Rejected rows", "rejects"]].filter(([, name]) => parts.has(name));
      places[place].replaceChildren(el("h2", { class: "gap" }, el("bdi", {}, build.name)), parts.get("said"),
        el("div", { class: "grid" }, lists.map(([title, name]) => card(title, "half", parts.get(name))),
          charted.map((each) => card(each.title, "half", parts.get(each.title)))));
    });
  }
  await draw();
  live(draw, 1500);
  return [el("div", { class: "head" }, el("h1", {}, "Builds"), el("p", { class: "soft small" }, "by what they have written so far")), ...places];
}

const UNITS = { done: "done", rejects: "done, with rejected rows", working: "in work", failed: "lost in work", waiting: "to come" };

/** What a build has made so far, by the parts of its page. */
function buildParts(build) {
  const { totals, numbers } = build;
  const done = (numbers.done ?? 0) + (numbers.rejects ?? 0) + build.unread;
  const all = Object.values(numbers).reduce((sum, number) => sum + number, build.unread);
  const ago = Math.max(0, Date.now() / 1000 - build.last);
  const state = build.is_done ? "done" : build.failed ? "failed" : build.is_at_work ? "at work" : "stopped";
  const look = (totals.documents > 0 || build.is_done) && button(build.is_done ? "Look at the store" : "Look at what is there", async () => {
    about = await ask("about");
    const of = about.stores.findIndex((store) => store.path.endsWith(`/${build.name}`));
    go("overview", { of: of > 0 ? of : "" });
  });
  const each = Math.max(...build.units.map((unit) => unit.units), 1);
  return {
    said: [tile(state, "the build"),
      tile(whole(done) + (build.is_planned ? ` of ${whole(all)}` : ""), "units done"), tile(whole(numbers.working ?? 0), "in work"),
      tile(size(totals.input_bytes), build.input_bytes ? `of ${size(build.input_bytes)} of input` : "of input"),
      build.bytes_per_second && tile(`${size(build.bytes_per_second)}/s`, "of input, lately"),
      tile(compact(totals.tokens), `tokens in ${compact(totals.documents)} documents`), tile(compact(totals.rejected), "rows rejected"),
      build.budget && tile(size(build.budget), "budget of memory")],
    units: [build.failed && el("div", { class: "problem" }, el("strong", {}, "It failed. "), build.failed),
      el("div", { class: "map", role: "img", "aria-label": `${whole(done)} units done, ${numbers.working ?? 0} in work, ${numbers.failed ?? 0} lost` }, build.units.map((unit) =>
        el("i", { class: unit.state, title: [unit.name + (unit.units > 1 ? ` and ${unit.units - 1} more` : ""), UNITS[unit.state], unit.tokens && some(unit.tokens, "token"), unit.rejected && some(unit.rejected, "row") + " rejected"].filter(Boolean).join(", ") }))),
      el("p", { class: "note legend" }, Object.entries(UNITS).filter(([name]) => numbers[name]).map(([name, words]) => el("span", {}, el("i", { class: name }), `${words}: ${whole(numbers[name])}`))),
      note(build.is_done ? "It is done." : build.last ? `The newest unit is ${ago < 90 ? `${ago.toFixed(0)} s` : `${(ago / 60).toFixed(0)} minutes`} old.` : "No unit is done yet.",
        build.is_planned ? "" : " How many there will be is known when the last file was read to its end.", each > 1 ? ` A square is ${each} units.` : "",
        state === "stopped" ? " Nobody builds: the same command goes on." : ""),
      look && el("div", { class: "turn" }, look)],
    rejects: build.rejects.length ? [facts(Object.entries(build.reasons).map(([reason, number]) => [reason, whole(number)])),
      table([
        { name: "where", left: true, of: (row) => row.file, show: (row) => el("bdi", {}, `${row.file} · row ${whole(row.row)}`) },
        { name: "why", left: true, of: (row) => row.reason, show: (row) => [row.reason, el("div", { class: "soft small" }, row.detail)] },
      ], build.rejects)] : el("p", { class: "soft" }, "None so far."),
  };
}

const timelineTiles = (build) => [
  tile(build.outcome ?? build.phase, build.outcome ? "outcome" : "phase"),
  tile(build.seconds < 90 ? `${build.seconds.toFixed(0)} s` : `${(build.seconds / 60).toFixed(1)} min`, build.runs > 1 ? `in ${build.runs} runs` : "since it began"),
  build.budget && tile(size(build.budget), "budget of memory")];

// --- The frame: bar, routes, keys ---------------------------------------------------------------

let about = null;
const PAGES = { overview, documents, batches, runs, builds };
const TITLES = { overview: "Overview", documents: "Documents", batches: "Batches", runs: "Runs", builds: "Builds" };
/** The pages that have something to show. */
const pages = () => Object.keys(PAGES).filter((name) => !(kept && name === "batches") && (name in { runs: 0, builds: 0 } ? about[name] : about.stores).length);
const link = (page, given = {}) => {
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value != null && value !== "")).toString();
  return `#${page}${query && `?${query}`}`;
};
const go = (page, given) => { location.hash = link(page, given); };

function route() {
  const [page, query = ""] = location.hash.slice(1).split("?");
  return { page: pages().includes(page) ? page : pages()[0], given: Object.fromEntries(new URLSearchParams(query)) };
}

let turn = 0;
async function show() {
  const mine = ++turn;
  const { page, given } = route();
  bar(page, given);
  let drawn;
  try {
    drawn = await PAGES[page](given);
  } catch (error) {
    drawn = [problem(error)];
  }
  if (mine !== turn) return;
  const before = $("#main").firstElementChild;
  if (before !== drawn[0]) $("#main").replaceChildren(...drawn);
  for (const each of charts) if (!each.at.isConnected) { each.plot?.destroy(); charts.delete(each); }
  document.title = `${TITLES[page]} · tokenmill`;
  document.body.dataset.shown = location.hash || "#overview";
}

function bar(page, given) {
  const of = given.of ?? "0";
  $("#bar").replaceChildren(
    el("span", { class: "brand" }, "tokenmill"),
    el("nav", { "aria-label": "Pages" }, pages().map((name) => el("a", { href: link(name, { of: of === "0" || name in { runs: 0, builds: 0 } ? "" : of }), "aria-current": name === page ? "page" : null }, TITLES[name]))),
    el("div", { class: "tools" },
      about.stores.length > 1 && !["runs", "builds"].includes(page) && choice(about.stores.map((store, place) => [place, store.name]), of, (chosen) => go(page, { of: chosen })),
      button("◐", swapTheme, { "aria-label": "Light or dark", title: "Light or dark (t)", id: "theme" }),
      button("?", () => $("#help").showModal(), { "aria-label": "Keys", title: "Keys (?)" })));
}

function swapTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  for (const each of charts) each.redraw();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => requestAnimationFrame(() => { for (const each of charts) each.redraw(); }));

const KEYS = [
  ["1 … 5", "pages", null],
  ["/", "search", () => { if (route().page !== "documents") go("documents", {}); setTimeout(() => $("#search")?.focus(), 150); }],
  ["j ↓", "next document", () => listed?.at.isConnected && listed.step(1)],
  ["k ↑", "document before", () => listed?.at.isConnected && listed.step(-1)],
  ["→", "next step of batches", () => route().page === "batches" && stepBatch(1)],
  ["←", "step before", () => route().page === "batches" && stepBatch(-1)],
  ["n", "next part of a long document", () => $("#after")?.click()],
  ["p", "part before", () => $("#before")?.click()],
  ["t", "light or dark", swapTheme],
  ["?", "these keys", () => $("#help").showModal()],
];

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input:not([type=checkbox], [type=range]), select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const key = { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→" }[event.key] ?? event.key;
  const page = pages()[Number(key) - 1];
  const act = page ? () => go(page, {}) : KEYS.find(([names, , does]) => does && names.split(" ").includes(key))?.[2];
  if (!act || $("#help").open) return;
  if (/[↑↓]/.test(key) && route().page !== "documents") return;
  if (/[←→]/.test(key) && route().page !== "batches") return;
  event.preventDefault();
  act();
});

$("#help").append(el("h2", {}, "Keys"), facts(KEYS.map(([names, does]) => [el("span", {}, names.split(" ").map((name) => [name === "…" ? " … " : el("kbd", {}, name), " "]).flat()), does])),
  el("form", { method: "dialog", class: "turn" }, el("button", { class: "plain" }, "Close")));

try {
  about = await ask("about");
  addEventListener("hashchange", show);
  await show();
} catch (error) {
  $("#main").replaceChildren(problem(error));
}
