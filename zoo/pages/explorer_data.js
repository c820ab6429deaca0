"use strict";
// What the page holds: weights as bytes, by model, layer and image.

const DATA = JSON.parse(document.getElementById("data").textContent);
const KEPT = 3; // images of a model whose weights stay unpacked
const MEAN = -1; // in place of a head: the mean over all

const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

async function inflated(text) {
  const stream = new Blob([bytesOf(text)]).stream();
  const whole = stream.pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(whole).arrayBuffer());
}

// Queries or keys: patches of a grid, and other tokens by name before and after them.
class Side {
  constructor(raw, pool) {
    Object.assign(this, raw, { pool });
    if (!raw.grid) return;
    [this.rows, this.columns] = raw.grid.map((size) => Math.ceil(size / pool));
    this.patches = this.rows * this.columns;
  }

  namesOf(image) {
    return this.names[Math.min(image, this.names.length - 1)];
  }

  // Of the n-th token that is no patch.
  place(n) {
    return this.grid && n >= this.start ? n + this.patches : n;
  }

  patch(y, x) {
    return this.start + Math.floor(y / this.pool) * this.columns + Math.floor(x / this.pool);
  }
}

// The weights of a layer on one image.
class Weights {
  constructor(layer, codes, squares) {
    const { heads, queries, keys } = layer;
    Object.assign(this, { codes, squares, heads, i: queries.count, j: keys.count });
    if (codes.length !== heads * this.i * this.j) throw new Error(`${layer.name} is damaged`);
    this.sums = new Float32Array(heads * this.i);
    for (let row = 0, at = 0; row < this.sums.length; row++) {
      let sum = 0;
      for (const end = at + this.j; at < end; at++) sum += squares[codes[at]];
      this.sums[row] = sum || 1;
    }
  }

  // What a query gives to all keys, or (backwards) all queries to a key.
  of(head, index, backwards) {
    const out = new Float32Array(backwards ? this.i : this.j);
    const first = head === MEAN ? 0 : head;
    const last = head === MEAN ? this.heads : head + 1;
    const step = backwards ? this.j : 1;
    for (let h = first; h < last; h++) {
      let at = backwards ? h * this.i * this.j + index : (h * this.i + index) * this.j;
      for (let n = 0; n < out.length; n++, at += step) {
        const row = h * this.i + (backwards ? n : index);
        out[n] += this.squares[this.codes[at]] / this.sums[row] / (last - first);
      }
    }
    return out;
  }
}

class Model {
  constructor(raw) {
    Object.assign(this, raw);
    this.squares = Float32Array.from({ length: raw.top + 1 }, (_, code) => (code / raw.top) ** 2);
    this.layers = raw.layers.map((layer) => ({
      ...layer,
      queries: new Side(layer.queries, raw.pool),
      keys: new Side(layer.keys, 1),
    }));
    this.loaded = new Map();
  }

  // All layers on an image, unpacked.
  load(image) {
    let found = this.loaded.get(image);
    this.loaded.delete(image);
    if (!found) {
      const unpack = async (layer) => inflated(layer.chunks[image]);
      const made = async (layer) => new Weights(layer, await unpack(layer), this.squares);
      found = Promise.all(this.layers.map(made));
    }
    this.loaded.set(image, found);
    if (this.loaded.size > KEPT) this.loaded.delete(this.loaded.keys().next().value);
    return found;
  }
}

// Tokens that are no patches, as queries (q) and as keys (k): -1 where one is none.
function chipsOf(layer, image) {
  const asked = layer.queries.namesOf(image);
  const read = layer.keys.namesOf(image);
  const same = asked.length === read.length && asked.every((name, n) => name === read[n]);
  const chips = asked.map((name, n) => {
    return { name, q: layer.queries.place(n), k: same ? layer.keys.place(n) : -1 };
  });
  if (same) return chips;
  return chips.concat(read.map((name, n) => ({ name, q: -1, k: layer.keys.place(n) })));
}

// Where a token is in a layer: as a query, or as a key to be seen backwards; null where nowhere.
function resolve(layer, image, token, backwards) {
  const chips = chipsOf(layer, image);
  let place = { q: -1, k: -1 };
  if (token.chip !== undefined) {
    place = { ...place, ...chips[token.chip], chip: token.chip };
  } else {
    const grid = layer.queries.grid || layer.keys.grid;
    const y = Math.min(grid[0] - 1, Math.floor(token.y * grid[0]));
    const x = Math.min(grid[1] - 1, Math.floor(token.x * grid[1]));
    place = {
      q: layer.queries.grid ? layer.queries.patch(y, x) : -1,
      k: layer.keys.grid ? layer.keys.patch(y, x) : -1,
      y,
      x,
    };
  }
  if (place.q < 0 && place.k < 0) {
    const chip = chips.findIndex((each) => each.q >= 0);
    return chip < 0 ? null : { ...chips[chip], chip, backwards: false, index: chips[chip].q };
  }
  const turned = place.q < 0 || (backwards && place.k >= 0);
  return { ...place, backwards: turned, index: turned ? place.k : place.q };
}
