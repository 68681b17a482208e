// A step on a canvas: lanes of spans, and below them quantities over the same time axis. Dragging zooms; spans narrower
// than a pixel are summed in columns, so that every zoom shows the busy time of each kind, and nearer ones show each span.

const GUTTER = 136; // pixels for names at the left
const AXIS = 22;
const STRIP = 74; // height of a quantity over time
const GAP = 8;
const LEAST_PX = 1.5; // narrower spans are summed
const MOST_HEIGHT = 620; // of the lanes, before they scroll
const CLICK_PX = 4; // a drag shorter than this is a click

const views = new WeakMap();

export default function ({ data, parentElement, setStateValue }) {
  let view = views.get(parentElement);
  if (!view) {
    view = new Timeline(parentElement);
    views.set(parentElement, view);
  }
  view.tell = (span) => setStateValue("window", span);
  view.show(data);
  return () => view.pause();
}

class Timeline {
  constructor(root) {
    this.root = root;
    const find = (name) => root.querySelector(`.${name}`);
    this.box = find("scroll");
    this.lanes = find("lanes");
    this.strips = find("strips");
    this.tip = find("tip");
    this.line = find("line");
    this.brush = find("brush");
    this.detail = find("detail");
    this.frame = find("frame");
    this.legend = find("legend");
    this.id = null;
    this.width = 0;
    this.selected = -1;
    this.listen(find);
  }

  // --- data ---------------------------------------------------------------------------------------------------------

  show(data) {
    if (!this.sizes) {
      this.sizes = new ResizeObserver(() => this.fit());
      this.sizes.observe(this.frame);
    }
    if (data.key === this.key) return;
    this.key = data.key;
    const again = data.id === this.id;
    this.id = data.id;
    this.data = data;
    this.start = floats(data.spans.start);
    this.seconds = floats(data.spans.seconds);
    this.busy = data.spans.busy ? floats(data.spans.busy) : this.seconds;
    this.kind = integers(data.spans.kind);
    this.name = integers(data.spans.name);
    this.count = data.spans.count ? integers(data.spans.count) : null;
    this.rows = rows(integers(data.spans.lane), data.lanes.length, this.start, this.seconds);
    this.quantities = data.strips.map((one) => ({ ...one, time: floats(one.time), value: floats(one.value) }));
    if (!again) {
      this.window = [...data.window];
      this.selected = -1;
      this.describe(-1);
    }
    if (again) this.selected = -1;
    this.lanes.setAttribute("aria-label", data.about);
    this.showLegend();
    const height = this.lanePx() * data.lanes.length;
    this.box.style.maxHeight = `${MOST_HEIGHT}px`;
    this.lanes.style.height = `${height}px`;
    this.strips.style.height = `${AXIS + this.quantities.length * (STRIP + GAP)}px`;
    this.fit();
  }

  showLegend() {
    const used = new Set(this.kind);
    const items = this.data.kinds.filter((_, i) => used.has(i)).map((look) => {
      const item = document.createElement("li");
      const patch = document.createElement("i");
      patch.style.background = look.colour;
      patch.style.opacity = look.strength;
      item.append(patch, look.name);
      return item;
    });
    this.legend.replaceChildren(...items);
  }

  lanePx() {
    return Math.max(12, Math.min(30, Math.floor(MOST_HEIGHT / Math.max(1, this.data.lanes.length))));
  }

  pause() {
    this.sizes?.disconnect();
    this.sizes = null;
  }

