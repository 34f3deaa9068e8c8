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

// On a phone a legend's entries stand one below another, and the plot is taller by them.
function roomy(place, figure) {
  const entries = figure.layout.showlegend === false ? 0 : figure.data.filter((trace) => trace.name).length;
  const room = place.clientWidth < 500 && entries > 1 ? 20 * entries + 10 : 0;
  place.dataset.height ||= parseInt(place.style.height, 10);
  place.style.height = `${Number(place.dataset.height) + room}px`;
  if (!room) return figure.layout;
  const corner = { orientation: "v", x: 0, xref: "container", y: 1, yref: "container", yanchor: "top" };
  return { ...figure.layout, legend: corner, margin: { ...figure.layout.margin, t: room } };
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

function showEvidence(cells, key) {
  const dialog = document.getElementById("evidence");
  for (const [name, text] of Object.entries(cells[key])) dialog.querySelector(`[data-of="${name}"]`).textContent = text;
  dialog.showModal();
}

async function sortable(tables) {
  const bytes = Uint8Array.from(atob(document.getElementById("datatables").textContent.trim()), (c) => c.charCodeAt(0));
  const url = URL.createObjectURL(new Blob([bytes], { type: "text/javascript" }));
  const { default: DataTable } = await import(url);
  const columns = ["order", ["search"]];
  for (const table of tables) {
    new DataTable(table, { paging: false, info: false, order: [], autoWidth: false, columnControl: columns,
      ordering: { indicators: false, handler: false },
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
  sortable(document.querySelectorAll("table.data"));
});
