"use strict";
// Draws state.json, and asks for it again every two seconds. What jobs are called is only ever set
// as text (textContent, setAttribute), never read as HTML.

const POLL_MS = 2000;
const NUM_COLOURS = 10;
const SVG = "http://www.w3.org/2000/svg";
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200,
  86400, 172800, 604800, 1209600, 2592000];

let state = null;
let chosen = null; // number of the job that is picked out
let answered = 0;
let asked = 0; // questions; only the answer to the last one is drawn

const at = (id) => document.getElementById(id);
const colour = (job) => `c${job % NUM_COLOURS}`;

function element(kind, attributes = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

function drawn(kind, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function duration(seconds) {
  const value = Math.max(0, Math.round(seconds));
  if (value < 120) return `${value} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} d`;
}

function clock(seconds, step) {
  const when = new Date(seconds * 1000);
  const day = { month: "short", day: "numeric" };
  const time = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (step >= 86400) return when.toLocaleDateString(undefined, day);
  return when.toLocaleTimeString(undefined, step < 60 ? { ...time, second: "2-digit" } : time);
}

function significant(value) {
  return value === null ? "" : String(Number(value.toPrecision(3)));
}

const percent = (part) => `${Math.round(part * 100)} %`;
const nameOf = (job) => state.names[job] ?? state.jobs.find((one) => one.number === job)?.name ?? "";

function choose(job) {
  chosen = chosen === job ? null : job;
  draw();
}

// ---- header and tiles

function drawHead() {
  const words = [state.folder];
  if (state.policy) words.push(`policy ${state.policy}`);
  if (state.engine) words.push(`engine ${state.engine}`);
  if (state.round_ends !== null && state.round_ends >= state.now) {
    words.push(`next round in ${duration(state.round_ends - state.now)}`);
  }
  at("about").textContent = words.join("  \u00b7  ");
  const late = state.round_ends === null ? 0 : state.now - state.round_ends;
  const open = (state.counts.queued ?? 0) + (state.counts.running ?? 0);
  at("warning").hidden = !(open && late > 15);
  at("warning").textContent =
    `The last round ended ${duration(late)} ago: it seems that no scheduler runs. Start it with hetflow cluster start.`;
  const held = state.devices.filter((device) => device.job !== null).length;
  const tiles = [
    ["devices held", `${held} of ${state.devices.length}`],
    ["running", state.counts.running ?? 0],
    ["queued", (state.counts.queued ?? 0) + (state.counts.submitted ?? 0)],
    ["held back", state.counts.held ?? 0],
    ["done", state.counts.done ?? 0],
  ];
  if (state.counts.cancelled) tiles.push(["cancelled", state.counts.cancelled]);
  at("tiles").replaceChildren(
    ...tiles.map(([what, number]) => element("li", {}, element("strong", {}, number), element("span", {}, what))),
  );
}

// ---- the Gantt chart

function rowsOfDevices() {
  // Devices of one type and server stand together.
  const order = state.devices.map((device, index) => ({ device, index }));
  order.sort((a, b) =>
    a.device.server.localeCompare(b.device.server, undefined, { numeric: true })
    || a.device.device_type.localeCompare(b.device.device_type)
    || a.index - b.index);
  return order;
}

function drawGantt() {
  const rows = rowsOfDevices();
  const place = new Map(rows.map(({ index }, row) => [index, row]));
  const width = Math.max(420, at("gantt").clientWidth || 1000);
  const height = Math.min(26, Math.max(7, Math.floor(900 / Math.max(1, rows.length))));
  const left = 150, right = 10, top = 6, foot = 24;
  const several = new Set(rows.map(({ device }) => device.server)).size > 1;
  let y = top;
  const ys = [];
  const labels = [];
  rows.forEach(({ device }, row) => {
    const before = rows[row - 1]?.device;
    if (several && before?.server !== device.server) {
      if (height >= 14) {
        y += row ? 6 : 0;
        labels.push(drawn("text", { x: 0, y: y + 12, class: "label server" }, device.server));
        y += 17;
      } else {
        y += row ? 5 : 0;
        labels.push(drawn("text", { x: 0, y: y + 9, class: "label server" }, device.server));
      }
    }
    ys.push(y);
    y += height;
  });
  const bottom = y;
  const span = state.now - state.since;
  const x = (time) => left + ((Math.max(state.since, time) - state.since) / span) * (width - left - right);
  const svg = drawn("svg", {
    viewBox: `0 0 ${width} ${bottom + foot}`, width, height: bottom + foot, role: "img",
    "aria-labelledby": "gantt-title gantt-note",
  });
  svg.append(drawn("defs", {}, drawn(
    "pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    drawn("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatch" }),
  )));
  rows.forEach(({ device }, row) => {
    const off = !device.is_up || device.is_drained;
    const strip = drawn("rect", {
      x: left, y: ys[row] + 1, width: width - left - right, height: height - 2, rx: 2,
      class: off ? "row off" : "row",
    });
    strip.append(drawn("title", {}, `${device.name}: ${stateOfDevice(device)}`));
    svg.append(strip);
    if (height >= 14) {
      const mark = device.is_up ? (device.is_drained ? " (drained)" : "") : " (down)";
      const text = drawn("text", { x: several ? 10 : 0, y: ys[row] + height / 2 + 4, class: "label" });
      const name = device.name.startsWith(`${device.server}/`)
        ? device.name.slice(device.server.length + 1) : device.name;
      text.append(clipped((several ? name : device.name) + mark, left - 14));
      text.append(drawn("title", {}, device.name));
      svg.append(text);
    }
  });
  svg.append(...labels);
  const step = STEPS.find((one) => span / one <= (width - left) / 90) ?? STEPS[STEPS.length - 1];
  const zone = new Date(state.now * 1000).getTimezoneOffset() * 60;
  for (let tick = Math.ceil((state.since - zone) / step) * step + zone; tick <= state.now; tick += step) {
    svg.append(drawn("line", { x1: x(tick), x2: x(tick), y1: top, y2: bottom + 4, class: "grid" }));
    const anchor = x(tick) > width - 40 ? "end" : "middle";
    svg.append(drawn("text", { x: x(tick), y: bottom + 18, class: "tick", "text-anchor": anchor }, clock(tick, step)));
  }
  for (const lease of state.leases) svg.append(...bars(lease, place, ys, height, x));
  svg.append(drawn("line", { x1: x(state.now), x2: x(state.now), y1: top, y2: bottom + 4, class: "now" }));
  at("gantt").replaceChildren(svg);
  const left_out = state.num_leases_left_out ? ` ${state.num_leases_left_out} earlier turns are left out.` : "";
  at("gantt-note").textContent = state.devices.length
    ? `A row for each device, a bar for each turn of a job, over the last ${duration(span)}.${left_out}`
    : "No scheduler has listed its devices yet.";
}

function bars(lease, place, ys, height, x) {
  // Neighbouring rows of one lease are one bar.
  const rows = lease.devices.map((index) => place.get(index)).sort((a, b) => a - b);
  const runs = [];
  for (const row of rows) {
    const last = runs[runs.length - 1];
    if (last && row === last.to + 1 && ys[row] - ys[row - 1] === height) last.to = row;
    else runs.push({ from: row, to: row });
  }
  const end = lease.ended ?? state.now;
  const from = x(lease.started), wide = Math.max(1.5, x(end) - from);
  const fade = chosen !== null && chosen !== lease.job ? " faded" : "";
  const name = nameOf(lease.job);
  return runs.map((run) => {
    const y = ys[run.from] + 1, tall = (run.to - run.from + 1) * height - 2;
    const bar = drawn("g", { class: `bar ${lease.state}${fade}` },
      drawn("rect", { x: from, y, width: wide, height: tall, rx: Math.min(3, wide / 3), class: colour(lease.job) }),
      drawn("title", {}, `${lease.job} ${name}, turn ${lease.number} (${lease.state}${lease.is_resized ? ", resized" : ""}): `
        + `${clock(lease.started, 1)} to ${lease.ended === null ? "now" : clock(end, 1)}, ${duration(end - lease.started)}`));
    const label = wide > 60 ? clipped(`${lease.job} ${name}`, wide - 8) : `${lease.job}`;
    if (tall >= 12 && wide > 8 + 6.5 * Math.min(label.length, 4)) {
      bar.append(drawn("text", { x: from + 4, y: y + tall / 2 + 4, class: "on-bar" }, label));
    }
    bar.addEventListener("click", () => choose(lease.job));
    return bar;
  });
}

function clipped(text, pixels) {
  const most = Math.max(1, Math.floor(pixels / 6.3));
  const letters = Array.from(text);
  return letters.length <= most ? text : letters.slice(0, Math.max(1, most - 1)).join("") + "\u2026";
}

function stateOfDevice(device) {
  if (!device.is_up) return "down";
  if (device.is_drained) return "drained";
  return device.job === null ? "free" : "held";
}

function drawDevices() {
  at("devices").replaceChildren(...rowsOfDevices().map(({ device }) => element("tr", {},
    element("td", {}, device.name), element("td", {}, device.device_type),
    element("td", {}, device.server), element("td", {}, stateOfDevice(device)),
    element("td", { class: "name" }, device.job === null ? "" : `${device.job} ${nameOf(device.job)}`),
  )));
}

// ---- utilisation and shares

function drawTypes() {
  at("types").replaceChildren(...state.types.map((type) => {
    const width = 600, height = 46, step = width / type.bins.length;
    const points = type.bins.flatMap((part, bin) => {
      const y = (1 - Math.min(1, part)) * (height - 3) + 1.5;
      return [`${(bin * step).toFixed(1)},${y.toFixed(1)}`, `${((bin + 1) * step).toFixed(1)},${y.toFixed(1)}`];
    });
    const up = type.num_up < type.num_devices ? `, ${type.num_up} can be used` : "";
    return element("div", { class: "type" },
      element("div", { class: "type-head" }, element("strong", {}, type.device_type),
        element("span", { class: "quiet" },
          `${percent(type.utilisation)} in the time shown; now ${type.num_held} of ${type.num_devices}${up}`)),
      drawn("svg", { viewBox: `0 0 ${width} ${height}`, height, preserveAspectRatio: "none", role: "img",
        "aria-label": `${type.device_type}: ${percent(type.utilisation)} of the device time was held` },
        drawn("rect", { width, height, class: "frame" }),
        drawn("polygon", { points: `0,${height} ${points.join(" ")} ${width},${height}`, class: "area" }),
        drawn("polyline", { points: points.join(" "), class: "edge", "vector-effect": "non-scaling-stroke" })));
  }));
}

function drawShares() {
  const open = state.jobs.filter((job) => job.ended === null && (job.received_seconds || job.target_seconds));
  const shown = open.sort((a, b) => a.number - b.number).slice(0, 24);
  const most = Math.max(1, ...shown.map((job) => Math.max(job.received_seconds, job.target_seconds)));
  const lines = shown.map((job) => {
    const deficit = job.target_seconds - job.received_seconds;
    const got = element("div", { class: `got ${colour(job.number)}` });
    const aim = element("div", { class: "aim" });
    got.style.width = `${(100 * job.received_seconds) / most}%`;
    aim.style.left = `${(100 * job.target_seconds) / most}%`;
    const verdict = Math.abs(deficit) < 0.01 * most ? "on target"
      : `${duration(Math.abs(deficit))} ${deficit > 0 ? "short" : "ahead"}`;
    return element("div", { class: "share", title: `received ${Math.round(job.received_seconds)}, target ${Math.round(job.target_seconds)} device-seconds` },
      element("span", { class: "name" }, `${job.number} ${job.name}`),
      element("div", { class: "track", "aria-hidden": "true" }, got, aim),
      element("span", { class: "verdict" }, verdict));
  });
  if (!lines.length) lines.push(element("p", { class: "quiet" }, "No open job has had a share yet."));
  if (open.length > shown.length) {
    lines.push(element("p", { class: "quiet" }, `${open.length - shown.length} more are in the queue below.`));
  }
  at("shares").replaceChildren(...lines);
}

// ---- the queue

function offBy(measured) {
  if (!measured?.predicted_steps_per_second) return "";
  const part = 100 * (measured.steps_per_second / measured.predicted_steps_per_second - 1);
  return `${part >= 0 ? "+" : "\u2212"}${Math.abs(part).toFixed(1)} %`;
}

function measuredText(measured) {
  if (measured === null) return "";
  const type = state.devices.find((device) => device.name === measured.devices[0])?.device_type;
  return significant(measured.steps_per_second) + (type === undefined ? "" : ` on ${type}`);
}

function drawQueue() {
  at("queue").replaceChildren(...state.jobs.map((job) => {
    const pick = element("button", { type: "button", class: "pick name", "aria-pressed": String(chosen === job.number) }, job.name);
    pick.addEventListener("click", () => choose(job.number));
    const wanted = job.wanted ? ` (${job.wanted})` : "";
    const next = job.resizing_to.length ? ` \u2192 ${job.resizing_to.join(", ")}` : "";
    const held = job.devices.length ? job.devices.join(", ") + next
      : job.ended === null ? `wants ${job.num_devices}` : "";
    const row = element("tr", {},
      element("td", { class: "number" }, job.number),
      element("td", {}, element("div", { class: "job-name" },
        element("span", { class: `chip ${colour(job.number)}`, "aria-hidden": "true" }), pick)),
      element("td", {}, element("span", { class: `state-${job.state}` }, job.state + wanted)),
      element("td", {}, held),
      element("td", { class: "number" }, significant(job.priority_weight)),
      element("td", { class: "number" }, job.share_devices === null ? "" : significant(job.share_devices)),
      element("td", { class: "number" }, significant(job.predicted_steps_per_second ?? job.measured?.predicted_steps_per_second ?? null)),
      element("td", { class: "number" }, measuredText(job.measured)),
      element("td", { class: "number" }, offBy(job.measured)),
      element("td", { class: "number" }, duration(job.received_seconds)),
      element("td", { class: "number" }, duration(job.target_seconds)),
      element("td", { class: "number" }, job.resizes ? `${job.leases} + ${job.resizes}` : job.leases),
      element("td", { class: "why name" }, job.reason ?? ""));
    if (chosen === job.number) row.classList.add("chosen");
    if (job.ended !== null) row.classList.add("over");
    return row;
  }));
  const left_out = state.num_jobs_left_out
    ? ` ${state.num_jobs_left_out} more open jobs are not shown; hetflow queue lists them.` : "";
  at("queue-note").textContent =
    `Share: devices that the policy gives a job on average now. Measured: in its last turn that was long enough, beside what was predicted for that turn. Received and target: device time. Starts: the second number counts changes of devices without a stop. Choose a name to pick a job out.${left_out}`;
}

function draw() {
  if (state === null) return;
  const focused = document.activeElement?.closest?.("#queue tr")?.rowIndex;
  drawHead();
  drawGantt();
  drawDevices();
  drawTypes();
  drawShares();
  drawQueue();
  if (focused) at("queue").rows[focused - 1]?.querySelector("button")?.focus();
}

// ---- asking

function say(text, live) {
  const status = at("status");
  status.className = live ? "status live" : "status lost";
  if (status.textContent !== text) status.textContent = text;
}

async function ask() {
  const mine = ++asked;
  try {
    const answer = await fetch(`state.json?window=${at("window").value}`, { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    const found = await answer.json();
    if (mine !== asked) return;
    found.jobs = found.jobs.map(({ queued, ...rest }) => ({ ...queued, ...rest }));
    state = found;
    answered = Date.now();
    if (getSelection().isCollapsed) draw(); // else a person copies something
    say("live", true);
  } catch (error) {
    const since = answered ? ` for ${duration((Date.now() - answered) / 1000)}` : "";
    say(error instanceof TypeError ? `no answer${since}` : error.message, false);
  }
}

async function keepAsking() {
  if (!document.hidden) await ask();
  setTimeout(keepAsking, POLL_MS);
}

at("window").addEventListener("change", ask);
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
window.addEventListener("resize", draw);
keepAsking();
