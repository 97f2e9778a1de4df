"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const curves = data.curves;
const narrow = () => window.innerWidth < 600;
const colors = ["#3b82c4", "#e07b1a", "#2f9e6e", "#c64b9b", "#b08a00", "#7a6ad8",
  "#d2503f", "#3aa6b9"];
const dashes = ["solid", "dash", "dot", "dashdot"];

// Plotly reads tags in texts; names from files are shown as they are.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;")
  .replace(/>/g, "&gt;");
const style = (name) => getComputedStyle(document.documentElement)
  .getPropertyValue(name).trim();

/* ---- numbers ---- */

const groups = new Map();
for (const run of curves.runs) {
  if (!groups.has(run.name)) groups.set(run.name, []);
  groups.get(run.name).push(run);
}

function along(run, axis) {
  const columns = run.columns;
  const rounds = columns.round;
  if (axis === "seconds") {
    return rounds.map((r) => run.seconds * r / rounds[rounds.length - 1]);
  }
  if (axis === "rounds") return rounds;
  if (axis === "megabytes") return columns.bytes.map((b) => Number(b) / 1e6);
  return columns[axis].map(Number);
}

// What ended early stays at its last value.
const at = (column, k) => column[Math.min(k, column.length - 1)];
const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;

function deviation(values) {
  const middle = mean(values);
  const squares = values.map((v) => (v - middle) ** 2);
  return Math.sqrt(squares.reduce((sum, v) => sum + v, 0) / (values.length - 1));
}

function curve(runs, metric, axis, factor) {
  const costs = runs.map((run) => along(run, axis));
  const values = runs.map((run) => run.columns[metric].map(Number));
  const length = Math.max(...values.map((column) => column.length));
  const made = { x: [], mean: [], low: [], high: [] };
  for (let k = 0; k < length; k += 1) {
    const here = values.map((column) => at(column, k));
    made.x.push(mean(costs.map((column) => at(column, k))));
    const half = factor ? factor * deviation(here) : 0;
    made.mean.push(mean(here));
    made.low.push(mean(here) - half);
    made.high.push(mean(here) + half);
  }
  return made;
}

/* ---- pictures ---- */

function shown(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential();
  return value.toLocaleString("en-US", { maximumFractionDigits: 10 });
}

// Ticks that can be read: 0.2, 0.5, 1, not a small 2 above a large 10.
function ticks(values) {
  const right = values.filter((v) => v > 0 && Number.isFinite(v));
  const low = Math.log10(right.reduce((a, b) => Math.min(a, b)));
  const high = Math.log10(right.reduce((a, b) => Math.max(a, b)));
  const every = high - low < 2.5 ? [1, 2, 5] : [1];
  const step = Math.max(1, Math.ceil((high - low) / 8));
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += step) {
    for (const one of every) found.push(Number(`${one}e${power}`));
  }
  return { tickvals: found, ticktext: found.map(shown) };
}

function axisOf(title, scale, values, more = {}) {
  const common = {
    title: { text: plain(title) }, gridcolor: style("--line"), automargin: true,
    zerolinecolor: style("--line"), separatethousands: true, exponentformat: "e",
  };
  return scale === "log" ? { ...common, type: "log", ...ticks(values) }
    : { ...common, type: "linear", ...more };
}

const layoutOf = (more) => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { color: style("--ink"), size: narrow() ? 12 : 14 },
  margin: { l: narrow() ? 48 : 64, r: 12, t: 12, b: 48 },
  ...more,
});
const CONFIG = {
  responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false,
};
const AXIS_TITLES = {
  exchanges: "exchanges with sites", megabytes: "megabytes sent",
  samples: ["samples drawn", curves.bound].filter(Boolean).join(", "), seconds: "seconds of running", rounds: "rounds",
};

