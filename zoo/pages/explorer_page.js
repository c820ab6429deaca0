// What is chosen, and who is told.

class Page {
  constructor() {
    this.views = [...document.querySelectorAll(".model")].map(
      (root) => new View(root, new Model(DATA.models[root.dataset.model]), this),
    );
    this.strips = [...document.querySelectorAll(".gates")].map((root) => drawGates(root));
    [this.image, this.pinned, this.backwards] = [0, false, false];
    this.options = { root: false, smooth: true, strength: 0.65 };
    this.token = { chip: 0 };
    this.thumbnails();
    if (this.views.length) {
      if (!chipsOf(this.views[0].current, 0).length) this.token = { y: 0.5, x: 0.5 };
      this.controls();
    }
    this.restore();
  }

  find(name) {
    return document.getElementById(name);
  }

  thumbnails() {
    const [{ images }] = DATA.models;
    this.buttons = images.map(({ title, data, width, height }, n) => {
      const picture = element("img", { src: data, alt: "" });
      if (Math.max(width, height) <= 64) picture.className = "small";
      const name = element("span", { textContent: title });
      const button = element("button", { type: "button", title }, picture, name);
      button.onclick = () => this.open(n);
      return button;
    });
    this.find("pictures").replaceChildren(...this.buttons);
  }

  controls() {
    for (const name of ["root", "smooth"]) {
      this.find(name).onchange = (event) => {
        this.options[name] = event.target.checked;
        this.redraw();
      };
    }
    this.find("strength").oninput = (event) => {
      this.options.strength = event.target.value / 100;
      this.draw();
    };
    this.find("direction").onchange = (event) => this.turn(event.target.value === "from");
    this.find("pin").onclick = () => this.pin(!this.pinned);
    const refit = () => {
      this.views.forEach((view) => view.fit());
      this.redraw();
    };
    addEventListener("resize", refit);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refit);
    addEventListener("hashchange", () => this.restore());
  }

  turn(backwards) {
    this.backwards = backwards;
    if (!this.views.length) return;
    document.querySelector(`[name=direction][value=${backwards ? "from" : "to"}]`).checked = true;
    this.draw();
    this.keep();
  }

  pin(pinned) {
    this.pinned = pinned;
    this.find("pin").setAttribute("aria-pressed", pinned);
    this.find("pin").textContent = pinned ? "held" : "hold";
  }

  look(token) {
    this.token = token;
    this.draw();
    if (this.pinned) this.keep();
  }

  // Told to screen readers only where a key was pressed, not at each move of a pointer.
  announce(view) {
    this.find("told").textContent = view.told;
  }

  choose(view, layer, head) {
    const linked = this.views.length > 1 && this.find("linked").checked;
    for (const each of linked ? this.views : [view]) {
      each.choose(Math.min(layer, each.model.layers.length - 1), head);
    }
    this.draw();
    this.announce(view);
    this.keep();
  }

  async open(image) {
    this.image = image;
    this.buttons.forEach((button, n) => button.setAttribute("aria-pressed", n === image));
    this.strips.forEach((strip) => strip(image));
    await Promise.all(this.views.map((view) => view.open(image)));
    this.redraw();
    this.keep();
  }

  draw() {
    for (const view of this.views) view.draw();
  }

  redraw() {
    for (const view of this.views) drawRamp(view.parts.ramp, this.options.root);
    this.draw();
  }

  key(event, view) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const { key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (key in moves) this.move(view, ...moves[key]);
    else if (key === "PageUp" || key === "PageDown") this.step(view, key === "PageUp" ? -1 : 1, 0);
    else if (key === "," || key === ".") this.step(view, 0, key === "," ? -1 : 1);
    else if (key === "f") this.turn(!this.backwards);
    else if (key === "Enter" || key === " ") this.pin(!this.pinned);
    else if (key === "Escape") this.pin(false);
    else return;
    event.preventDefault();
    this.announce(view);
  }

  move(view, down, right) {
    const { queries, keys } = view.current;
    const side = queries.grid ? queries : keys;
    const [rows, columns] = side.grid;
    const from = this.token.chip === undefined ? this.token : { y: 0.5, x: 0.5 };
    const go = (at, by, size) => {
      const patch = Math.floor((Math.floor(at * size) + by * side.pool) / side.pool) * side.pool;
      return (Math.min(size - 1, Math.max(0, patch)) + 0.5) / size;
    };
    this.pin(true);
    this.look({ y: go(from.y, down, rows), x: go(from.x, right, columns) });
  }

  step(view, down, right) {
    const last = view.model.layers.length - 1;
    this.choose(view, Math.min(last, Math.max(0, view.layer + down)), view.head + right);
  }

  // The address remembers what is chosen: #image=2&layer=11&head=3&y=0.25&x=0.5&from=1
  keep() {
    const { token, views } = this;
    if (!views.length) return;
    const [y, x] = [token.y, token.x].map((at) => at && at.toFixed(3));
    const place = token.chip === undefined ? { y, x } : token;
    const [{ layer, head }] = views;
    const kept = { image: this.image, layer, head, ...place, from: +this.backwards };
    try {
      history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
    } catch {
      // Browsers refuse it inside some frames, and when asked too often.
    }
  }

  async restore() {
    const given = new URLSearchParams(location.hash.slice(1));
    const number = (name, low, high, other) => {
      const value = given.has(name) ? Number(given.get(name)) : NaN;
      return value >= low && value <= high ? value : other;
    };
    const whole = (name, high, other, low = 0) => Math.trunc(number(name, low, high, other));
    for (const view of this.views) {
      view.layer = whole("layer", view.model.layers.length - 1, view.layer);
      view.head = whole("head", view.current.heads - 1, view.head, MEAN);
      view.fit();
    }
    const [y, x] = ["y", "x"].map((name) => number(name, 0, 0.9999, NaN));
    if (y >= 0 && x >= 0) this.token = { y, x };
    else if (given.has("chip")) this.token = { chip: whole("chip", 1e4, 0) };
    if (this.views.length && (given.has("y") || given.has("chip"))) this.pin(true);
    this.turn(whole("from", 1, 0) === 1);
    await this.open(whole("image", this.buttons.length - 1, this.image));
    this.ready();
  }

  // For tests, which wait for it.
  ready() {
    document.documentElement.dataset.ready = "1";
  }
}

