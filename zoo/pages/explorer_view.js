// One model on the page: its view, chips, atlas and numbers.

// 0.4 %, 0.053 %, 12 %; less than a millionth is 0.
function percent(share) {
  if (share < 1e-6) return "0 %";
  return `${Number((100 * share).toPrecision(share < 0.001 ? 1 : 2))} %`;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// What tells layers apart: without the parts with which all names begin and end, where these are
// long, and else without a part in the middle.
function shortNames(names, most = 24) {
  if (Math.max(...names.map((name) => name.length)) <= most) return names;
  const split = names.map((name) => name.split("."));
  const least = Math.min(...split.map((parts) => parts.length)) - 1;
  const shared = (at) => split.every((parts) => parts.at(at) === split[0].at(at));
  let [head, tail] = [0, 0];
  if (names.length > 1) {
    while (head < least && shared(head)) head++;
    while (tail < least - head && shared(-1 - tail)) tail++;
  }
  return split.map((parts) => {
    const name = parts.slice(head, parts.length - tail).join(".");
    return name.length <= most ? name : `${name.slice(0, 9)}…${name.slice(10 - most)}`;
  });
}

class View {
  constructor(root, model, page) {
    Object.assign(this, { root, model, page, pictures: new Map() });
    const find = (name) => root.querySelector(`.${name}`);
    this.parts = Object.fromEntries(
      ["layer", "head", "chips", "view", "ramp", "even", "to", "readout", "remark", "numbers"].map(
        (name) => [name, find(name)],
      ),
    );
    this.context = this.parts.view.getContext("2d");
    // Rollout, which comes last, has no numbers.
    this.counted = model.layers.filter((layer) => layer.name !== "rollout").length;
    const names = shortNames(model.layers.slice(0, this.counted).map(({ name }) => name));
    model.layers.forEach(({ name }, n) => {
      const textContent = `${n}  ${names[n] || name}`;
      this.parts.layer.append(element("option", { value: n, textContent, title: name }));
    });
    this.layer = Math.max(0, model.layers.findLastIndex((layer) => layer.name !== "rollout"));
    this.head = MEAN;
    const heads = Math.max(...model.layers.map((layer) => layer.heads));
    const pick = (row, column) => page.choose(this, row, column);
    this.atlas = new Atlas(find("atlas"), model.layers.length, heads, pick);
    this.atlas.canvas.addEventListener("keydown", (event) => this.walk(event));
    this.matrices = model.measures.map((measure) => this.measured(measure, heads, pick));
    this.alike = this.likeness(heads);
    this.parts.layer.onchange = () => page.choose(this, +this.parts.layer.value, this.head);
    this.parts.head.onchange = () => page.choose(this, this.layer, +this.parts.head.value);
    this.listen();
  }

  get current() {
    return this.model.layers[this.layer];
  }

  measured(measure, heads, pick) {
    const canvas = element("canvas", { className: "matrix" });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${measure.title} of each layer and head`);
    const told = element("output");
    const title = element("strong", { textContent: measure.title });
    const caption = element("figcaption", {}, title, ` ${measure.explanation}`);
    this.parts.numbers.append(element("figure", {}, caption, canvas, told));
    const matrix = new Matrix(canvas, this.counted, heads, pick);
    const all = measure.rows.slice(0, this.counted).flat();
    const known = all.filter((value) => typeof value === "number");
    const limits = measure.limits || [Math.min(...known), Math.max(...known)];
    const tell = (row, head) => {
      const values = measure.rows[row];
      const some = (values || []).filter((value) => value !== null);
      const mean = some.reduce((sum, value) => sum + value, 0) / some.length;
      const value = head === MEAN ? mean : values && values[head];
      const text = Number.isFinite(value) ? value.toPrecision(3) : "not known";
      told.textContent = `layer ${row}, ${head === MEAN ? "mean" : `head ${head}`}: ${text}`;
    };
    canvas.addEventListener("pointermove", (event) => {
      const [row, column] = matrix.at(event);
      if (row >= 0) tell(row, column);
    });
    canvas.addEventListener("pointerleave", () => tell(this.layer, this.head));
    return { matrix, measure, limits, tell };
  }

  // Heads by heads, of the chosen layer.
  likeness(heads) {
    if (!this.model.similarity.some(Boolean) || heads < 2) return null;
    const canvas = element("canvas", { className: "matrix" });
    canvas.setAttribute("role", "img");
    const title = element("strong", { textContent: "Heads alike" });
    const caption = element("figcaption", {}, title, " in the chosen layer, by cosine");
    const figure = element("figure", {}, caption, canvas);
    this.parts.numbers.append(figure);
    const pick = (row) => this.page.choose(this, this.layer, row);
    const matrix = new Matrix(canvas, heads, heads, pick);
    return { matrix, figure };
  }

  listen() {
    const { view } = this.parts;
    const point = (event) => {
      const box = view.getBoundingClientRect();
      const y = (event.clientY - box.top) / box.height;
      const x = (event.clientX - box.left) / box.width;
      return y >= 0 && y < 1 && x >= 0 && x < 1 ? { y, x } : null;
    };
    view.addEventListener("pointermove", (event) => {
      const token = point(event);
      if (token && !this.page.pinned) this.page.look(token, this);
    });
    view.addEventListener("click", (event) => {
      const token = point(event);
      if (!token) return;
      const again = this.page.pinned && this.same(token, this.page.token);
      this.page.pin(!again);
      this.page.look(token, this);
    });
    view.addEventListener("keydown", (event) => this.page.key(event, this));
  }

  same(one, other) {
    if (other.chip !== undefined) return false;
    const at = (token) => resolve(this.current, this.page.image, token, false);
    const [a, b] = [at(one), at(other)];
    return a.y === b.y && a.x === b.x;
  }

  walk(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in step)) return;
    event.preventDefault();
    const [down, right] = step[event.key];
    const layer = Math.min(this.model.layers.length - 1, Math.max(0, this.layer + down));
    this.page.choose(this, layer, this.head + right, true);
  }

  // Weights of the image are at hand from here on.
  async open(image) {
    const picture = this.pictures.get(image) || (await pictured(this.model.images[image]));
    const weights = await this.model.load(image);
    this.pictures.set(image, picture);
    if (image !== this.page.image) return;
    [this.grey, this.weights] = [picture, weights];
    const { view } = this.parts;
    [view.width, view.height] = [picture.width, picture.height];
    this.parts.remark.textContent = this.model.images[image].remark;
    this.choose(this.layer, this.head);
  }

  choose(layer, head) {
    this.layer = layer;
    this.head = Math.min(this.current.heads - 1, Math.max(MEAN, head));
    const { head: select } = this.parts;
    const names = Array.from({ length: this.current.heads }, (_, n) => [n, n]);
    select.replaceChildren(
      ...[[MEAN, "mean"], ...names].map(([value, textContent]) => {
        return element("option", { value, textContent });
      }),
    );
    [this.parts.layer.value, select.value] = [layer, this.head];
    this.fillChips();
    this.drawNumbers();
  }

  fillChips() {
    const chips = chipsOf(this.current, this.page.image);
    this.chips = chips.map(({ name }, chip) => {
      const inside = [`${name} `, element("small"), element("i")];
      const button = element("button", { type: "button" }, ...inside);
      button.onpointerenter = () => this.page.pinned || this.page.look({ chip }, this);
      button.onfocus = button.onpointerenter;
      button.onclick = () => {
        this.page.pin(true);
        this.page.look({ chip }, this);
      };
      return button;
    });
    this.parts.chips.replaceChildren(...this.chips);
  }

  shown(row, head, place) {
    const layer = this.model.layers[row];
    const values = this.weights[row].of(head, place.index, place.backwards);
    return {
      values,
      side: place.backwards ? layer.queries : layer.keys,
      even: 1 / layer.keys.count,
      own: place.backwards || !layer.queries.grid ? layer.keys : layer.queries,
    };
  }

  draw() {
    if (!this.weights) return;
    const { page, current } = this;
    const place = resolve(current, page.image, page.token, page.backwards);
    if (!place) return;
    const shown = this.shown(this.layer, Math.min(this.head, current.heads - 1), place);
    drawView(this.context, this.grey, shown, place, page.options);
    this.drawAtlas();
    this.tell(shown, place);
  }

  drawAtlas() {
    const { page, model } = this;
    const { image, token, backwards } = page;
    const places = model.layers.map((layer) => resolve(layer, image, token, backwards));
    const found = (row, head) => places[row] && this.shown(row, head, places[row]);
    this.atlas.draw(model.layers, found, page.options.root);
    this.atlas.mark(this.layer, this.current.heads > 1 ? this.head : 0);
  }

  drawNumbers() {
    for (const { matrix, measure, limits, tell } of this.matrices) {
      matrix.label();
      matrix.numbers(measure.rows, limits);
      if (this.layer < this.counted) matrix.mark(this.layer, this.head);
      tell(this.layer, this.head);
    }
    if (!this.alike) return;
    const rows = this.model.similarity[this.layer];
    this.alike.figure.hidden = !rows;
    if (!rows) return;
    this.alike.matrix.label();
    this.alike.matrix.numbers(rows, [0, 1]);
    if (this.head !== MEAN) this.alike.matrix.mark(this.head, MEAN);
  }

  fit() {
    const width = this.root.querySelector(".right").clientWidth;
    this.atlas.name = (n) => (this.model.layers[n].name === "rollout" ? "all" : n);
    this.atlas.fit(this.model.layers, width, Math.max(320, 0.75 * window.innerHeight));
    const { matrices } = this;
    const small = (columns) => Math.max(4, Math.min(16, Math.floor((176 - EDGE) / columns)));
    for (const { matrix } of matrices) matrix.resize(small(matrix.columns));
    if (this.alike) this.alike.matrix.resize(small(this.alike.matrix.columns));
    if (this.weights) this.drawNumbers();
  }

  tell(shown, place) {
    const { values, side } = shown;
    const chips = chipsOf(this.current, this.page.image);
    const top = side.grid ? highest(shown) : 1;
    chips.forEach((chip, n) => {
      const at = place.backwards ? chip.q : chip.k;
      const [share, text] = at < 0 ? [0, ""] : [values[at], percent(values[at])];
      this.chips[n].style.setProperty("--share", Math.min(1, share / top));
      this.chips[n].querySelector("small").textContent = text;
      this.chips[n].setAttribute("aria-pressed", place.chip === n);
    });
    this.parts.to.textContent = percent(top);
    this.parts.even.textContent = `even share ${percent(shown.even)}`;
    this.parts.ramp.parentNode.hidden = !side.grid;
    const chip = chips[place.chip];
    const name = chip ? `“${chip.name}”` : this.capital(this.spot(shown.own, place.y, place.x));
    const many = !chip && shown.own.pool > 1;
    const [looks, seen] = many ? ["look", "are looked at"] : ["looks", "is looked at"];
    const does = place.backwards ? `${seen} most by` : `${looks} most at`;
    this.told = `${name} ${does} ${this.best(values, side, place.backwards)}`;
    this.parts.readout.textContent = this.told;
  }

  capital(text) {
    return text[0].toUpperCase() + text.slice(1);
  }

  spot(side, y, x) {
    const span = (n, most) => {
      const from = Math.floor(n / side.pool) * side.pool;
      const to = Math.min(from + side.pool, most);
      return to > from + 1 ? `s ${from + 1}–${to}` : ` ${to}`;
    };
    return `row${span(y, side.grid[0])}, column${span(x, side.grid[1])}`;
  }

  // The three patches of most weight, or words where there are no patches, as text.
  best(values, side, backwards) {
    const chips = chipsOf(this.current, this.page.image);
    const named = chips.map((chip) => [`“${chip.name}”`, values[backwards ? chip.q : chip.k]]);
    const spots = Array.from({ length: side.patches || 0 }, (_, n) => {
      const [y, x] = [Math.floor(n / side.columns) * side.pool, (n % side.columns) * side.pool];
      return [() => this.spot(side, y, x), values[side.start + n]];
    });
    const order = side.grid ? spots : named.filter(([, value]) => value !== undefined);
    order.sort(([, a], [, b]) => b - a);
    const tell = ([name, value]) => `${name.call ? name() : name} (${percent(value)})`;
    return order.slice(0, 3).map(tell).join("; ");
  }
}