function traces(metric, axis) {
  const made = [];
  const left = [];
  [...groups].forEach(([name, runs], number) => {
    const factor = curves.intervals[name];
    const one = curve(runs, metric, axis, factor);
    if (!(one.x[one.x.length - 1] > 0)) {
      left.push(name);
      return;
    }
    const color = colors[number % colors.length];
    const dash = dashes[Math.floor(number / colors.length) % dashes.length];
    const shared = { legendgroup: String(number), type: "scatter", mode: "lines" };
    if (factor) {
      made.push({
        ...shared, x: [...one.x, ...[...one.x].reverse()],
        y: [...one.high, ...[...one.low].reverse()], fill: "toself",
        fillcolor: `${color}33`, line: { width: 0 }, hoverinfo: "skip",
        showlegend: false, name: `band of ${plain(name)}`,
      });
    }
    const dots = one.x.length === 1 ? { mode: "markers" } : {};
    made.push({
      ...shared, ...dots, x: one.x, y: one.mean, name: plain(name), line: { color, dash },
      marker: { color }, showlegend: groups.size > 1,
    });
  });
  return { made, left };
}

function drawCurves() {
  const metric = document.getElementById("metric").value;
  const axis = document.querySelector("input[name=axis]:checked").value;
  const { made, left } = traces(metric, axis);
  const values = made.flatMap((trace) => trace.y);
  const goal = curves.target !== null && metric === curves.headline;
  const layout = layoutOf({
    xaxis: axisOf(AXIS_TITLES[axis], curves.axes[axis], made.flatMap((t) => t.x),
      { rangemode: "tozero" }),
    yaxis: axisOf(metric, curves.metrics[metric], values),
    legend: { orientation: "h", y: -0.22, x: 0, xanchor: "left", yanchor: "top" },
    shapes: goal ? [{
      type: "line", xref: "paper", x0: 0, x1: 1, y0: curves.target, y1: curves.target,
      line: { color: style("--soft"), width: 1, dash: "dot" },
    }] : [],
  });
  const place = document.getElementById("curves");
  place.setAttribute("aria-label", `${metric} against ${AXIS_TITLES[axis]}`);
  Plotly.react(place, made, layout, CONFIG);
  document.getElementById("notes").textContent = notes(left, goal, axis);
}

function notes(left, goal, axis) {
  const sentences = [];
  if (curves.runs.length > groups.size) {
    const many = [...groups.values()].map((runs) => runs.length);
    const [few, most] = [Math.min(...many), Math.max(...many)];
    const count = few === most ? most : `${few} to ${most}`;
    const band = Object.keys(curves.intervals).length ? "bands their 95 % t intervals"
      : "without intervals, which need 5";
    sentences.push(`Lines are means over ${count} random seeds, ${band}.`);
  }
  if (goal) {
    const value = Number(curves.target.toPrecision(4));
    sentences.push(`Dotted: ${value}, the target whose cost is in the table below.`);
  }
  if (left.length) {
    sentences.push(`Not drawn, at no cost in ${axis}: ${left.join(", ")}.`);
  }
  return sentences.join(" ");
}

const interval = (values, ends) => ({
  type: "data", symmetric: false, color: style("--ink"), thickness: 1.2, width: 4,
  array: values.map((v, k) => ends[k][1] - v),
  arrayminus: values.map((v, k) => v - ends[k][0]),
});

function drawPoints(one) {
  const [x, y, ends, rows] = ["predicted", "observed", "interval", "rows"]
    .map((name) => one.points.map((point) => point[name]));
  const far = Math.min(1, 1.05 * Math.max(...x, ...ends.map((pair) => pair[1])));
  const element = document.getElementById(one.id);
  element.style.height = "22rem";
  const scale = { tickformat: ",.0%", range: [0, far] };
  Plotly.react(element, [{
    x: [0, 1], y: [0, 1], mode: "lines", hoverinfo: "skip",
    line: { color: style("--soft"), width: 1, dash: "dot" },
  }, {
    x, y, mode: "markers+lines", error_y: interval(y, ends), customdata: rows,
    line: { color: colors[0] }, marker: { color: colors[0], size: 8 },
    hovertemplate: "%{y:.1%} of %{customdata} rows; predicted %{x:.1%}<extra></extra>",
  }], layoutOf({
    xaxis: axisOf(`predicted ${one.axis}`, "linear", x, scale),
    yaxis: axisOf("share of rows where it was the case", "linear", y, scale),
    showlegend: false,
  }), CONFIG);
}

