"use strict";
// Tables by DataTables, plots by plotly: both stand in this page, which asks nothing of any network.
const dark = matchMedia("(prefers-color-scheme: dark)");

function inPlace(id) { return JSON.parse(document.getElementById(id).textContent); }

function themed(layout) {
  const ink = dark.matches ? "#e6edf3" : "#1b1f24", line = dark.matches ? "#3a424b" : "#d0d7de";
  const own = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink } };
  const axes = Object.keys(layout).filter((key) => /^[xy]axis/.test(key));
  for (const axis of axes) own[axis] = { ...layout[axis], gridcolor: line, zerolinecolor: line };
  return { ...layout, ...own };
}

// A name in two lines of about the same length, broken at a hyphen.
function inTwoLines(name) {
  const places = [...name.matchAll(/-/g)].map((found) => found.index + 1);
  if (!places.length) return name;
  const middle = places.reduce((best, at) => Math.abs(2 * at - name.length) < Math.abs(2 * best - name.length) ? at : best);
  return `${name.slice(0, middle)}<br>${name.slice(middle)}`;
}

// On a phone long names of rows, which plotly would cut off, stand in two lines.
function shortNames(figure) {
  const rows = (trace) => trace.type === "box" ? [trace.name] : typeof trace.y?.[0] === "string" ? trace.y : [];
  const names = [...new Set(figure.data.flatMap(rows))];
  if (!names.some((name) => name.length > 24)) return figure.layout;
  const ticks = { tickmode: "array", tickvals: names, ticktext: names.map(inTwoLines), tickfont: { size: 9 } };
  return { ...figure.layout, yaxis: { ...figure.layout.yaxis, ...ticks } };
}

// On a phone a legend's entries stand one below another, and the plot is taller by them.
function roomy(place, figure) {
  const entries = figure.layout.showlegend === false ? 0 : figure.data.filter((trace) => trace.name).length;
  const room = place.clientWidth < 500 && entries > 1 ? 20 * entries + 10 : 0;
  place.dataset.height ||= parseInt(place.style.height, 10);
  place.style.height = `${Number(place.dataset.height) + room}px`;
  const layout = place.clientWidth < 500 ? shortNames(figure) : figure.layout;
  if (!room) return layout;
  const corner = { orientation: "v", x: 0, xanchor: "left", y: 1, yref: "container", yanchor: "top" };
  return { ...layout, legend: corner, margin: { ...layout.margin, t: room } };
}

function draw(place, figures, index) {
  const figure = figures[index];
  place.setAttribute("aria-label", figure.label);
  // Nothing of a page leaves it: plotly would offer to upload a plot.
  const config = { responsive: true, displaylogo: false, showSendToCloud: false };
  Plotly.react(place, figure.data, themed(roomy(place, figure)), config);
}

function plot(place) {
  const figures = inPlace(place.dataset.figures), chooser = document.getElementById(place.dataset.chooser);
  const redraw = () => draw(place, figures, chooser ? chooser.selectedIndex : 0);
  if (chooser) chooser.addEventListener("change", redraw);
  dark.addEventListener("change", redraw);
  redraw();
}

function whenSeen(places, show) {
  const watch = new IntersectionObserver((seen) => {
    for (const entry of seen.filter((one) => one.isIntersecting)) { watch.unobserve(entry.target); show(entry.target); }
  }, { rootMargin: "200px" });
  places.forEach((place) => watch.observe(place));
}

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  try { await navigator.clipboard.writeText(source.textContent); } catch {
    getSelection().selectAllChildren(source);
    document.execCommand("copy");
  }
  document.getElementById("said").textContent = "Copied.";
  button.textContent = "Copied";
}

// Change parts of the page's link: a cell, two compared cases, and how each table is filtered and sorted.
function remember(changes) {
  const link = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(changes)) link.set(name, value);
  for (const [name, value] of [...link]) if (!value) link.delete(name);  // a section's name, or what is no more asked for
  history.replaceState(null, "", link.size ? `#${link}` : location.pathname + location.search);
}

function showEvidence(cells, key) {
  const dialog = document.getElementById("evidence");
  for (const [name, text] of Object.entries(cells[key])) dialog.querySelector(`[data-of="${name}"]`).textContent = text;
  remember({ cell: key });
  dialog.showModal();
}

// A link may name a cell of the clauses, or two cases that are compared: #cell=KEY, #compare=A&with=B. What it says of
// tables, such as table.Cases=..., is read where they are made.
function followLink(cells, facts) {
  const asked = new URLSearchParams(location.hash.slice(1)), key = asked.get("cell");
  if (key !== null && Object.hasOwn(cells, key)) showEvidence(cells, key);
  const [first, second] = ["compare-first", "compare-second"].map((id) => document.getElementById(id));
  if (!first) return;
  const names = Object.keys(facts), [one, other] = ["compare", "with"].map((name) => names.indexOf(asked.get(name)));
  if (one >= 0) first.selectedIndex = one;
  if (other >= 0) second.selectedIndex = other;
  else if (second.options.length > 1) second.selectedIndex = 1;
  compare(facts);
  if (asked.has("compare")) document.getElementById("compare").scrollIntoView();
}

// The names of the chosen cases. Choices are in the order of the facts, and may not show a name as it is.
function chosen(facts) {
  return ["compare-first", "compare-second"].map((id) => Object.keys(facts)[document.getElementById(id).selectedIndex]);
}

