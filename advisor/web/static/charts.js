// Three charts over the last five minutes. Colours are read from the page, so that themes live in the style sheet alone.
"use strict";
(() => {
  const KEPT_SECONDS = 300;
  const SHARE_WINDOW_SECONDS = 10;
  const SOURCES = ["g1", "g2", "g3", "g4", "recomputed"];
  const QUARTERS = [0, 0.25, 0.5, 0.75, 1];
  const NOTHING = "–";

  let samples = [];

  const colour = (selector, property) => getComputedStyle(document.querySelector(selector))[property];
  const percent = (share) => (share == null ? NOTHING : `${share === 0 ? 0 : (share * 100).toPrecision(3)} %`);
  const clock = (second) => `${new Date(second * 1000).toISOString().slice(11, 19)} UTC`;

  function perSecond(value) {
    if (value == null) return NOTHING;
    const rounded = Number(value.toPrecision(3));
    const step = ["", "k", "M", "G"].findIndex((_, power) => Math.abs(rounded) < 1000 ** (power + 1) || power === 3);
    const digits = rounded === 0 ? "0" : (rounded / 1000 ** step).toPrecision(3);
    return `${digits} ${["", "k", "M", "G"][step]}`.trimEnd() + " events/s";
  }

  // Shares of each source over the window that ends at each second: null where no prompt block was counted.
  function shares() {
    return samples.map((sample, index) => {
      const before = samples[Math.max(0, index - SHARE_WINDOW_SECONDS)];
      const counted = SOURCES.map((source) => sample.origin[source] - before.origin[source]);
      const total = counted.reduce((sum, count) => sum + count, 0);
      return total > 0 ? counted.map((count) => count / total) : null;
    });
  }

  const charts = [
    {
      name: "origin",
      element: document.getElementById("origin-chart"),
      // Topmost first: each area is drawn from its cumulative share down to 0 over those before it.
      series: () => [...SOURCES].reverse().map((source) => {
        const paint = colour(`.legend i.${source === "recomputed" ? "rc" : source}`, "backgroundColor");
        return { fill: paint, stroke: paint, width: 0, points: { show: false } };
      }),
      values() {
        const each = shares();
        return SOURCES.map((_, depth) =>
          each.map((share) => share && share.slice(0, SOURCES.length - depth).reduce((sum, one) => sum + one, 0)));
      },
      range: () => [0, 1],
      ticks: (_, splits) => splits.map((split) => `${Math.round(split * 100)} %`),
      splits: () => QUARTERS,
      linesOnTop: true,
      read(index) {
        const share = shares()[index];
        SOURCES.forEach((source, place) => write(source, percent(share && share[place])));
      },
    },
    {
      name: "events",
      element: document.getElementById("events-chart"),
      series: () => [line("events-chart")],
      values: () => [samples.map((sample) => sample.events_per_s)],
      range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1],
      ticks: (_, splits) => splits.map((split) => perSecond(split).replace(" events/s", "")),
      read: (index) => write("events", perSecond(samples[index]?.events_per_s)),
    },
    {
      name: "fast",
      element: document.getElementById("fast-chart"),
      series: () => [{ ...line("fast-chart"), spanGaps: true }],
      values: () => [samples.map((sample) => sample.fast_hit_ratio)],
      range: () => [0, 1],
      ticks: (_, splits) => splits.map((split) => `${Math.round(split * 100)} %`),
      splits: () => QUARTERS,
      read: (index) => write("fast", percent(samples[index]?.fast_hit_ratio)),
    },
  ];

  function line(id) {
    const stroke = colour(`#${id}`, "color");
    return { stroke, width: 1.5, points: { show: false }, fill: `color-mix(in srgb, ${stroke} 8%, transparent)` };
  }

  function write(series, text) {
    document.querySelector(`[data-series="${series}"]`).textContent = text;
  }

  // The readout follows the cursor; without one it shows the newest second.
  function read(chart) {
    const pointed = chart.plot?.cursor.idx;
    const index = pointed ?? samples.length - 1;
    const time = document.querySelector(`[data-time="${chart.name}"]`);
    time.textContent = pointed == null || !samples[index] ? "" : `at ${clock(samples[index].time_s)}`;
    chart.read(index);
  }

  function linesOver(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour(".card", "backgroundColor");
    ctx.globalAlpha = 0.5;
    for (const share of QUARTERS.slice(1, -1)) {
      const y = Math.round(bbox.top + bbox.height * (1 - share)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  }

  // A label at the left edge would run into those of the other axis.
  function hours(plot, splits) {
    return splits.map((split) => (plot.valToPos(split, "x") < 20 ? "" : clock(split).slice(0, 8)));
  }

  function data(chart) {
    return [samples.map((sample) => sample.time_s), ...chart.values()];
  }

  function size(chart) {
    return { width: chart.element.clientWidth, height: chart.element.clientHeight };
  }

  function build(chart) {
    chart.plot?.destroy();
    const axis = { stroke: colour("h2 + p", "color"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: colour(".card", "borderTopColor"), width: 1 };
    chart.plot = new uPlot({
      ...size(chart),
      padding: [6, 24, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: !chart.linesOnTop } },
      tzDate: (second) => uPlot.tzDate(new Date(second * 1000), "Etc/UTC"),
      scales: { y: { range: chart.range } },
      axes: [
        { ...axis, grid: { show: false }, space: 80, size: 24, values: hours },
        { ...axis, grid: chart.linesOnTop ? { show: false } : grid, space: 36, size: 46, splits: chart.splits, values: chart.ticks },
      ],
      series: [{}, ...chart.series()],
      hooks: { setCursor: [() => read(chart)], draw: chart.linesOnTop ? [linesOver] : [] },
    }, data(chart), chart.element);
  }

  function draw() {
    for (const chart of charts) {
      const filled = chart.values().some((values) => values.some((value) => value != null)) && samples.length > 1;
      chart.element.classList.toggle("filled", filled);
      if (!filled) continue;
      if (chart.plot) chart.plot.setData(data(chart));
      else build(chart);
      read(chart);
    }
  }

  function point(chart, key) {
    if (!chart.plot || !samples.length) return;
    const last = samples.length - 1;
    const now = chart.plot.cursor.idx ?? last;
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[key];
    const left = key === "Escape" ? -10 : chart.plot.valToPos(samples[Math.min(last, Math.max(0, next))].time_s, "x");
    chart.plot.setCursor({ left, top: key === "Escape" ? -10 : 1 });
  }

  for (const chart of charts) {
    new ResizeObserver(() => chart.plot?.setSize(size(chart))).observe(chart.element);
    chart.element.addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
      event.preventDefault();
      point(chart, event.key);
    });
  }

  async function load() {
    const answer = await fetch(`/api/v1/samples?seconds=${KEPT_SECONDS}`);
    if (!answer.ok) return;
    samples = await answer.json();
    draw();
  }

  load();
  // What happened while the stream was away is fetched, not lost.
  document.addEventListener("htmx:sse:after:connection", (event) => {
    if (event.detail.connection.attempt > 0) load();
  });
  document.addEventListener("sample", (event) => {
    const sample = JSON.parse(event.detail.data);
    if (!sample || (samples.length && sample.time_s <= samples[samples.length - 1].time_s)) return;
    samples = [...samples, sample].slice(-KEPT_SECONDS);
    draw();
  });
  document.addEventListener("themechange", () => charts.forEach((chart) => chart.plot && build(chart)));
})();