// A label in three lines at most: the bars of a phone need most of its width.
function lines(text) {
  const length = narrow() ? 16 : 32;
  const made = [];
  for (const word of text.match(new RegExp(`\\S{1,${length}}`, "gu")) ?? [""]) {
    const longer = `${made.at(-1)} ${word}`;
    if (made.length && longer.length <= length) made.splice(-1, 1, longer);
    else made.push(word);
  }
  if (made.length > 3) made.splice(2, Infinity, `${made[2].slice(0, length - 1)}…`);
  return made;
}

function drawBars(one) {
  if (one.points) {
    drawPoints(one);
    return;
  }
  const names = Object.keys(one.series);
  const short = (text) => lines(text).map(plain).join("<br>");
  const places = one.labels.map((_, k) => k);
  const made = names.map((name, number) => ({
    type: "bar", orientation: "h", y: places, x: one.series[name], name: short(name),
    marker: { color: colors[number % colors.length] }, customdata: one.labels.map(plain),
    error_x: one.intervals && interval(one.series[name], one.intervals[name]),
    hovertemplate: "%{customdata}: %{x}<extra>%{fullData.name}</extra>",
    showlegend: names.length > 1,
  }));
  const tallest = Math.max(...one.labels.map((label) => lines(label).length));
  const thick = Math.max(1.5 * (one.stacked ? 1 : names.length), 1.1 * tallest);
  const element = document.getElementById(one.id);
  element.style.height = `${Math.max(9, 5 + thick * one.labels.length)}rem`;
  Plotly.react(element, made, layoutOf({
    barmode: one.stacked ? "stack" : "group",
    xaxis: axisOf(one.axis, "linear", []),
    yaxis: { tickvals: places, ticktext: one.labels.map(short), autorange: "reversed",
      automargin: true, ticklabelstandoff: 6 },
    legend: {
      orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom",
      traceorder: "normal",
    },
    margin: { l: 48, r: 12, t: names.length > 1 ? 40 : 8, b: 44 },
  }), CONFIG);
}

// A choice is part of the address: it stays when a page is read again, or sent on.
function remember() {
  const chosen = new URLSearchParams({
    metric: document.getElementById("metric").value,
    axis: document.querySelector("input[name=axis]:checked").value,
  });
  history.replaceState(null, "", `#${chosen}`);
}

function recall() {
  const chosen = new URLSearchParams(location.hash.slice(1));
  const metric = document.getElementById("metric");
  const wanted = chosen.get("metric");
  if (Object.hasOwn(curves.metrics, wanted)) metric.value = wanted;
  for (const one of document.querySelectorAll("input[name=axis]")) {
    if (one.value === chosen.get("axis")) one.checked = true;
  }
}

function draw() {
  drawCurves();
  data.bars.forEach(drawBars);
}

/* ---- tables to take away ---- */

function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  document.getElementById("done").textContent = "Copied.";
}

const quoted = (cell) => (/[",\n\r]/.test(cell) ? `"${cell.replace(/"/g, '""')}"` : cell);

function measurements() {
  const names = [...new Set(curves.runs.flatMap((run) => Object.keys(run.columns)))];
  const lines = [["algorithm", "seed", ...names]];
  for (const run of curves.runs) {
    run.columns.round.forEach((_, k) => {
      const cells = names.map((name) => (run.columns[name] || [])[k] ?? "");
      lines.push([run.name, run.seed ?? "", ...cells]);
    });
  }
  return lines.map((line) => line.map((c) => quoted(String(c))).join(",")).join("\n") + "\n";
}

const does = {
  copy: () => copy(data.table.tabs),
  command: () => copy(document.getElementById("command").textContent),
  csv: () => save(`${data.name}.csv`, data.table.csv),
  latex: () => save(`${data.name}.tex`, data.table.latex),
  columns: () => save(`${data.name}-measurements.csv`, measurements()),
};
for (const button of document.querySelectorAll("[data-does]")) {
  button.addEventListener("click", () => does[button.dataset.does]());
}

/* ---- Plotly, unpacked ---- */

async function unpacked() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function begin() {
  const script = document.createElement("script");
  script.textContent = await unpacked();
  document.head.append(script);
  recall();
  document.querySelector("form.choices").addEventListener("change", () => {
    drawCurves();
    remember();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  document.documentElement.dataset.drawn = "yes";
}

// Where Plotly cannot be unpacked, the sentence below the curves stays.
if ("DecompressionStream" in window) begin();