function compare(facts) {
  const [one, other] = chosen(facts).map((name) => facts[name]);
  const body = document.querySelector("#compared tbody");
  body.replaceChildren();
  for (const name of new Set([...Object.keys(one), ...Object.keys(other)])) {
    const [first, second] = [one, other].map((facts) => facts[name] ?? ["", null]);
    const known = first[1] !== null && second[1] !== null && first[1] !== 0 && name !== "rank";
    const row = body.insertRow();
    if (first[0] !== second[0]) row.className = "differs";
    for (const text of [name, first[0], second[0], known ? (second[1] / first[1]).toPrecision(3) : ""]) {
      row.insertCell().textContent = text;
    }
  }
}

async function addPage(facts, file) {
  const there = new DOMParser().parseFromString(await file.text(), "text/html").getElementById("facts");
  const said = document.getElementById("said");
  if (!there) { said.textContent = `${file.name} is no page of Meshmark with cases.`; return; }
  const [before] = chosen(facts);
  const added = Object.entries(JSON.parse(there.textContent)).map(([name, of]) => [`${name} (${file.name})`, of]);
  for (const [name, of] of added) {
    if (Object.hasOwn(facts, name)) { facts[name] = of; continue; }  // the same file once more
    facts[name] = of;
    for (const id of ["compare-first", "compare-second"]) document.getElementById(id).add(new Option(name, name));
  }
  const same = Object.keys(facts).indexOf(`${before} (${file.name})`);
  document.getElementById("compare-second").selectedIndex = same < 0 ? Object.keys(facts).indexOf(added[0][0]) : same;
  said.textContent = `${added.length} cases of ${file.name} were added.`;
  compare(facts);
}

// What a link says of a table: DataTables' state without what is as it always is.
function tableState(data) {
  const typed = Object.entries(data.columnControl ?? {}).filter(([, one]) => one.searchInput?.value || one.searchList?.length);
  const state = {};
  if (data.search.search) state.search = data.search.search;
  if (data.order.length) state.order = data.order;
  if (typed.length) state.columns = Object.fromEntries(typed);
  return Object.keys(state).length ? JSON.stringify(state) : "";
}

// The state that a link asks for, as DataTables reads it; null where it asks for none, or for what is no state.
function askedState(name) {
  try {
    const asked = JSON.parse(new URLSearchParams(location.hash.slice(1)).get(name));
    if (!asked) return null;
    const order = Array.isArray(asked.order) ? asked.order : [], columnControl = asked.columns ?? {};
    const search = { search: String(asked.search ?? ""), smart: true, regex: false, caseInsensitive: true };
    return { time: Date.now(), order, search, columnControl };
  } catch { return null; }
}

function askedTables() {
  return JSON.stringify([...new URLSearchParams(location.hash.slice(1))].filter(([name]) => name.startsWith("table.")));
}

async function sortable(tables) {
  const bytes = Uint8Array.from(atob(document.getElementById("datatables").textContent.trim()), (c) => c.charCodeAt(0));
  const url = URL.createObjectURL(new Blob([bytes], { type: "text/javascript" }));
  const { default: DataTable } = await import(url);
  const columns = ["order", ["search"]];
  for (const table of tables) {
    const narrow = table.classList.contains("heat");  // a heat map has no room for controls: a click on a title sorts
    const name = `table.${table.dataset.what}`;
    new DataTable(table, { paging: false, info: false, order: [], autoWidth: false, columnControl: narrow ? [] : columns,
      ordering: { indicators: false, handler: narrow },
      stateSave: true, stateDuration: -1, stateLoadCallback: () => askedState(name),
      stateSaveCallback: (_, data) => remember({ [name]: tableState(data) }),
      language: { search: `Filter ${table.dataset.what}:` } });
  }
  for (const button of document.querySelectorAll("table.data thead button")) {
    const column = button.closest("th").querySelector(".dt-column-title").textContent;
    button.setAttribute("aria-label", `${button.textContent.trim()} ${column}`);  // a page has many that say as little
  }
  document.documentElement.dataset.ready = "yes";
}

addEventListener("DOMContentLoaded", () => {
  const follow = () => document.documentElement.classList.toggle("dark", dark.matches);
  dark.addEventListener("change", follow);
  follow();
  whenSeen(document.querySelectorAll(".plot"), plot);
  document.querySelectorAll("button[data-copy]").forEach((b) => b.addEventListener("click", () => copy(b)));
  const cells = document.getElementById("cells") ? inPlace("cells") : {};
  document.querySelectorAll("button[data-cell]").forEach((b) =>
    b.addEventListener("click", () => showEvidence(cells, b.dataset.cell)));
  const facts = document.getElementById("facts") ? inPlace("facts") : {};
  for (const chooser of document.querySelectorAll("#compare select")) {
    chooser.addEventListener("change", () => {
      compare(facts);
      const [one, other] = chosen(facts);
      remember({ compare: one, with: other });
    });
  }
  document.getElementById("compare-page")?.addEventListener("change", (e) => addPage(facts, e.target.files[0]));
  document.getElementById("evidence").addEventListener("close", () => remember({ cell: "" }));
  addEventListener("hashchange", () => {
    // A link that was typed or clicked on this very page. Sections' links say nothing of tables, and change none.
    if (askedTables() === "[]") followLink(cells, facts); else location.reload();
  });
  followLink(cells, facts);
  sortable(document.querySelectorAll("table.data"));
});
