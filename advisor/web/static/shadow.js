// What each policy found over the last hour. Policies differ by dash, as in the table: colour means tier.
"use strict";
(() => {
  const LOAD_AGAIN_MS = 20000;
  const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3], [14, 4]];
  const element = document.getElementById("shadow-chart");
  const text = document.getElementById("shadow-read");
  let told = { times_us: [], policies: [] };
  let plot = null;
  let names = "";

  const colour = (selector, property) => getComputedStyle(document.querySelector(selector))[property];
  const percent = (share) => (share == null ? "–" : `${(share * 100).toFixed(1)} %`);
  const clock = (second) => new Date(second * 1000).toISOString().slice(11, 19);
  const data = () => [told.times_us.map((time) => time / 1e6), ...told.policies.map((policy) => policy.found_each)];
  const size = () => ({ width: element.clientWidth, height: element.clientHeight });

  // The readout follows the cursor; without one it shows the newest time.
  function read() {
    const at = plot?.cursor.idx ?? told.times_us.length - 1;
    const shares = told.policies.map((policy) => `${policy.name} ${percent(policy.found_each[at])}`);
    text.textContent = [`${clock(told.times_us[at] / 1e6)} UTC`, ...shares].join(" · ");
  }

  // A label at the left edge would run into those of the other axis.
  function times(chart, splits) {
    return splits.map((split) => (chart.valToPos(split, "x") < 20 ? "" : clock(split)));
  }

  function build() {
    plot?.destroy();
    const axis = { stroke: colour(".muted, .empty", "color"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: colour(".card", "borderTopColor"), width: 1 };
    plot = new uPlot({
      ...size(),
      padding: [6, 24, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      tzDate: (second) => uPlot.tzDate(new Date(second * 1000), "Etc/UTC"),
      scales: { y: { range: [0, 1] } },
      axes: [
        { ...axis, grid: { show: false }, space: 80, size: 24, values: times },
        { ...axis, grid, space: 36, size: 46, values: (_, splits) => splits.map((split) => `${Math.round(split * 100)} %`) },
      ],
      series: [{}, ...told.policies.map((_, place) => ({
        stroke: colour("body", "color"), width: place ? 1.25 : 2, dash: DASHES[place], points: { show: false }, spanGaps: true,
      }))],
      hooks: { setCursor: [read] },
    }, data(), element);
  }

  function draw() {
    const filled = told.times_us.length > 1 && told.policies.some((policy) => policy.found_each.some((share) => share != null));
    element.hidden = text.hidden = !filled;
    element.classList.toggle("filled", filled);
    if (!filled) return;
    const now = told.policies.map((policy) => policy.name).join();
    if (plot && now === names) plot.setData(data());
    else build();
    names = now;
    read();
  }

  async function load() {
    if (document.hidden) return;
    const answer = await fetch("/api/v1/policies/shadow");
    if (!answer.ok) return;
    told = await answer.json();
    draw();
  }

  element.addEventListener("keydown", (event) => {
    if (!plot || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const last = told.times_us.length - 1;
    const now = plot.cursor.idx ?? last;
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    const left = event.key === "Escape" ? -10 : plot.valToPos(told.times_us[Math.min(last, Math.max(0, next))] / 1e6, "x");
    plot.setCursor({ left, top: event.key === "Escape" ? -10 : 1 });
  });
  new ResizeObserver(() => plot && !element.hidden && plot.setSize(size())).observe(element);
  document.addEventListener("themechange", () => plot && build());
  // An advisor that is away is told of by the page; the next look finds it back.
  const look = () => load().catch(() => undefined);
  document.addEventListener("visibilitychange", look);
  setInterval(look, LOAD_AGAIN_MS);
  look();
})();
