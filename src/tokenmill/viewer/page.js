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
const percent = (part, of) => (of ? `${((100 * part) / of).toFixed(1)}%` : "0%");
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

/** Of the ticks of a logarithmic axis the powers of ten. */
const decades = (_, ticks) => ticks.map((tick) => (Number.isInteger(Math.log10(tick)) ? tick : null));

/** Lines, or bars, over a common x; null is a gap. `label` says to a screen reader what it shows. */
function chart({ label, x, lines, bars = false, logX = false, logY = false, height = 230, showX = compact, showY = compact, xName = "x" }) {
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
      dash: line.dash ? [5, 4] : undefined,
      ...(bars ? { fill: colour("c1"), width: 0, paths: uPlot.paths.bars({ size: [0.86, 80], radius: 0.12 }) } : {}),
    }));
    const plot = new uPlot({
      width: Math.max(at.clientWidth, 120),
      height,
      padding: [10, 8, 0, 0],
      cursor: { y: false, points: { size: 7 } },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, ...(bars ? { range: [-0.6, x.length - 0.4] } : {}) },
        y: { distr: logY ? 3 : 1, ...(logY ? {} : { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.06 : 1] }) },
      },
      axes: [
        { ...axis(), grid: { show: false }, size: 32, space: 56, ...(logX ? { filter: decades } : {}), values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : showX(tick))),
          ...(bars ? { splits: () => x.filter((place) => place % Math.ceil(x.length / Math.max(2, at.clientWidth / 60)) === 0) } : {}) },
        { ...axis(), size: 56, ...(logY ? { filter: decades } : {}), values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : showY(tick))) },
      ],
      series: [{ label: xName, value: (_, value) => (value == null ? "–" : showX(value)) }, ...series],
    }, [x, ...lines.map((line) => line.values)], at);
    return plot;
  }
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
    if (!(`${what}?${query}` in kept)) throw new Error("this page was written to a file, and this is not in it");
    return kept[`${what}?${query}`];
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
function later(promise, draw) {
  const at = el("div", {}, el("p", { class: "soft" }, "…"));
  promise.then((found) => at.replaceChildren(...[draw(found)].flat()), (error) => at.replaceChildren(problem(error)));
  return at;
}

// --- Overview -----------------------------------------------------------------------------------

const share = (part, of) => [percent(part, of), el("span", { class: "share", "aria-hidden": "true" }, el("i", { style: { width: percent(part, of) } }))];
const sampled = (seen, of, noun) => (seen < of ? note(`A sample: ${compact(seen)} of ${compact(of)} ${noun}, evenly spread.`) : null);

async function overview({ of = "0" }) {
  const found = await ask("overview", { of });
  const store = about.stores[of];
  const { totals } = found;
  const lost = totals.rejected;
  return [
    el("div", { class: "head" }, el("h1", {}, store.name), el("p", { class: "soft small mono" }, store.path)),
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
        { name: "split", left: true, of: (row) => row[0], show: ([name]) => el("a", { href: link("documents", { of, split: name }) }, name) },
        { name: "documents", of: (row) => row[1].documents, show: (row) => whole(row[1].documents) },
        { name: "tokens", of: (row) => row[1].tokens, show: (row) => whole(row[1].tokens) },
      ], Object.entries(found.splits)), el("h2", { class: "gap" }, "Every row"), accounting(totals)),
      card("Tokens per document", "half", found.lengths ? lengths(found.lengths) : "There is no document."),
      card("How often tokens are there", "half", later(ask("frequencies", { of }), zipf)),
      card("Rejected rows", "", later(ask("rejects", { of }), rejects)),
      card("How it was made", "half", facts(Object.entries(found.identity).filter(([name]) => !name.includes("fingerprint"))),
        engines(found.engines)),
      card("Options", "half", facts(Object.entries(found.config).map(([name, is]) => [name, is === null ? null : el("code", {}, typeof is === "string" ? is : JSON.stringify(is))])),
        facts(Object.entries(found.identity).filter(([name]) => name.includes("fingerprint")).map(([name, is]) => [name, el("code", { class: "small" }, is)])))),
  ];
}