  fit() {
    if (!this.data || !this.frame.clientWidth) return;
    this.gutter = this.frame.clientWidth < 560 ? 84 : GUTTER;
    this.width = this.lanes.clientWidth - this.gutter;
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.lanes, this.strips]) {
      canvas.width = Math.round(canvas.clientWidth * ratio);
      canvas.height = Math.round(canvas.clientHeight * ratio);
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.draw();
  }

  // --- the window ---------------------------------------------------------------------------------------------------

  to(begin, finish) {
    const length = this.data.length_s;
    const least = Math.max(1e-7, length * 1e-7);
    let wide = Math.min(length, Math.max(least, finish - begin));
    let from = Math.min(Math.max(0, begin), length - wide);
    this.window = [from, from + wide];
    this.draw();
    clearTimeout(this.later);
    if (this.data.partial) this.later = setTimeout(() => this.tell([...this.window]), 350);
  }

  zoom(factor, at) {
    const [begin, finish] = this.window;
    const pivot = at ?? (begin + finish) / 2;
    this.to(pivot - (pivot - begin) * factor, pivot + (finish - pivot) * factor);
  }

  move(share) {
    const [begin, finish] = this.window;
    const step = (finish - begin) * share;
    if (begin + step < 0 || finish + step > this.data.length_s) {
      const edge = step < 0 ? 0 : this.data.length_s - (finish - begin);
      this.to(edge, edge + finish - begin);
    } else this.to(begin + step, finish + step);
  }

  x(time) {
    const [begin, finish] = this.window;
    return this.gutter + ((time - begin) / (finish - begin)) * this.width;
  }

  time(x) {
    const [begin, finish] = this.window;
    return begin + ((x - this.gutter) / this.width) * (finish - begin);
  }

  // A label for the gutter; where that is narrow, ends that tell lanes apart would be cut off.
  shortened(label) {
    if (this.gutter === GUTTER) return label;
    return label.replace(/\brank /, "").replace("communication", "comm.");
  }

  // --- drawing ------------------------------------------------------------------------------------------------------

  draw() {
    if (this.width <= 0) return;
    const { ink, quiet, rule } = this.data.theme;
    const pen = this.lanes.getContext("2d");
    pen.clearRect(0, 0, this.lanes.clientWidth, this.lanes.clientHeight);
    const high = this.lanePx();
    const ticks = this.ticks();
    this.drawn = 0;
    pen.strokeStyle = rule;
    pen.lineWidth = 1;
    for (const tick of ticks) stroke(pen, this.x(tick), 0, this.x(tick), this.lanes.clientHeight);
    pen.font = `12px ${this.data.theme.font}`;
    pen.textBaseline = "middle";
    this.data.lanes.forEach((lane, row) => {
      const top = row * high;
      pen.fillStyle = lane.strong ? ink : quiet;
      write(pen, this.shortened(lane.label), 0, top + high / 2, this.gutter - 8);
      this.lane(pen, row, top + 2, high - 4);
    });
    this.axis(ticks);
    this.quantities.forEach((one, at) => this.strip(one, AXIS + at * (STRIP + GAP) + GAP));
    this.lanes.dataset.drawn = this.drawn;
    this.lanes.dataset.window = JSON.stringify(this.window);
    this.lanes.dataset.lanes = JSON.stringify(
      this.data.lanes.map((lane, row) => ({ label: lane.label, top: row * high + 2, height: high - 4 })),
    );
  }

  lane(pen, row, top, high) {
    const { order, reach } = this.rows[row];
    const [begin, finish] = this.window;
    const scale = this.width / (finish - begin);
    const columns = Math.ceil(this.width);
    const summed = new Map();
    for (let i = above(reach, begin); i < order.length; i++) {
      const span = order[i];
      const from = this.start[span];
      if (from >= finish) break;
      const to = from + this.seconds[span];
      if (to <= begin) continue;
      const left = (Math.max(from, begin) - begin) * scale;
      const right = (Math.min(to, finish) - begin) * scale;
      const kind = this.kind[span];
      if (right - left < LEAST_PX) {
        const column = Math.min(columns - 1, Math.floor((left + right) / 2));
        let heap = summed.get(column);
        if (!heap) summed.set(column, (heap = new Map()));
        heap.set(kind, (heap.get(kind) ?? 0) + (right - left) * this.share(span));
        continue;
      }
      this.span(pen, span, left, right, top, high);
    }
    for (const [column, heap] of summed) this.column(pen, heap, column, top, high);
  }

  share(span) {
    return this.seconds[span] > 0 ? Math.min(1, this.busy[span] / this.seconds[span]) : 1;
  }

  span(pen, span, left, right, top, high) {
    const look = this.data.kinds[this.kind[span]];
    const x = this.gutter + left;
    const wide = right - left;
    pen.globalAlpha = (look.strength ?? 1) * (0.35 + 0.65 * this.share(span));
    pen.fillStyle = look.colour;
    pen.fillRect(x, top, wide > 4 ? wide - 0.6 : wide, high);
    pen.globalAlpha = 1;
    this.drawn += 1;
    if (wide > 56 && high >= 14) {
      pen.fillStyle = look.ink;
      write(pen, this.title(span), x + 4, top + high / 2, wide - 8);
    }
    if (span === this.selected) {
      pen.strokeStyle = this.data.theme.ink;
      pen.lineWidth = 2;
      pen.strokeRect(x, top, Math.max(3, wide), high);
      pen.lineWidth = 1;
    }
  }

  // A pixel of summed spans: the kinds above each other, as high as their share of its time.
  column(pen, heap, column, top, high) {
    let whole = 0;
    for (const px of heap.values()) whole += px;
    const scale = high / Math.max(1, whole);
    let bottom = top + high;
    for (const [kind, px] of heap) {
      const tall = px * scale;
      pen.globalAlpha = this.data.kinds[kind].strength ?? 1;
      pen.fillStyle = this.data.kinds[kind].colour;
      pen.fillRect(this.gutter + column, bottom - tall, 1, tall);
      bottom -= tall;
      this.drawn += 1;
    }
    pen.globalAlpha = 1;
  }

  ticks() {
    const [begin, finish] = this.window;
    const about = (finish - begin) / Math.max(2, this.width / 110);
    const power = 10 ** Math.floor(Math.log10(about));
    const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= about);
    const found = [];
    for (let n = Math.ceil(begin / step); n * step <= finish; n++) found.push(n * step);
    this.tickStep = step;
    return found;
  }

  axis(ticks) {
    const pen = this.strips.getContext("2d");
    const { quiet, rule } = this.data.theme;
    pen.clearRect(0, 0, this.strips.clientWidth, this.strips.clientHeight);
    pen.font = `12px ${this.data.theme.font}`;
    pen.textBaseline = "middle";
    pen.fillStyle = quiet;
    pen.strokeStyle = rule;
    const [unit, size] = unitOf(this.window[1]);
    const digits = Math.max(0, Math.ceil(-Math.log10(this.tickStep / size) - 1e-9));
    write(pen, `time, ${unit}`, 0, AXIS / 2 + 2, this.gutter - 8);
    pen.textAlign = "center";
    for (const tick of ticks) {
      const x = this.x(tick);
      if (x < this.gutter + 12 || x > this.gutter + this.width - 12) continue;
      pen.fillText((tick / size).toFixed(Math.min(digits, 9)), x, AXIS / 2 + 2);
    }
    pen.textAlign = "left";
    for (const tick of ticks) stroke(pen, this.x(tick), AXIS, this.x(tick), this.strips.clientHeight);
  }

  // A quantity over time: the mean of each pixel for rates, the highest value for what must not be exceeded. Without a
  // limit, the strip is as high as what is drawn: bursts shorter than a pixel have means far below their peaks.
  strip(one, top) {
    const pen = this.strips.getContext("2d");
    const { ink, quiet, rule, bad } = this.data.theme;
    const columns = Math.ceil(this.width);
    const values = perPixel(one, this.window, columns);
    const most = one.limit ? Math.max(one.limit, one.most) : values.reduce((a, b) => Math.max(a, b), 0) || 1;
    const y = (value) => top + STRIP - (value / (most * 1.04)) * STRIP;
    pen.strokeStyle = rule;
    stroke(pen, this.gutter, top + STRIP, this.gutter + this.width, top + STRIP);
    pen.fillStyle = one.colour;
    pen.globalAlpha = 0.75;
    for (let column = 0; column < columns; column++) {
      const at = y(values[column]);
      pen.fillRect(this.gutter + column, at, 1, top + STRIP - at);
    }
    pen.globalAlpha = 1;
    if (one.limit) {
      pen.strokeStyle = bad;
      pen.setLineDash([5, 4]);
      stroke(pen, this.gutter, y(one.limit), this.gutter + this.width, y(one.limit));
      pen.setLineDash([]);
    }
    pen.fillStyle = ink;
    write(pen, this.shortened(one.label), 0, top + 10, this.gutter - 8);
    pen.fillStyle = quiet;
    write(pen, one.about, 0, top + 27, this.gutter - 8);
    if (!one.limit) write(pen, `height ${figure(most, 2)} ${one.unit}`, 0, top + 43, this.gutter - 8);
  }

  // --- spans under the pointer ----------------------------------------------------------------------------------------

  at(x, y) {
    const row = Math.floor(y / this.lanePx());
    if (row < 0 || row >= this.data.lanes.length || x < this.gutter) return -1;
    const { order, reach } = this.rows[row];
    const slack = (2 / this.width) * (this.window[1] - this.window[0]);
    const when = this.time(x);
    let best = -1;
    let near = Infinity;
    for (let i = above(reach, when - slack); i < order.length; i++) {
      const span = order[i];
      if (this.start[span] > when + slack) break;
      const away = Math.max(this.start[span] - when, when - this.start[span] - this.seconds[span], 0);
      if (away <= slack && away <= near) [best, near] = [span, away];
    }
    return best;
  }

  title(span) {
    const many = this.count?.[span] ?? 1;
    return many > 1 ? `${many} short spans` : this.data.names[this.name[span]];
  }

  words(span, row) {
    const length = this.seconds[span];
    const share = (100 * length) / this.data.length_s;
    const part = share >= 0.1 ? `${share.toFixed(1)} % of the step` : "under 0.1 % of the step";
    const lane = row === undefined ? "" : `${this.data.lanes[row].label} · `;
    const busy = this.share(span) < 0.995 ? `, busy for ${seconds(this.busy[span])}` : "";
    return {
      title: this.title(span),
      about: `${lane}${this.data.kinds[this.kind[span]].name} · ${seconds(length)}${busy}, from ${seconds(this.start[span], 6)} · ${part}`,
    };
  }

  alike(span) {
    if (this.count) return "";
    let count = 0;
    let total = 0;
    const row = this.rowOf(span);
    for (const other of this.rows[row].order) {
      if (this.name[other] === this.name[span]) {
        count += 1;
        total += this.seconds[other];
      }
    }
    return count > 1 ? ` ${count.toLocaleString("en")} spans of this name in the lane take ${seconds(total)}.` : "";
  }

  rowOf(span) {
    return this.rows.findIndex((row) => row.has(span));
  }

  describe(span) {
    this.detail.replaceChildren();
    if (span < 0) {
      this.detail.textContent = "Click a span for its details.";
      return;
    }
    const { title, about } = this.words(span, this.rowOf(span));
    const strong = document.createElement("strong");
    strong.textContent = title;
    this.detail.append(strong, ` · ${about}.${this.alike(span)}`);
  }

  select(span) {
    this.selected = span;
    this.describe(span);
    if (span >= 0) {
      const [begin, finish] = this.window;
      const [from, to] = [this.start[span], this.start[span] + this.seconds[span]];
      const wide = finish - begin;
      if (from < begin || to > finish) return this.to(from - wide / 2, from + wide / 2);
    }
    this.draw();
  }

  next(way) {
    const row = this.selected < 0 ? 0 : this.rowOf(this.selected);
    const { order } = this.rows[row];
    if (!order.length) return;
    const at = this.selected < 0 ? above(this.rows[row].reach, this.window[0]) - way : order.indexOf(this.selected);
    this.select(order[Math.min(order.length - 1, Math.max(0, at + way))]);
  }

  otherRow(way) {
    const row = Math.max(0, this.selected < 0 ? 0 : this.rowOf(this.selected));
    const when = this.selected < 0 ? this.window[0] : this.start[this.selected];
    for (let other = row + way; other >= 0 && other < this.rows.length; other += way) {
      const { order, reach } = this.rows[other];
      if (order.length) return this.select(order[Math.min(order.length - 1, above(reach, when))]);
    }
  }

  // --- the pointer and the keyboard -----------------------------------------------------------------------------------

  listen(find) {
    find("in").onclick = () => this.zoom(0.5);
    find("out").onclick = () => this.zoom(2);
    find("whole").onclick = () => this.to(0, this.data.length_s);
    this.lanes.onkeydown = (event) => this.press(event);
    for (const canvas of [this.lanes, this.strips]) {
      canvas.onpointerdown = (event) => this.down(canvas, event);
      canvas.onpointermove = (event) => this.over(canvas, event);
      canvas.onpointerup = (event) => this.up(canvas, event);
      canvas.onpointercancel = () => this.drop();
      canvas.onpointerleave = () => this.away();
      canvas.ondblclick = () => this.to(0, this.data.length_s);
      canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    }
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const does = {
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.to(0, this.data.length_s),
      ArrowLeft: () => (event.shiftKey ? this.next(-1) : this.move(-0.25)),
      ArrowRight: () => (event.shiftKey ? this.next(1) : this.move(0.25)),
      ArrowUp: () => this.otherRow(-1),
      ArrowDown: () => this.otherRow(1),
      Escape: () => this.select(-1),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    event.stopPropagation();
    does();
  }

  down(canvas, event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    canvas.setPointerCapture(event.pointerId);
    this.drag = { from: event.offsetX, moves: event.shiftKey, window: [...this.window], far: 0 };
  }

  over(canvas, event) {
    const x = event.offsetX;
    this.line.style.display = x > this.gutter ? "block" : "none";
    this.line.style.left = `${x}px`;
    if (!this.drag) return this.hover(canvas, event);
    this.drag.far = Math.max(this.drag.far, Math.abs(x - this.drag.from));
    if (this.drag.moves) {
      const [begin, finish] = this.drag.window;
      const by = ((this.drag.from - x) / this.width) * (finish - begin);
      const from = Math.min(Math.max(0, begin + by), this.data.length_s - (finish - begin));
      this.to(from, from + finish - begin);
    } else if (this.drag.far >= CLICK_PX) {
      const [left, right] = [Math.min(x, this.drag.from), Math.max(x, this.drag.from)];
      this.brush.style.display = "block";
      this.brush.style.left = `${Math.max(left, this.gutter)}px`;
      this.brush.style.width = `${Math.max(0, right - Math.max(left, this.gutter))}px`;
    }
  }

  up(canvas, event) {
    const drag = this.drag;
    this.drop();
    if (event.pointerType === "touch") return this.tap(canvas, event);
    if (!drag) return;
    const ends = [drag.from, event.offsetX].sort((a, b) => a - b);
    if (drag.far < CLICK_PX) this.tap(canvas, event);
    else if (!drag.moves) this.to(this.time(Math.max(ends[0], this.gutter)), this.time(ends[1]));
  }

  tap(canvas, event) {
    if (canvas === this.lanes) this.select(this.at(event.offsetX, event.offsetY));
  }

  drop() {
    this.drag = null;
    this.brush.style.display = "none";
  }

  away() {
    this.tip.style.display = "none";
    this.line.style.display = "none";
  }

  hover(canvas, event) {
    const lines = canvas === this.lanes ? this.spanLines(event) : this.stripLines(event);
    this.tip.style.display = lines.length ? "block" : "none";
    if (!lines.length) return;
    this.tip.replaceChildren(...lines.map(([tag, text]) => Object.assign(document.createElement(tag), { textContent: text })));
    const frame = this.frame.getBoundingClientRect();
    const x = event.clientX - frame.left;
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(x + 14, frame.width - wide - 4))}px`;
    this.tip.style.top = `${event.clientY - frame.top + 18}px`;
  }

  spanLines(event) {
    const span = this.at(event.offsetX, event.offsetY);
    if (span < 0) return [];
    const { title, about } = this.words(span);
    return [
      ["strong", title],
      ["div", about],
    ];
  }

  stripLines(event) {
    const when = this.time(event.offsetX);
    if (event.offsetX < this.gutter) return [];
    return [
      ["div", `at ${seconds(when, 6)}`],
      ...this.quantities.map((one) => ["div", `${one.label}: ${figure(valueAt(one, when))} ${one.unit}`]),
    ];
  }

  wheel(event) {
    if (!(event.ctrlKey || event.metaKey)) return; // the page scrolls
    event.preventDefault();
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.offsetX));
  }
}

// --- columns of numbers ---------------------------------------------------------------------------------------------

function bytes(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found.buffer;
}

const floats = (text) => new Float64Array(bytes(text));
const integers = (text) => new Int32Array(bytes(text));

// The spans of each lane in the order of their starts, and how far they reach: the latest end so far.
function rows(lane, count, start, seconds) {
  const members = Array.from({ length: count }, () => []);
  for (let i = 0; i < lane.length; i++) members[lane[i]].push(i);
  return members.map((own) => {
    own.sort((a, b) => start[a] - start[b]);
    const reach = new Float64Array(own.length);
    let latest = -Infinity;
    own.forEach((span, i) => (reach[i] = latest = Math.max(latest, start[span] + seconds[span])));
    const set = new Set(own);
    return { order: own, reach, has: (span) => set.has(span) };
  });
}

// The first position of a rising column whose value is above `value`.
function above(column, value) {
  let [low, high] = [0, column.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

function valueAt(one, when) {
  const at = above(one.time, when) - 1;
  return at < 0 ? 0 : one.value[at];
}

function perPixel(one, [begin, finish], columns) {
  const values = new Float64Array(columns);
  const wide = (finish - begin) / columns;
  let at = Math.max(0, above(one.time, begin) - 1);
  for (let column = 0; column < columns; column++) {
    const [from, to] = [begin + column * wide, begin + (column + 1) * wide];
    let sum = 0;
    let most = 0;
    while (at < one.time.length && one.time[at] < to) {
      const ends = at + 1 < one.time.length ? one.time[at + 1] : Infinity;
      const lasts = Math.min(ends, to) - Math.max(one.time[at], from);
      if (lasts > 0 || ends === one.time[at]) {
        sum += one.value[at] * Math.max(0, lasts);
        most = Math.max(most, one.value[at]);
      }
      if (ends > to) break;
      at += 1;
    }
    values[column] = one.highest ? most : sum / wide;
  }
  return values;
}

// --- words and lines --------------------------------------------------------------------------------------------------

function unitOf(seconds) {
  return [
    ["s", 1],
    ["ms", 1e-3],
    ["µs", 1e-6],
  ].find(([, size]) => seconds >= 2 * size) ?? ["µs", 1e-6];
}

function seconds(value, digits = 3) {
  const [unit, size] = value >= 1 ? ["s", 1] : value >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
  return `${figure(value / size, digits)} ${unit}`;
}

function figure(value, digits = 3) {
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

function stroke(pen, ...[x, y, toX, toY]) {
  pen.beginPath();
  pen.moveTo(Math.round(x) + 0.5, y);
  pen.lineTo(Math.round(toX) + 0.5, toY);
  pen.stroke();
}

// Text that ends with an ellipsis where it is longer than `most` pixels.
function write(pen, text, x, y, most) {
  if (pen.measureText(text).width <= most) return pen.fillText(text, x, y);
  let kept = text;
  while (kept.length > 1 && pen.measureText(`${kept}…`).width > most) kept = kept.slice(0, -1);
  if (kept.length > 1) pen.fillText(`${kept}…`, x, y);
}
