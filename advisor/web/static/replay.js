// Charts of a replay's page: lines over a capacity, a time or a cost. Colours are the page's, so that themes live there.
"use strict";
(() => {
  const COLOURS = 8;
  const STEPS = ["", "k", "M", "G", "T", "P"];
  const DASHES = [[], [6, 4], [2, 3]];
  const charts = JSON.parse(document.getElementById("charts").textContent);

  const percent = (share) => `${(share * 100).toPrecision(share && share < 0.0995 ? 2 : 3)} %`;

  function scaled(value) {
    if (value === 0) return "0 ";
    const rounded = Number(value.toPrecision(3));
    const step = Math.max(0, STEPS.findIndex((_, power) => Math.abs(rounded) < 1000 ** (power + 1) || power === STEPS.length - 1));
    return `${Number((rounded / 1000 ** step).toPrecision(3))} ${STEPS[step]}`;
  }

  function moment(seconds) {
    if (seconds > 0 && seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
    const whole = Math.round(seconds);
    const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
    if (hours) return `${hours} h ${minutes} min`;
    return minutes ? `${minutes} min` : `${whole} s`;
  }

  const WRITTEN = { share: percent, rate: (value) => scaled(value).trimEnd(), count: (value) => scaled(value).trimEnd(), bytes: (value) => `${scaled(value)}B`, seconds: moment };
  const tick = (unit, value) => (value == null ? "" : unit === "share" ? `${Number((value * 100).toPrecision(3))} %` : WRITTEN[unit](value));

  // Of a logarithmic scale only 1, 2 and 5 of each power of ten have a label.
  const roundNumber = (value) => ([1, 2, 5].includes(Number(value.toExponential(0).split("e")[0])) ? value : null);

  // light-dark() is only resolved as a property that takes a colour.
  function colour(name) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const { color } = getComputedStyle(probe);
    probe.remove();
    return color;
  }

  // Every line has x of its own; the plot wants one x for all, with holes.
  function aligned(lines) {
    const all = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const place = new Map(all.map((x, index) => [x, index]));
    const values = lines.map((line) => {
      const row = new Array(all.length).fill(null);
      line.x.forEach((x, index) => { row[place.get(x)] = line.values[index]; });
      return row;
    });
    return [all, ...values];
  }

  function stackedOf(data) {
    const sums = data[0].map(() => 0);
    return [data[0], ...data.slice(1).map((row) => row.map((value, index) => (sums[index] += value ?? 0)))];
  }

  class Plot {
    constructor(id, chart) {
      this.chart = chart;
      this.element = document.getElementById(id);
      this.names = document.getElementById(`${id}-names`);
      this.shown = chart.lines.map(() => true);
      this.raw = aligned(chart.lines);
      this.buttons = chart.lines.map((line, index) => this.button(line, index));
      this.build();
      new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.element);
    }

    paint(index) {
      const policies = this.chart.lines.filter((line) => !line.bound);
      const line = this.chart.lines[index];
      if (line.bound) return { stroke: colour("--ink2"), dash: [2, 4] };
      if (line.quiet) return { stroke: colour("--rc"), dash: [] };
      const place = policies.indexOf(line);
      return { stroke: colour(`--s${place % COLOURS}`), dash: DASHES[Math.floor(place / COLOURS) % DASHES.length] };
    }

    button(line, index) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      swatch.setAttribute("viewBox", "0 0 20 8");
      swatch.setAttribute("aria-hidden", "true");
      const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, value] of Object.entries({ x1: 0, x2: 20, y1: 4, y2: 4, "stroke-width": this.chart.stacked ? 8 : 3 })) stroke.setAttribute(name, value);
      swatch.append(stroke);
      const value = document.createElement("b");
      button.append(swatch, line.name, value);
      button.addEventListener("click", () => {
        this.shown[index] = !this.shown[index];
        button.setAttribute("aria-pressed", String(this.shown[index]));
        this.build();
      });
      this.names.append(button);
      return button;
    }

    size() {
      return { width: this.element.clientWidth, height: this.element.clientHeight };
    }

    build() {
      this.plot?.destroy();
      const { chart } = this;
      const axis = { stroke: colour("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: colour("--line"), width: 1 } };
      const data = [this.raw[0], ...this.raw.slice(1).map((row, index) => (this.shown[index] ? row : row.map(() => null)))];
      const drawn = chart.stacked ? stackedOf(data) : data;
      const series = chart.lines.map((line, index) => {
        const { stroke, dash } = this.paint(index);
        this.buttons[index].querySelector("line").setAttribute("stroke", stroke);
        this.buttons[index].querySelector("line").setAttribute("stroke-dasharray", chart.stacked ? "" : dash.join(" "));
        const filled = chart.stacked ? { fill: stroke, width: 0 } : { width: 2 };
        return { stroke, dash, spanGaps: !chart.stacked && chart.x_unit !== "seconds", show: this.shown[index], points: { show: !chart.stacked && (chart.points || line.x.length < 14), size: 6, fill: stroke }, ...filled };
      });
      // Drawn from the back: the highest sum first.
      const order = chart.stacked ? [...series.keys()].reverse() : [...series.keys()];
      this.plot = new uPlot({
        ...this.size(),
        padding: [8, 18, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { show: !chart.stacked } },
        scales: { x: { time: false, distr: chart.logarithmic ? 3 : 1, range: (_, low, high) => (low < high ? [low, high] : [low / 2, high * 2 || 1]) }, y: { range: (_, low, high) => [0, chart.y_unit === "share" && high > 0.9 ? 1 : (high || 1) * 1.08] } },
        axes: [
          { ...axis, space: 70, size: 40, label: chart.x_name, labelSize: 16, labelFont: "11px system-ui, sans-serif", values: (_, splits) => splits.map((split) => tick(chart.x_unit, split)), filter: chart.logarithmic ? (_, splits) => splits.map(roundNumber) : undefined },
          { ...axis, space: 36, size: 52, values: (_, splits) => splits.map((split) => tick(chart.y_unit, split)) },
        ],
        series: [{}, ...order.map((index) => series[index])],
        hooks: { setCursor: [(plot) => this.read(plot.cursor.idx)] },
      }, [drawn[0], ...order.map((index) => drawn[index + 1])], this.element);
      this.read(null);
    }

    // Where the cursor is, or the last of each line: its own nearest x.
    read(index) {
      this.chart.lines.forEach((line, place) => {
        const row = this.raw[place + 1];
        let at = index ?? row.length - 1;
        for (let step = 0; step < row.length && row[at] == null; step += 1) {
          const near = (index ?? row.length - 1) + (step % 2 ? 1 : -1) * Math.ceil((step + 1) / 2);
          if (near >= 0 && near < row.length) at = near;
        }
        const value = row[at];
        const cell = this.buttons[place].querySelector("b");
        cell.textContent = index == null || value == null ? "" : WRITTEN[this.chart.y_unit](value);
      });
      const where = this.element.parentElement.querySelector(".at") ?? this.place();
      where.textContent = index == null ? "" : `${this.chart.x_name} ${tick(this.chart.x_unit, this.raw[0][index])}`;
    }

    place() {
      const where = document.createElement("span");
      where.className = "at";
      this.element.parentElement.append(where);
      return where;
    }
  }

  const plots = Object.entries(charts).map(([id, chart]) => new Plot(id, chart));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.build()));
})();