function sources({ rows, of: all }, totals, of) {
  const shown = table([
    { name: "file", left: true, of: (row) => row.path, show: (row) => el("a", { href: link("documents", { of, source: row.number }) }, el("bdi", {}, row.path)) },
    { name: "documents", of: (row) => row.documents, show: (row) => whole(row.documents) },
    { name: "tokens", of: (row) => row.tokens, show: (row) => compact(row.tokens) },
    { name: "of all tokens", of: (row) => row.tokens, show: (row) => share(row.tokens, totals.tokens) },
    { name: "bytes/token", of: (row) => row.bytes_per_token, show: (row) => (row.bytes_per_token ? `${row.is_sample ? "≈ " : ""}${row.bytes_per_token.toFixed(2)}` : "–") },
    { name: "rejected", of: (row) => row.rejected, show: (row) => whole(row.rejected) },
  ], rows, { sort: 2, most: 100 });
  const notes = [];
  if (all > 100) notes.push(`The largest 100 of ${whole(all)} files.`);
  if (rows.some((row) => row.is_sample)) notes.push("≈: of the first unit of a file.");
  return [shown, notes.length ? note(notes.join(" ")) : null].filter(Boolean);
}

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
  const { of = "0", split = "", source = "", least = "", most = "", text = "", first = "" } = given;
  const key = JSON.stringify({ of, split, source, least, most, text, first });
  if (listed?.key !== key) listed = makeList(key, { of, split, source, least, most, text, first });
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
    field("Split", choice([["", "all"], ...store.splits.map((name) => [name, name])], asked.split, (split) => filter({ split, first: "" })), "half"),
    field("Source", choice([["", "all"], ...store.sources.map((path, place) => [place, path])], asked.source, (source) => filter({ source, first: "" })), "half"),
    field("Tokens, at least", number("least", asked.least)),
    field("at most", number("most", asked.most)),
    field("From number", number("first", asked.first))));
  made.at = el("section", { class: "card list", "aria-label": "List of documents" }, form, rows, end);

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
      const { split, source, least, most, text, of } = asked;
      const found = await ask("documents", { of, split, source, least, most, text, first: made.next, count: kept ? "" : 50 });
      rows.append(...found.documents.map(line));
      made.next = found.next;
      const seen = found.next ?? found.end;
      const looked = text || least || most ? `, looked at ${percent(seen - found.begin, found.end - found.begin)}` : ` of ${whole(found.end - found.begin)}`;
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
  const parts = shown < found.tokens && el("div", { class: "turn small" },
    button("‹ before", () => turn(Math.max(0, found.first - shown)), { disabled: found.first === 0, id: "before" }),
    button("after ›", () => turn(found.first + shown), { disabled: found.first + shown >= found.tokens, id: "after" }),
    el("span", { class: "soft" }, `tokens ${whole(found.first)} to ${whole(found.first + shown)} of ${whole(found.tokens)}`));
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

// --- The frame: bar, routes, keys ---------------------------------------------------------------

let about = null;
const PAGES = { overview, documents };
const TITLES = { overview: "Overview", documents: "Documents" };
const link = (page, given = {}) => {
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value != null && value !== "")).toString();
  return `#${page}${query && `?${query}`}`;
};
const go = (page, given) => { location.hash = link(page, given); };

function route() {
  const [page, query = ""] = location.hash.slice(1).split("?");
  return { page: page in PAGES ? page : "overview", given: Object.fromEntries(new URLSearchParams(query)) };
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
  for (const each of charts) if (!each.at.isConnected) { each.plot?.destroy(); charts.delete(each); }
  const before = $("#main").firstElementChild;
  if (before !== drawn[0]) $("#main").replaceChildren(...drawn);
  document.title = `${TITLES[page]} · tokenmill`;
  document.body.dataset.shown = location.hash || "#overview";
}

function bar(page, given) {
  const of = given.of ?? "0";
  const names = Object.keys(PAGES);
  $("#bar").replaceChildren(
    el("span", { class: "brand" }, "tokenmill"),
    el("nav", { "aria-label": "Pages" }, names.map((name) => el("a", { href: link(name, { of: of === "0" ? "" : of }), "aria-current": name === page ? "page" : null }, TITLES[name]))),
    el("div", { class: "tools" },
      about.stores.length > 1 && choice(about.stores.map((store, place) => [place, store.name]), of, (chosen) => go(page, { of: chosen })),
      button("◐", swapTheme, { "aria-label": "Light or dark", title: "Light or dark (t)", id: "theme" }),
      button("?", () => $("#help").showModal(), { "aria-label": "Keys", title: "Keys (?)" })));
}

function swapTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  for (const each of charts) each.redraw();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const each of charts) each.redraw(); });

const KEYS = [
  ["1 … 5", "pages", null],
  ["/", "search", () => { if (route().page !== "documents") go("documents", {}); setTimeout(() => $("#search")?.focus(), 150); }],
  ["j ↓", "next document", () => listed?.at.isConnected && listed.step(1)],
  ["k ↑", "document before", () => listed?.at.isConnected && listed.step(-1)],
  ["n", "next part of a long document", () => $("#after")?.click()],
  ["p", "part before", () => $("#before")?.click()],
  ["t", "light or dark", swapTheme],
  ["?", "these keys", () => $("#help").showModal()],
];

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const key = { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→" }[event.key] ?? event.key;
  const page = Object.keys(PAGES)[Number(key) - 1];
  const act = page ? () => go(page, {}) : KEYS.find(([names, , does]) => does && names.split(" ").includes(key))?.[2];
  if (!act || $("#help").open) return;
  if (/[↑↓]/.test(key) && route().page !== "documents") return;
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