// The gates of a model; what is returned marks an image.
function drawGates(root) {
  const { gates, images } = DATA.models[root.dataset.model];
  const tall = Math.max(3, Math.min(10, Math.round(48 / images.length)));
  const drawn = gates.map((layer) => {
    const codes = bytesOf(layer.codes);
    const { channels } = layer;
    const sums = new Float64Array(channels);
    codes.forEach((code, n) => (sums[n % channels] += code));
    const order = Array.from(sums.keys()).sort((a, b) => sums[a] - sums[b]);
    const canvas = element("canvas", { width: channels, height: images.length });
    canvas.style.height = `${tall * images.length}px`;
    canvas.setAttribute("role", "img");
    const mean = sums.reduce((sum, value) => sum + value, 0) / codes.length / 255;
    const shown = (layer.low + mean * (layer.high - layer.low)).toPrecision(3);
    const text = `${layer.name}: ${channels} channels, mean ${shown}`;
    canvas.setAttribute("aria-label", text);
    const mark = element("div", { className: "mark" });
    const box = element("div", { className: "cells" }, canvas, mark);
    root.querySelector(".strips").append(
      element("div", { className: "strip" }, element("p", { textContent: text }), box),
    );
    const context = canvas.getContext("2d");
    const data = context.createImageData(channels, images.length);
    for (let row = 0; row < images.length; row++) {
      order.forEach((channel, x) => {
        const share = codes[row * channels + channel] / 255;
        put(data.data, 4 * (row * channels + x), TABLES.number, share);
      });
    }
    context.putImageData(data, 0, 0);
    return (image) => (mark.style.cssText = `top: ${tall * image}px; height: ${tall}px`);
  });
  drawn.forEach((mark) => mark(0));
  return (image) => drawn.forEach((mark) => mark(image));
}

function start() {
  const fail = (text) => {
    const failure = document.getElementById("failure");
    failure.textContent = text;
    failure.hidden = false;
    document.querySelectorAll(".loading").forEach((word) => word.remove());
  };
  addEventListener("unhandledrejection", (event) => fail(`Nothing can be shown: ${event.reason}`));
  addEventListener("error", (event) => fail(`Nothing can be shown: ${event.message}`));
  if (typeof DecompressionStream === "undefined") {
    fail(
      "This browser is too old to unpack what the page holds: it takes Chrome or Edge 97, " +
        "Firefox 113, Safari 16.4, or later ones.",
    );
    return;
  }
  window.explorer = new Page();
}
start();
